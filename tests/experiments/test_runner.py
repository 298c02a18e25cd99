"""Comparisons: results, resuming after a kill, and what is refused before a run starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from helpers.cli import error_of, run, succeed
from helpers.comparisons import processes_of, result_of, typed, write_grid
from helpers.training import (
    FINETUNE,
    STEP,
    Files,
    Program,
    launch_from_server,
    lines_in,
    log_of,
    make_recipe,
    make_train_config,
    save_converted,
    train_in,
    training_files,
    wait_until,
)

from fastweights.config import FastWeightsConfig
from fastweights.evaluation.perplexity import perplexity
from fastweights.evaluation.recall import ordinary_tokens, recall_probe
from fastweights.experiments import runner
from fastweights.experiments.base_model import ComparisonBase
from fastweights.experiments.grid import GridError, Variant
from fastweights.experiments.job import Job, Setup
from fastweights.loading import load, load_tokenizer
from fastweights.tokenization import bos_token
from fastweights.training import checkpoint
from fastweights.training.recipe import Recipe
from fastweights.utils.files import FileLock
from fastweights.utils.signals import stop_signals

# Steps that take longer than a run needs to notice that its parent has ended.
LONG = 120
LAUNCH = runner.launch
PAPER_CELL = {"table": "Table 1", "row": "decay", "column": "baseline", "paper": 18.8}
WILD = {"finetune.learning_rate": 0.3, "finetune.warmup": 0, "finetune.tokens": 50 * STEP}
RUNS: dict[str, Any] = {
    "base": None,
    "decay": {"rule": "decay", "gate_init": "log", "cell": PAPER_CELL},
    "wild": {"rule": "add", "set": {"finetune.learning_rate": 1e6}},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    with training_files(tmp_path_factory.mktemp("compare")) as made:
        yield made


@pytest.fixture(scope="module")
def compared(files: Files) -> tuple[Any, ...]:
    """The command of a finished comparison, and what it printed."""
    folder = files.folder / "compared"
    command = typed(files, write_grid(folder, RUNS), folder, "--test", files.validation, "--jobs", 2)
    return command, succeed(*command)


@pytest.fixture(scope="module")
def alone(files: Files) -> Path:
    """The run `decay`, as convert and train make it."""
    converted = save_converted(files.folder / "alone converted", files.base, gate_init="log")
    train_in(files.folder / "alone", make_train_config(files, make_recipe(FINETUNE), model=str(converted)))
    return files.folder / "alone"


def test_every_run_has_a_result(files: Files, compared: tuple[Any, ...]) -> None:
    output = files.folder / "compared"
    assert sorted(path.stem for path in (output / "results").iterdir()) == sorted(RUNS)
    for name in RUNS:
        result = result_of(output, name)
        assert result["kind"] == "training" and result["name"] == result["run"] == name
        assert result["commit"] and result["versions"] and result["seed"] == 0
    base, decay, wild = (result_of(output, name) for name in RUNS)
    assert base["model"]["settings"] is None and "cell" not in base and base["finished"]
    assert decay["model"]["settings"]["rule"] == "decay" and decay["model"]["settings"]["m"] == 4
    assert decay["cell"] == PAPER_CELL
    assert wild["recipe"]["stages"][0]["learning_rate"] == 1e6
    assert wild["diverged"]["step"] < 6 and not wild["finished"]
    assert wild["best"]["step"] == 0 and len(wild["tests"]) == 1  # of the model before the first step


def test_run_matches_convert_train_and_eval(files: Files, compared: tuple[Any, ...], alone: Path) -> None:
    output = files.folder / "compared"
    assert log_of(output / "runs/decay/training") == log_of(alone)
    result, expected = result_of(output, "decay"), json.loads((alone / "result.json").read_text())
    assert {name: result[name] for name in ("validation", "best", "curve", "recipe")} == {
        name: expected[name] for name in ("validation", "best", "curve", "recipe")
    }
    best = alone / "best"
    text = files.validation.read_text().replace("\n<|endoftext|>\n", "\n\n")
    measured = perplexity(load(best), load_tokenizer(best), text, length=32, progress=False)
    assert result["tests"] == [measured.row("validation.txt").to_dict()]


def test_tests_are_measured_in_the_precision_of_the_recipe(files: Files, tmp_path: Path) -> None:
    recipe = make_recipe((FINETUNE[0] | {"tokens": STEP},), precision="bfloat16")
    grid = write_grid(tmp_path, {"one": {"rule": "decay"}}, recipe)
    succeed(*typed(files, grid, tmp_path, "--test", files.validation, "--keep"))
    best, text = tmp_path / "runs/one/training/best", files.validation.read_text().replace("\n<|endoftext|>\n", "\n\n")
    found = []
    for arithmetic in (torch.autocast("cpu", torch.bfloat16), nullcontext()):
        with arithmetic:
            measured = perplexity(load(best), load_tokenizer(best), text, length=32, progress=False)
            found.append(measured.row("validation.txt").to_dict())
    assert found[0]["token"] != found[1]["token"]
    assert result_of(tmp_path, "one")["tests"] == [found[0]]


def test_models_of_finished_runs_are_deleted(files: Files, compared: tuple[Any, ...]) -> None:
    for name in RUNS:
        folder = files.folder / "compared" / "runs" / name
        assert sorted(os.listdir(folder)) == ["begun.json", "log.txt", "process", "training"]
        assert os.listdir(folder / "training") == ["log.jsonl"]
        assert (folder / "log.txt").read_text().startswith("started\n")


def test_table_and_progress_lines_show_each_run(compared: tuple[Any, ...], files: Files) -> None:
    shown = compared[1]
    header, *rows = [line.split() for line in shown.stdout.splitlines()]
    assert header == ["run", "tokens", "validation", "validation.txt", "diverged"]
    assert [row[0] for row in rows] == list(RUNS)
    best = result_of(files.folder / "compared", "decay")
    numbers = [f"{best['best']['perplexity']:,.2f}", f"{best['tests'][0]['token']:,.2f}"]
    assert rows[1] == ["decay", f"{6 * STEP}", *numbers] and rows[2][-2] == "step"
    assert "base: started" in shown.stderr and "wild: diverged after" in shown.stderr
    assert f"decay: done after {6 * STEP} tokens, validation perplexity {numbers[0]}" in shown.stderr


def test_second_call_reuses_results_and_updates_cells(files: Files, compared: tuple[Any, ...]) -> None:
    command, shown = compared
    results = sorted((files.folder / "compared" / "results").iterdir())
    before = [path.read_bytes() for path in results]
    again = succeed(*command)
    assert again.stdout == shown.stdout and again.stderr == "3 of 3 runs are done already\n"
    assert [path.read_bytes() for path in results] == before
    moved = RUNS | {"decay": RUNS["decay"] | {"cell": PAPER_CELL | {"row": "ours"}}}
    succeed(command[0], write_grid(files.folder / "moved", moved), *command[2:])
    assert result_of(files.folder / "compared", "decay")["cell"]["row"] == "ours"
    succeed(*command)


def test_changed_settings_are_refused(files: Files, compared: tuple[Any, ...], tmp_path: Path) -> None:
    command = list(compared[0])
    output = files.folder / "compared"
    command[1] = write_grid(tmp_path, RUNS | {"decay": {"rule": "decay", "m": 8, "gate_init": "log"}})
    said = error_of(*command)
    assert "run decay was started with other settings: settings.m is 8 and was 4; restore them" in said
    assert f"or delete {output / 'runs/decay'} and {output / 'results/decay.json'} to start it anew" in said
    command = [*compared[0], "--set", "finetune.tokens=256", "--only", "base"]
    assert "run base was started with other settings: recipe.stages.0.tokens is 256 and was 768;" in error_of(*command)
    other = files.folder / "other.txt"
    other.write_text(files.data.read_text())
    command = [other if part == files.data else part for part in compared[0]]
    assert f"data is '{other}' and was '{files.data}'" in error_of(*command)
    command = list(compared[0])
    command[1] = write_grid(tmp_path, RUNS | {"base": {"rule": "delta"}})
    said = error_of(*command)
    assert "settings.rule is 'delta' and was None, settings.m is 4 and was None" in said and "…; restore them" in said


def test_changed_settings_are_refused_for_a_result_alone(
    files: Files, compared: tuple[Any, ...], tmp_path: Path
) -> None:
    """As when only the results were copied from another machine."""
    (tmp_path / "results").mkdir()
    for name in RUNS:
        (tmp_path / f"results/{name}.json").write_text(json.dumps(result_of(files.folder / "compared", name)))
    command = [tmp_path if part == files.folder / "compared" else part for part in compared[0]]
    assert succeed(*command).stdout == compared[1].stdout
    assert "recipe.lora is 2 and was 0" in error_of(*command, "--only", "decay", "--set", "lora=2")


def test_wide_layers_that_a_conversion_chose_are_no_other_setting(
    files: Files, compared: tuple[Any, ...], tmp_path: Path
) -> None:
    """A result names them, and its grid does not."""
    result = result_of(files.folder / "compared", "decay")
    wide = result["model"]["settings"] | {"window": 2, "wide_window": 4}
    setup = Setup(tmp_path, str(files.base), str(files.data), str(files.validation))
    (tmp_path / "results").mkdir()
    for chosen in ({"wide_layers": [1]}, {"wide_window": 0, "wide_layers": None}):
        result["model"]["settings"] = wide | chosen
        (tmp_path / "results/decay.json").write_text(json.dumps(result))
        for window, refused in ((4, False), (5, chosen["wide_layers"] is not None)):
            config = FastWeightsConfig.from_dict(wide | {"wide_window": window})
            job = Job(setup, Variant("decay", "decay", Recipe.from_dict(result["recipe"]), config))
            with pytest.raises(GridError, match="wide_window is 5 and was 4") if refused else nullcontext():
                job.check_unchanged()
            assert not job.needs_base()


def test_base_is_needed_by_conversions_that_have_not_begun(files: Files, tmp_path: Path) -> None:
    setup = Setup(tmp_path, str(files.base), str(files.data), str(files.validation))
    converting = Job(setup, Variant("one", "one", make_recipe(), FastWeightsConfig(m=4)))
    assert converting.needs_base()
    assert not Job(setup, Variant("base", "base", make_recipe(FINETUNE))).needs_base()
    converting.folder.mkdir(parents=True)
    converting.prepare(ComparisonBase(setup.model, setup.folder), 1.0, pytest.fail)
    assert converting.needs_base(), "it has no checkpoint yet, and would start over"
    (converting.training / checkpoint.RESULT).write_text("{}")
    assert not converting.needs_base()


def test_damaged_result_is_named(files: Files, compared: tuple[Any, ...], tmp_path: Path) -> None:
    broken = tmp_path / "out/results/decay.json"
    broken.parent.mkdir(parents=True)
    broken.write_text((files.folder / "compared/results/decay.json").read_text()[:-100])
    message = error_of(*typed(files, write_grid(tmp_path, RUNS), tmp_path / "out"))
    assert message.startswith(f"{broken} is not JSON: line ") and "delete it" in message


def test_a_resumed_run_gets_the_memory_share_of_now(files: Files, tmp_path: Path) -> None:
    setup = Setup(tmp_path, str(files.base), str(files.data), str(files.validation), device="cpu")
    job = Job(setup, Variant("one", "one", make_recipe(FINETUNE)))
    job.folder.mkdir(parents=True)
    base = ComparisonBase(setup.model, setup.folder)
    job.prepare(base, 1.0, pytest.fail)
    (job.training / checkpoint.LAST).mkdir(parents=True)
    (job.training / checkpoint.LAST / checkpoint.PROGRESS).write_text("{}")
    job.prepare(base, 0.25, pytest.fail)
    assert job.log.read_text() == "started\nresumed\n"
    assert json.loads((job.training / checkpoint.RUN).read_text())["memory_share"] == 0.25


def test_lock_of_a_run_is_not_written_through_a_link(files: Files, tmp_path: Path) -> None:
    setup = Setup(tmp_path, str(files.base), str(files.data), str(files.validation), device="cpu")
    job = Job(setup, Variant("one", "one", make_recipe(FINETUNE)))
    job.folder.mkdir(parents=True)
    (tmp_path / "other").write_text("x")
    (job.folder / "process").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        job.acquire()
    assert (tmp_path / "other").read_text() == "x"


def test_second_sigterm_does_not_kill_runs() -> None:
    """A process group and its parent may both be sent one."""
    received: list[int] = []
    with stop_signals(received.append):
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGTERM, signal.SIGTERM]


def test_each_seed_is_a_run_and_only_selects_runs(files: Files, tmp_path: Path) -> None:
    """One that diverges after a checkpoint is tested with it; models stay where they are wanted."""
    runs = {
        "other": {"rule": "delta"},
        "two": {"rule": "gated", "seeds": [0, 3]},
        "late": {"rule": "decay", "set": WILD | {"diverged_above": 0.5, "diverged_for": 5}},
    }
    grid = write_grid(tmp_path, runs)
    command = typed(files, grid, tmp_path, "--only", "two,late", "--jobs", 3, "--keep", "--recall")
    succeed(*command, "--test", files.validation)
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()}
    assert results.keys() == {"two_seed0", "two_seed3", "late"}
    third = results["two_seed3"]
    assert third["seed"] == third["recipe"]["seed"] == third["model"]["settings"]["seed"] == 3
    assert third["validation"] != results["two_seed0"]["validation"]
    for name in ("two_seed0", "late"):
        best = tmp_path / "runs" / name / "training/best"
        tokenizer = load_tokenizer(best)
        vocabulary = ordinary_tokens(load(best), tokenizer)
        probe = recall_probe(load(best), vocabulary=vocabulary, bos=bos_token(tokenizer), progress=False)
        assert results[name]["recall"] == probe.to_dict()
    assert "for 5 steps" in results["late"]["diverged"]["reason"] and results["late"]["tests"][0]["token"] > 1
    for name in results:
        assert (tmp_path / "runs" / name / "training/best/model.safetensors").is_file()
        assert (tmp_path / "runs" / name / "converted/model.safetensors").is_file()


def test_failed_run_is_named_and_others_finish(files: Files, tmp_path: Path) -> None:
    runs = {"large": {"rule": "decay", "set": {"batch_tokens": 2**20}}, "fine": {"rule": "decay"}}
    short = make_recipe((FINETUNE[0] | {"tokens": STEP},))
    command = typed(files, write_grid(tmp_path, runs, short), tmp_path)
    found = run(*command)
    log = tmp_path / "runs/large/log.txt"
    assert found.exit_code == 1 and [path.stem for path in (tmp_path / "results").iterdir()] == ["fine"]
    assert found.stderr.splitlines()[-1].startswith("error: 1 of 2 runs failed, the same command tries again: large: ")
    assert "tokens are no batch of 32,768 rows of 32 tokens" in found.stderr and f"(see {log})" in found.stderr
    assert "are no batch of 32,768 rows" in log.read_text() and "fine" in found.stdout and "large" not in found.stdout
    write_grid(tmp_path, {"large": {"rule": "decay"}, "fine": {"rule": "decay"}}, short)
    assert "1 of 2 runs are done already" in succeed(*command).stderr


def launch_killed(*_: Any, **__: Any) -> subprocess.Popen:
    return subprocess.Popen(["sh", "-c", "kill -9 $$"])


def test_killed_process_is_a_failed_run(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "launch", launch_killed)
    found = run(*typed(files, write_grid(tmp_path, {"one": {"rule": "decay"}}), tmp_path))
    assert found.exit_code == 1 and "one: ended by SIGKILL" in found.stderr


def test_error_without_a_message_is_a_failed_run(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(Job, "prepare", fail)
    found = run(*typed(files, write_grid(tmp_path, {"one": {"rule": "decay"}}), tmp_path))
    assert found.exit_code == 1 and "one: AssertionError (see " in found.stderr
    assert "Traceback" in (tmp_path / "runs/one/log.txt").read_text()


def kill_all(program: Program, output: Path) -> None:
    for pid in (program.pid, *processes_of(output).values()):
        os.kill(pid, signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL


def kill_the_parent(program: Program, output: Path) -> None:
    """The runs notice, save and end."""
    children = [psutil.Process(pid) for pid in processes_of(output).values()]
    os.kill(program.pid, signal.SIGKILL)
    assert program.wait() == -signal.SIGKILL
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert all("stopped by SIGTERM" in path.read_text() for path in output.glob("runs/*/log.txt"))


def ask_to_stop(program: Program, output: Path) -> None:
    os.kill(program.pid, signal.SIGTERM)
    assert program.wait() == 128 + signal.SIGTERM
    assert "error: stopped by SIGTERM: 0 of 3 runs are done; the same command resumes" in program.output
    assert "first: stopped" in program.output and "third: started" not in program.output


def let_time_run_out(program: Program, output: Path) -> None:
    """As --minutes does. The runs save, and the table of those that are done is printed before the last line."""
    os.kill(program.pid, signal.SIGALRM)
    assert program.wait() == runner.TIME_IS_OVER
    assert "error: the time is over: 0 of 3 runs are done; the same command resumes" in program.output
    assert "first: stopped" in program.output and "third: started" not in program.output


@pytest.fixture(scope="module")
def long_runs(files: Files) -> tuple[Path, dict[str, Path]]:
    """A grid, and two of its runs as they are when nothing happens to them."""
    recipe = make_recipe((FINETUNE[0] | {"tokens": LONG * STEP},), checkpoint_every=7, validate_every=10)
    runs: dict[str, Any] = {"first": {"rule": "decay"}, "second": {"rule": "gated"}}
    folders = {}
    for name, settings in runs.items():
        converted = save_converted(files.folder / f"{name} converted", files.base, **settings)
        folders[name] = files.folder / f"undisturbed {name}"
        train_in(folders[name], make_train_config(files, recipe, model=str(converted)))
    runs["third"] = {"rule": "add", "set": {"finetune.tokens": STEP}}
    return write_grid(files.folder / "long", runs, recipe), folders


@pytest.mark.parametrize("end", [kill_all, kill_the_parent, ask_to_stop, let_time_run_out])
def test_resumed_comparison_matches_uninterrupted_runs(
    files: Files, long_runs: tuple[Path, dict[str, Path]], tmp_path: Path, end: Callable[[Program, Path], None]
) -> None:
    grid, undisturbed = long_runs
    output = tmp_path / "out"
    all_runs = end in (ask_to_stop, let_time_run_out)
    chosen = "" if all_runs else "first,second"
    command = typed(files, grid, output, "--jobs", 2, "--only", chosen, "--minutes", 1000)
    program = Program(tmp_path / "printed.txt", *command)
    folders = {name: output / "runs" / name / "training" for name in undisturbed}
    wait_until(lambda: all(lines_in(folder) > 3 for folder in folders.values()), program.running)
    end(program, output)
    assert all(0 < lines_in(folder) < lines_in(undisturbed[name]) for name, folder in folders.items())
    assert not any((output / "results").iterdir())
    saved = {name: bool(checkpoint.checkpoints(folder)) for name, folder in folders.items()}
    assert end is kill_all or all(saved.values())
    succeed(*command)
    for name, folder in folders.items():
        assert log_of(folder) == log_of(undisturbed[name])
        expected = json.loads((undisturbed[name] / "result.json").read_text())
        assert result_of(output, name)["validation"] == expected["validation"]
        printed = (output / "runs" / name / "log.txt").read_text()
        assert ("resumed\n" in printed) == saved[name] and printed.count("started\n") == 2 - saved[name]
    assert (output / "results/third.json").is_file() == all_runs


def test_time_limit_stops_a_comparison_and_keeps_finished_runs(files: Files, tmp_path: Path) -> None:
    short = make_recipe((FINETUNE[0] | {"tokens": STEP},))
    command = typed(files, write_grid(tmp_path, {"one": {"rule": "decay"}, "two": {"rule": "add"}}, short), tmp_path)
    assert run(*command, "--only", "one").exit_code == 0
    over = run(*command, "--minutes", 0)
    assert over.exit_code == runner.TIME_IS_OVER and "the time is over: 1 of 2 runs are done" in over.stderr
    assert over.stdout.splitlines()[-1].split()[0] == "one"
    assert "1 of 2 runs are done already" in succeed(*command, "--minutes", 1000).stderr
    assert succeed(*command, "--minutes", 0).stderr == "2 of 2 runs are done already\n"


def interrupt_runs(files: Files, grid: Path, output: Path) -> None:
    """Two runs of a comparison, killed after some steps."""
    program = Program(
        output.with_name("printed.txt"), *typed(files, grid, output, "--jobs", 2, "--only", "first,second")
    )
    folders = [output / "runs" / name / "training" for name in ("first", "second")]
    wait_until(lambda: all(lines_in(folder) > 3 for folder in folders), program.running)
    kill_all(program, output)


def test_run_that_lost_its_checkpoints_is_refused_and_others_finish(
    files: Files, long_runs: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    output, training = tmp_path / "out", tmp_path / "out/runs/first/training"
    interrupt_runs(files, long_runs[0], output)
    shutil.rmtree(training / "checkpoints")
    before = {path.name: path.is_symlink() or path.read_bytes() for path in training.iterdir() if path.name != ".lock"}
    found = run(*typed(files, long_runs[0], output, "--only", "first,second"))
    assert found.exit_code == 1 and [path.stem for path in (output / "results").iterdir()] == ["second"]
    said = found.stderr.splitlines()[-1]
    assert f"first: the run in {training} has no whole checkpoint" in said and f"delete {training} to start" in said
    after = {path.name: path.is_symlink() or path.read_bytes() for path in training.iterdir() if path.name != ".lock"}
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} <= {"run.json"}


def test_run_without_a_checkpoint_starts_anew_and_says_so(files: Files, tmp_path: Path) -> None:
    grid = write_grid(tmp_path, {"one": {"rule": "decay"}}, make_recipe((FINETUNE[0] | {"tokens": STEP},)))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner, "launch", launch_killed)
        assert "step 0" not in run(*typed(files, grid, tmp_path)).stderr
    found = succeed(*typed(files, grid, tmp_path))
    training = tmp_path / "runs/one/training"
    assert f"one: no checkpoint was written yet in {training}: the run starts at step 0" in found.stderr


def test_run_that_another_process_trains_is_refused_and_stays(files: Files, tmp_path: Path) -> None:
    grid = write_grid(tmp_path, {"one": {"rule": "decay"}}, make_recipe((FINETUNE[0] | {"tokens": STEP},)))
    training = tmp_path / "runs/one/training"
    training.mkdir(parents=True)
    (training / "log.jsonl").write_text("{}")
    (training / "run.json").write_text('{"checkpointed": false}')
    with FileLock(training / ".lock") as lock:
        lock.acquire()
        found = run(*typed(files, grid, tmp_path))
    assert found.exit_code == 1 and f"one: {training} is in use by process {os.getpid()}" in found.stderr
    assert (training / "log.jsonl").is_file() and (training / "run.json").is_file()


def test_next_run_is_prepared_while_others_run(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One only, whose failure concerns no other run."""
    events: list[str] = []
    prepare, short = Job.prepare, make_recipe((FINETUNE[0] | {"tokens": STEP},))

    def preparing(job: Job, *arguments: Any) -> None:
        events.append(f"prepare {job.name}")
        if job.name == "two":
            raise ValueError("no")
        prepare(job, *arguments)

    def launch(arguments: list[str], log: Any, *more: Any) -> Any:
        events.append(f"{arguments[0]} {Path(log.name).parent.name}")
        return launch_from_server(arguments, log, *more)

    monkeypatch.setattr(Job, "prepare", preparing)
    monkeypatch.setattr(runner, "launch", launch)
    grid = write_grid(tmp_path, {name: {"rule": "decay"} for name in ("one", "two", "three", "four")}, short)
    found = run(*typed(files, grid, tmp_path / "out"))
    assert found.exit_code == 1 and "1 of 4 runs failed, the same command tries again: two: no (see" in found.stderr
    assert sorted(path.stem for path in (tmp_path / "out/results").iterdir()) == ["four", "one", "three"]
    expected = ["prepare one", "train one", "prepare two", "prepare three", "train three", "prepare four", "train four"]
    assert events == expected


def test_stopped_comparison_gives_back_the_run_that_is_next(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another comparison in the same folder can have it at once."""
    recipe = make_recipe((FINETUNE[0] | {"tokens": 50 * STEP},))
    grid = write_grid(tmp_path, {"one": {"rule": "decay"}, "two": {"rule": "add"}}, recipe)
    prepare = Job.prepare

    def preparing(job: Job, *arguments: Any) -> None:
        prepare(job, *arguments)
        if job.name == "two":
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("it was not interrupted")

    with monkeypatch.context() as patched:
        patched.setattr(Job, "prepare", preparing)
        stopped = run(*typed(files, grid, tmp_path / "out"))
    assert stopped.exit_code == 143 and "two" not in stopped.stderr
    with FileLock(tmp_path / "out/runs/two/process") as lock:
        lock.acquire()
    succeed(*typed(files, grid, tmp_path / "out"))
    assert sorted(path.stem for path in (tmp_path / "out/results").iterdir()) == ["one", "two"]


@pytest.mark.parametrize("given", [None, "3"])
def test_processes_share_the_cores_for_compiling(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """Unless the environment says how many workers each of them may have."""
    monkeypatch.delenv(runner.COMPILE_THREADS, raising=False)
    if given is not None:
        monkeypatch.setenv(runner.COMPILE_THREADS, given)
    seen: list[str | None] = []

    def launch(arguments: list[str], log: Any, lock: Any, threads: int, environment: Any) -> Any:
        seen.append((os.environ | environment).get(runner.COMPILE_THREADS))
        return launch_killed()

    monkeypatch.setattr(runner, "launch", launch)
    grid = write_grid(tmp_path, {name: {"rule": "decay"} for name in ("one", "two", "three", "four")})
    for cores, jobs, share in ((9, 4, "2"), (2, 4, "1"), (200, 2, "32"), (9, 1, None)):
        monkeypatch.setattr(runner, "usable_cores", lambda cores=cores: cores)
        seen.clear()
        run(*typed(files, grid, tmp_path / "out", "--jobs", jobs))
        assert seen == [given or share] * 4


@pytest.mark.parametrize("step", ["prepare", "measure"])
def test_signal_while_a_run_is_prepared_or_measured_stops_at_once(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    grid = write_grid(tmp_path, {"one": {"rule": "decay"}}, make_recipe((FINETUNE[0] | {"tokens": STEP},)))
    command = typed(files, grid, tmp_path / "out", "--test", files.validation)

    def stop(*_: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("it was not interrupted")

    def launch(arguments: list[str], *others: Any, **more: Any) -> Any:
        if arguments[0] == "train":
            return launch_from_server(arguments, *others, **more)
        signal.raise_signal(signal.SIGTERM)
        return subprocess.Popen(["sleep", "1000"])

    with monkeypatch.context() as patched:
        if step == "prepare":
            patched.setattr(Job, "prepare", stop)
        else:
            patched.setattr(runner, "launch", launch)
        stopped = run(*command)
    assert stopped.exit_code == 143 and "stopped by SIGTERM: 0 of 1 runs are done" in stopped.stderr
    succeed(*command)
    assert len(result_of(tmp_path / "out", "one")["tests"]) == 1


def test_run_that_cannot_be_measured_is_named_and_measured_by_the_same_command(files: Files, tmp_path: Path) -> None:
    """Others are trained and measured meanwhile; the failed one is not trained again."""
    text = tmp_path / "test.txt"
    text.write_text(files.validation.read_text())
    grid = write_grid(
        tmp_path, {"one": {"rule": "decay"}, "two": {"rule": "add"}}, make_recipe((FINETUNE[0] | {"tokens": STEP},))
    )
    command = typed(files, grid, tmp_path / "out", "--test", text, "--jobs", 2)
    with pytest.MonkeyPatch.context() as patched:

        def launch(arguments: list[str], *others: Any, **more: Any) -> Any:
            if arguments[0] == "measure-run" and arguments[3] == "one":
                arguments = [part.replace(str(text), str(tmp_path / "gone.txt")) for part in arguments]
            return launch_from_server(arguments, *others, **more)

        patched.setattr(runner, "launch", launch)
        found = run(*command)
    assert found.exit_code == 1 and "1 of 2 runs failed" in found.stderr and "gone.txt" in found.stderr.splitlines()[-1]
    assert [path.stem for path in (tmp_path / "out/results").iterdir()] == ["two"]
    assert "1 of 2 runs are done already" in succeed(*command).stderr
    assert len(result_of(tmp_path / "out", "one")["tests"]) == 1
    assert (tmp_path / "out/runs/one/log.txt").read_text().count("started\n") == 1


def test_two_comparisons_train_a_run_only_once(files: Files, tmp_path: Path) -> None:
    """The second waits, and finds the run done."""
    grid = write_grid(tmp_path, {"one": {"rule": "decay"}}, make_recipe((FINETUNE[0] | {"tokens": 20 * STEP},)))
    programs = [Program(tmp_path / f"printed {i}", *typed(files, grid, tmp_path / "out")) for i in range(2)]
    assert [program.wait() for program in programs] == [0, 0]
    said = (tmp_path / "out/runs/one/log.txt").read_text()
    assert said.count("started\n") == 1 and "resumed" not in said
    assert all("one: done" in program.output for program in programs)


def test_runs_are_processes_of_the_program(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests start them in a way that is quicker."""
    monkeypatch.setattr(runner, "launch", LAUNCH)
    recipe = make_recipe((FINETUNE[0] | {"tokens": STEP},))
    succeed(*typed(files, write_grid(tmp_path, {"one": {"rule": "decay"}}, recipe), tmp_path))
    assert result_of(tmp_path, "one")["finished"]


def test_bad_comparisons_are_refused_before_a_run_starts(files: Files, tmp_path: Path) -> None:
    output = tmp_path / "out"
    grid = write_grid(tmp_path, {"a": {"rule": "decay"}, "deep": {"rule": "decay", "layers": [7]}})
    assert error_of(*typed(files, "nothing", output)).startswith("GRID nothing: no such grid; shipped are ")
    assert "no such grid" in error_of(*typed(files, tmp_path / "missing.yaml", output))
    assert error_of(*typed(files, grid, output, "--only", "a,b")) == (
        "--only b: the grid has no such run; it has a, deep"
    )
    assert "run a: --set: unknown setting color; known" in error_of(*typed(files, grid, output, "--set", "color=1"))
    said = error_of(*typed(files, write_grid(tmp_path / "all", RUNS), output, "--set", "lora=2"))
    assert said.startswith("run base: without settings it is the base itself") and said.endswith("finetune, lora")
    assert "--set takes NAME=VALUE" in error_of(*typed(files, grid, output, "--set", "speed"))
    assert "--set: seed: give `seeds" in error_of(*typed(files, grid, output, "--set", "seed=1"))
    assert error_of(*typed(files, grid, output)) == (
        "run deep: layers=[7] do not exist: the model has 2 layers, numbered 0 to 1"
    )
    only = ("--only", "a")
    assert "run a: length 128: gpt2 has learned positions for 96 tokens" in error_of(
        *typed(files, grid, output, *only, "--set", "length=128")
    )
    assert "converted already" in error_of(*typed(files._replace(base=files.converted), grid, output, *only))
    assert "no folder at" in error_of(*typed(files._replace(base=tmp_path / "none"), grid, output, *only))
    assert "there is no such file" in error_of(*typed(files._replace(data=tmp_path / "none"), grid, output, *only))
    assert "there is no such file" in error_of(*typed(files, grid, output, *only, "--test", tmp_path / "none"))
    (tmp_path / "blank.txt").write_text(" \n")
    said = error_of(*typed(files, grid, output, *only, "--test", tmp_path / "blank.txt"))
    assert said == "--test blank.txt: it has no text in it"
    assert error_of(*typed(files, grid, output, *only, "--test", tmp_path / "none")).startswith(
        f"--test: {tmp_path}/none: "
    )
    (tmp_path / "short.txt").write_text("one word\n")
    short = files._replace(validation=tmp_path / "short.txt")
    assert "are fewer than one row" in error_of(*typed(short, grid, output, *only))
    assert f"--output {grid} cannot be written" in error_of(*typed(files, grid, grid, *only))
    assert not any((output / "runs").iterdir())


def test_processes_of_a_comparison_get_the_variables_for_sharing_the_gpu(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = write_grid(tmp_path, {"one": {"rule": "decay"}}, make_recipe((FINETUNE[0] | {"tokens": STEP},)))
    seen = []

    def launch(arguments: list[str], log: Any, lock: Any, threads: int, environment: Any) -> Any:
        seen.append(environment["SHARES"])
        return launch_from_server(arguments, log, lock, threads, environment)

    monkeypatch.setattr(runner, "shared_gpu", lambda *_: nullcontext({"SHARES": "the GPU"}))
    monkeypatch.setattr(runner, "launch", launch)
    succeed(*typed(files, grid, tmp_path / "out", "--test", files.validation))
    assert seen == ["the GPU"] * 2, "training and measuring"
