"""Converted models as Hugging Face models: saving, loading, training modes, compiling, LoRA."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import transformers
from helpers.relative_error import assert_close
from helpers.tiny import CONFIGS, config_of, depend_on_input, pretrained, tokens
from transformers import AutoConfig, AutoModelForCausalLM

import fastweights as fw
from fastweights.modeling import classes
from fastweights.modeling.classes import CLASSES, keep_softcap

DECAY = dict(rule="decay", m=6)
VARIANTS = [
    DECAY,
    dict(rule="delta", m=6, window=3, output_norm=True),
    dict(rule="decay", m=6, window=3, mix="token"),
    dict(rule="gated", m=4, feature_map="rfa", normalize="attention", layers=(1,)),
    dict(rule="gated_delta", m=8, window=3, mix="token", projections="shared", gate_rank=3),
    dict(rule="local", window=4, sinks=2),
]


def converted(family: str = "llama", **settings: Any) -> Any:
    return fw.convert(pretrained(family), fw.FastWeightsConfig(**settings or DECAY))


@contextmanager
def assert_no_log(name: str) -> Iterator[None]:
    """Nothing is logged under this name: neither warnings nor errors."""
    found, logger = [], logging.getLogger(name)
    handler = logging.Handler(logging.WARNING)
    handler.emit = found.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not [record.getMessage() for record in found]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: s["rule"])
def test_saved_model_loads_with_identical_logits(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model, ids = converted(family, **settings), tokens(2, 9)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1, "the checkpoint must be in shards for this test"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert fw.FastWeightsConfig.from_dict(loaded.config.fastweights) == fw.FastWeightsConfig(**settings)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("family", CONFIGS)
def test_conversion_of_a_loaded_base_round_trips(family: str, tmp_path: Path) -> None:
    """Loading may rename tensors, which saving would undo."""
    pretrained(family).save_pretrained(tmp_path / "base")
    model = fw.convert(fw.load(tmp_path / "base"), fw.FastWeightsConfig(m=4))
    for name in ("once", "twice"):
        model.save_pretrained(tmp_path / name)
        loaded = fw.load(tmp_path / name)
        with torch.no_grad():
            assert torch.equal(loaded(tokens(1, 7)).logits, model(tokens(1, 7)).logits)
        model = loaded


def test_converted_gemma2_has_its_logit_softcap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every way to a model, also where transformers would take SDPA, which has none."""
    base = pretrained("gemma2")
    base.save_pretrained(tmp_path / "base")
    base.config._attn_implementation = "sdpa"
    fw.convert(base, fw.FastWeightsConfig(m=4, layers=(0,))).save_pretrained(tmp_path / "hybrid")
    assert base.config._attn_implementation == "eager"
    for name in ("base", "hybrid"):
        assert fw.load(tmp_path / name).config._attn_implementation == "eager"
    monkeypatch.setattr(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "base").config._attn_implementation == "sdpa"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid").config._attn_implementation == "eager"
    plain = pretrained("llama").config
    plain._attn_implementation = "sdpa"
    keep_softcap(plain)
    assert plain._attn_implementation == "sdpa"


def test_from_pretrained_takes_dtype_and_device_map(tmp_path: Path) -> None:
    converted().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        out = model(tokens(1, 7), use_cache=True)
    assert out.logits.dtype == torch.bfloat16
    assert out.past_key_values.layers[0].get("state").dtype == torch.float32


def test_conversion_happens_in_place_and_keeps_dtype_and_mode() -> None:
    base = pretrained("gpt2").to(torch.bfloat16).train()
    model = fw.convert(base, fw.FastWeightsConfig(m=4))
    assert model is base and model.config is base.transformer.config
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.transformer.h[0].attn.training


def test_layers_that_are_not_converted_keep_their_weights() -> None:
    base = pretrained("llama")
    before = copy.deepcopy(base.model.layers[0].self_attn.state_dict())
    model = fw.convert(base, fw.FastWeightsConfig(m=4, layers=(1,)))
    for name, tensor in model.model.layers[0].self_attn.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_local_rule_with_a_wide_window_equals_pretrained_attention() -> None:
    for family in CONFIGS:
        base, ids = pretrained(family), tokens(2, 6)
        base.set_attn_implementation("eager")  # transformers' sdpa leaves Gemma 2's cap out in some versions
        with torch.no_grad():
            expected = base(ids).logits
            found = fw.convert(base, fw.FastWeightsConfig(rule="local", window=6))(ids).logits
        assert_close(f"logits of {family}", found, expected, 1e-5)


def test_a_model_from_its_config_alone_starts_as_a_conversion_would() -> None:
    config_class, model_class = CLASSES["gpt2"]
    settings = fw.FastWeightsConfig(rule="decay", m=4)
    config = config_class.from_dict(config_of("gpt2").to_dict() | {"fastweights": settings.to_dict()})
    biases = model_class(config).transformer.h[0].attn.rule.gates["f"].bias
    expected = fw.convert(pretrained("gpt2"), settings).transformer.h[0].attn.rule.gates["f"].bias
    assert torch.equal(biases, expected)


def test_auto_classes_know_every_family() -> None:
    known = {AutoConfig.for_model(f"fastweights_{family}").model_type for family in CONFIGS}
    assert known == {f"fastweights_{family}" for family in CONFIGS}


def test_a_window_is_never_wider_than_the_pretrained_one() -> None:
    for family in ("mistral", "gemma2"):
        base, ids = pretrained(family), tokens(2, 20)
        base.set_attn_implementation("eager")
        with torch.no_grad():
            expected = base(ids).logits
            found = fw.convert(base, fw.FastWeightsConfig(rule="local", window=50))(ids).logits
        assert_close(f"logits of {family}", found, expected, 1e-5)


def _gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "opt", "gemma3_text"])
@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: s["rule"])
def test_gradient_checkpointing_changes_nothing(family: str, settings: dict[str, Any]) -> None:
    model, ids = converted(family, **settings).train(), tokens(2, 20)
    expected = _gradients(model, ids)
    model.gradient_checkpointing_enable()
    found = _gradients(model, ids)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert_close(name, found[name], gradient, 1e-5)


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: s["rule"])
def test_every_new_parameter_is_trained(settings: dict[str, Any]) -> None:
    model = converted("qwen3", **settings).train()
    depend_on_input(model)  # the first of two low-rank maps gets a gradient after the second's first step
    gradients = _gradients(model, tokens(2, 20))
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    silent = [name for name, gradient in gradients.items() if not gradient.any()]
    assert not silent


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: s["rule"])
def test_compiles_for_training_without_a_graph_break(settings: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model, ids = converted("llama", **settings).train(), tokens(2, 20)
    expected = _gradients(model, ids)
    found = _gradients(torch.compile(model, backend="aot_eager", fullgraph=True), ids)
    for name, gradient in expected.items():
        assert_close(name, found[f"_orig_mod.{name}"], gradient, 1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_compiled_step_is_not_compiled_again_at_every_token(family: str) -> None:
    torch._dynamo.reset()
    model, ids = converted(family), tokens(1, 12)
    counter = torch._dynamo.testing.CompileCounter()
    step = torch.compile(model.forward, backend=counter)
    with torch.no_grad():
        expected = model(ids).logits
        cache = model(ids[:, :4], use_cache=True).past_key_values
        logits = [step(ids[:, t : t + 1], past_key_values=cache).logits for t in range(4, 12)]
    assert_close("logits of a compiled step", torch.cat(logits, dim=1), expected[:, 4:], 1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("family", CONFIGS)
def test_a_converted_model_has_the_config_of_a_loaded_one(family: str, tmp_path: Path) -> None:
    pretrained(family).save_pretrained(tmp_path / "base")
    model = fw.convert(fw.load(tmp_path / "base"), fw.FastWeightsConfig(m=4))
    model.save_pretrained(tmp_path / "converted")
    loaded = fw.load(tmp_path / "converted")
    assert model.config.model_type == loaded.config.model_type == f"fastweights_{family}"
    assert model.config.to_dict() == loaded.config.to_dict() | {"_name_or_path": ""}


def test_an_adapter_of_a_converted_model_does_not_name_the_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    pretrained("llama").save_pretrained(tmp_path / "base")
    model = fw.convert(fw.load(tmp_path / "base"), fw.FastWeightsConfig(m=4))
    model.save_pretrained(tmp_path / "converted")
    for each, name in ((model, None), (fw.load(tmp_path / "converted"), str(tmp_path / "converted"))):
        adapted = peft.get_peft_model(each, peft.LoraConfig(r=2, **fw.lora_modules(each)))
        with assert_no_log("transformers"):
            adapted.save_pretrained(tmp_path / "adapter")
        assert peft.LoraConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path == name


@pytest.fixture
def float16_warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(classes.logger, "warning_once", lambda text: found.append(text) if text not in found else None)
    return found


def test_training_float16_weights_warns_once(float16_warnings: list[str]) -> None:
    model = converted().half().eval()
    assert not float16_warnings
    torch.nn.Sequential(model).train()
    model.train()
    assert len(float16_warnings) == 1
    assert "float16" in float16_warnings[0] and "dtype=torch.float32" in float16_warnings[0]


def test_weights_that_can_be_trained_do_not_warn(float16_warnings: list[str]) -> None:
    peft = pytest.importorskip("peft")
    converted().train()
    converted().bfloat16().train()
    with torch.autocast("cpu", torch.float16):  # mixed precision: the weights are float32
        converted().train()(tokens(1, 5), labels=tokens(1, 5)).loss.backward()
    frozen = converted().half()
    peft.get_peft_model(frozen, peft.LoraConfig(r=2, target_modules=["q_proj"])).train()  # adapters are float32
    assert not float16_warnings


def test_trainer_of_transformers_warns_about_float16_weights(float16_warnings: list[str], tmp_path: Path) -> None:
    rows = [{"input_ids": tokens(6), "labels": tokens(6)}] * 2
    options = dict(max_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no")
    for model in (converted(), converted().half()):
        assert not float16_warnings
        arguments = transformers.TrainingArguments(str(tmp_path), **options)
        transformers.Trainer(model, arguments, train_dataset=rows).train()
    assert len(float16_warnings) == 1


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: s["rule"])
def test_lora_trains_and_saves_the_new_parameters(settings: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ids = tokens(2, 12)
    model = converted("qwen3", **settings)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **fw.lora_modules(model)))
    trainable = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    adapted(ids, labels=ids).loss.backward()
    optimizer.step()
    adapted.eval()
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(converted("qwen3", **settings), tmp_path).eval()
    with torch.no_grad():
        assert_close("logits after loading", loaded(ids).logits, adapted(ids).logits, 1e-6)
        assert not torch.allclose(converted("qwen3", **settings)(ids).logits, adapted(ids).logits)
    if settings is DECAY:
        saved = set(peft.utils.load_peft_weights(str(tmp_path), device="cpu"))
        assert any("gates.f" in name for name in saved) and any("gates.z" in name for name in saved)


IMPORT_ORDERS = (
    "import fastweights; from transformers import GPT2LMHeadModel; import transformers",
    "import fastweights; from transformers import LlamaForCausalLM; import transformers",
    "import fastweights, transformers",
    "import transformers; transformers.AutoModelForCausalLM; import fastweights",
)
# Other packages take most of the time of an import, so every order starts from a process that has imported them.
IN_PROCESSES = """
import os, sys, accelerate, scipy.optimize, torch, torch._dynamo, torch.distributed.checkpoint, torch.distributed.tensor
assert not any(name in sys.modules for name in ("transformers.modeling_utils", "fastweights"))
for imports in sys.argv[2:]:
    if os.fork() == 0:
        exec(imports)
        print(type(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, imports
"""


def test_converted_folder_loads_in_any_import_order(tmp_path: Path) -> None:
    converted("gpt2").save_pretrained(tmp_path)
    command = [sys.executable, "-c", IN_PROCESSES, os.fspath(tmp_path), *IMPORT_ORDERS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["FastWeightsGPT2LMHeadModel"] * len(IMPORT_ORDERS)


WITHOUT_IMPORT = """
import os, sys, transformers
from transformers import AutoModelForCausalLM

class NotInstalled:
    def find_spec(self, name, *rest):
        if name == "fastweights":
            raise ModuleNotFoundError("No module named 'fastweights'")

def load(folder, **options):
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
        assert "fastweights" in sys.modules
        model.save_pretrained(folder + "-again")
        return type(model).__name__
    except (ImportError, ValueError) as error:
        assert "fastweights" not in sys.modules
        return " ".join(str(error).split())

for options in ({"trust_remote_code": True}, {"trust_remote_code": False}, {}, None):
    if os.fork() == 0:
        if options is None:
            sys.meta_path.insert(0, NotInstalled())
        result = load(sys.argv[1], **{"trust_remote_code": True} if options is None else options)
        print("\\nresult:", result, flush=True)  # below a question that transformers may have asked
        os._exit(0)
    assert os.wait()[1] == 0, options
"""


def test_a_folder_loads_without_the_import_where_its_code_is_trusted(tmp_path: Path) -> None:
    """Otherwise the error says what to do."""
    converted("gpt2").save_pretrained(tmp_path / "model")
    command = [sys.executable, "-c", WITHOUT_IMPORT, os.fspath(tmp_path / "model")]
    environment = os.environ | {"HF_MODULES_CACHE": os.fspath(tmp_path / "modules")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    trusted, refused, asked, missing = (line for line in done.stdout.splitlines() if line.startswith("result:"))
    assert trusted == "result: FastWeightsGPT2LMHeadModel"
    assert "trust_remote_code=True" in refused and "trust_remote_code=True" in asked
    assert "needs the package fastweights" in missing and "pip install fastweights" not in missing
    again, first = (sorted(path.name for path in tmp_path.glob(f"{name}/*")) for name in ("model-again", "model"))
    assert again == first and "configuration_fastweights.py" in first
    with torch.no_grad():
        found = fw.load(tmp_path / "model-again")(tokens(1, 7)).logits
        assert torch.equal(found, converted("gpt2")(tokens(1, 7)).logits)


def test_convert_is_a_function_however_it_is_imported() -> None:
    from fastweights import convert
    from fastweights.loading import save

    assert callable(convert) and callable(fw.convert) and callable(save)


def test_an_odd_rotary_width_rotates_as_gpt_neox_does() -> None:
    sizes = dict(num_hidden_layers=1, hidden_size=24, num_attention_heads=2, intermediate_size=32, vocab_size=61)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    torch.manual_seed(0)
    base = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, rope_parameters=rope)).eval()
    for parameter in base.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    with torch.no_grad():
        expected = base(tokens(1, 12)).logits
        found = fw.convert(base, fw.FastWeightsConfig(rule="local", window=12))(tokens(1, 12)).logits
    assert_close("logits", found, expected, 1e-5)


@pytest.mark.parametrize("feature_map", ["favor+", "rfa"])
def test_random_features_ignore_autocast(feature_map: str) -> None:
    model = converted(rule="gated", m=8, feature_map=feature_map)
    features = model.model.layers[0].self_attn.rule.feature_map
    x = torch.randn(1, 5, 4, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = features(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(features(x), expected)
