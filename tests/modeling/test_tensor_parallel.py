"""Tensor parallelism: the plan shards what a converted model shares with its family, and names nothing that is gone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny import CONFIGS, config_of, pretrained
from transformers import AutoModelForCausalLM

import fastweights as fw
from fastweights.modeling.classes import CLASSES

VARIANTS = [dict(rule="decay", m=4), dict(rule="delta", m=4, window=3, mix="token"), dict(m=4, layers=(0,))]
VARIANTS.append(dict(rule="gated_delta", m=8, window=3, mix="token", projections="shared", gate_rank=3))

# Every process compares the sharded model with the whole one; a failed assertion ends torchrun with an error.
RUN = """
import sys, torch
import fastweights as fw
from transformers import AutoModelForCausalLM

folder = sys.argv[1]
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
ids = torch.randint(2, 61, (2, 7))
whole = AutoModelForCausalLM.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
mlp = [x for name, x in model.named_parameters() if ".mlp." in name]
assert all(hasattr(x, "placements") for x in mlp), "sharded"
with torch.no_grad():
    expected, found = whole(ids).logits, model(ids).logits
assert (found - expected).norm() < 1e-5 * expected.norm(), (found - expected).norm()
options = dict(max_new_tokens=4, do_sample=False)
assert torch.equal(model.generate(ids, **options), whole.generate(ids, **options))
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("settings", VARIANTS, ids=["decay", "delta-window", "hybrid", "shared"])
@pytest.mark.parametrize("family", CONFIGS)
def test_tensor_parallel_plan_names_no_module_that_is_gone(
    family: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Entries that match nothing in the pretrained model either (transformers 5.17 has such) are no concern."""
    base = pretrained(family)
    before = [name for name, _ in base.named_modules()]
    model = fw.convert(base, fw.FastWeightsConfig(**settings))
    model.save_pretrained(tmp_path)
    for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        names = [name for name, _ in each.named_modules()]
        for pattern in each.tp_plan:
            regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
            gone = any(map(regex.fullmatch, before)) and not any(map(regex.fullmatch, names))
            assert not gone, f"{pattern} is in the plan, not in the model"
        assert not any(f".{each.family.attention}." in pattern for pattern in each.tp_plan)


@pytest.mark.parametrize("family", CONFIGS)
def test_tensor_parallel_plan_shards_the_rest_as_the_pretrained_model(family: str) -> None:
    base = pretrained(family)
    attention = f".{CLASSES[family][1].family.attention}."
    expected = {name: style for name, style in (base.tp_plan or {}).items() if attention not in name}
    model = fw.convert(base, fw.FastWeightsConfig(m=4))
    assert model.tp_plan == expected
    assert not any(attention in name for name in model.config.base_model_tp_plan or {})


def test_two_processes_give_the_logits_and_tokens_of_one(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_config(config_of("llama", vocab_size=62))  # 5.17 shards an even vocabulary only
    model = fw.convert(base, fw.FastWeightsConfig(m=4, layers=(0,)))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "run.py").write_text(RUN)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(tmp_path / "run.py"), str(tmp_path / "model")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
