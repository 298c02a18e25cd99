"""The edits, and the tests that must notice each of them.

`find` is a regular expression that matches once in the package, or once in the files whose path contains `file`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    select: str = ""  # pytest's -k


PARITY, OPS, KERNELS = "modeling/test_parity.py", "ops/test_ops.py", "ops/triton/test_kernels.py"
TRAINER, ENGINE, PERPLEXITY = "training/test_trainer.py", "decode/test_engine.py", "evaluation/test_perplexity.py"

MUTATIONS = [
    # rules, chunked forms, kernels
    Mutation(
        "delta adds what it should subtract", "rules/delta", r"\(v - (\w+)\), k\)", r"(v + \1), k)", (OPS,), "delta"
    ),
    Mutation(
        "decay's gates are swapped",
        "rules/decay",
        r"outer\(forget_gate\(z_logit\), forget_gate\(f_logit\)\)",
        "outer(forget_gate(z_logit), forget_gate(-f_logit))",
        (OPS,),
        "decay",
    ),
    Mutation(
        "the loop ignores the mask",
        "rules/base",
        r"torch\.where\(real\[\.\.\., None\], new_state, state\)",
        "new_state",
        (OPS,),
    ),
    Mutation(
        "the loop ignores document starts",
        "rules/base",
        r"reset\[:, t, None, None, None\], 0\)",
        "reset[:, t, None, None, None] & False, 0)",
        (OPS,),
    ),
    Mutation("wrong index in the chunked backward", "ops/tiled", r"(?<!d)scores\.mT @ (\w+)", r"scores @ \1", (OPS,)),
    Mutation(
        "delta's chunked backward forgets a term",
        "ops/wy",
        r" \+ gated\.mT @ s\.k_read",
        "",
        (OPS,),
        "delta",
    ),
    Mutation(
        "the gate of gated_delta ignores what keys read",
        "ops/wy",
        r"\.add_\(s\.k_read \* dk_read\)",
        "",
        (OPS,),
        "gated_delta",
    ),
    Mutation(
        "all chunks are treated as the first one is",
        "triton/wy",
        r"\(tl\.load\(splits \+ n\) != 0\)",
        "(tl.load(splits) != 0)",
        (KERNELS,),
        "gated_delta",
    ),
    Mutation(
        "a segment's transition is left out of the scan",
        "triton/wy",
        r"S = matmul\(transition, S, tl\.float32, \"tf32x3\"\)",
        "S = 1.0 * S",
        (KERNELS,),
        "delta",
    ),
    Mutation(
        "a kernel reads padding", "triton/primitives", r"in_range & \(\(flag & PAD\) == 0\)", "in_range", (KERNELS,)
    ),
    Mutation(
        "a kernel's scores include later tokens",
        "triton/tiled",
        r"pairs = lower_triangle\(TILE, 0\)",
        "pairs = lower_triangle(TILE, -1)",
        (KERNELS,),
    ),
    Mutation(
        "a decode step ignores a gate",
        "ops/step",
        r"\.mul_\(z\.unsqueeze\(-1\)\)",
        "",
        ("ops/triton/test_decode_step.py",),
    ),
    Mutation(
        "a part of a norm's sums is lost",
        "ops/linear",
        r"0 if rows == 1 else grid\[1\]",
        "0 if rows == 1 else grid[1] - 1",
        ("ops/triton/test_decode_linear.py",),
    ),
    Mutation(
        "abc's share leaves out the token's own weight",
        "rules/abc",
        r"weight / total, total,",
        "weight / (total + weight), total,",
        ("ops/test_slots.py",),
    ),
    Mutation(
        "padding counts in the totals of slots",
        "ops/slots",
        r"masked_fill\(~mask\[",
        "masked_fill(False & mask[",
        ("ops/test_slots.py",),
    ),
    Mutation(
        "a position ignores the tokens seen before",
        "modeling/layer",
        r"before \+ seen\[:, None\]",
        "before",
        ("modeling/test_slots.py",),
    ),
    Mutation(
        "positions past the table are written with its last weights",
        "modeling/layer",
        r"positions >= length\)",
        "positions < 0)",
        ("modeling/test_slots.py",),
    ),
    # layers, windows, cache
    Mutation(
        "the window is one token too wide",
        "window",
        r"near = \(columns > rows\)",
        "near = (columns >= rows)",
        ("modeling/test_window.py",),
    ),
    Mutation(
        "a sink that is in the window counts twice",
        "window",
        r"< gone\[",
        "<= gone[",
        ("modeling/test_window.py",),
    ),
    Mutation(
        "a shared key goes to the states of another query",
        "modeling/layer",
        r"x\.repeat_interleave\(self\.states // k\.shape\[2\], dim=2\)",
        "x.repeat(1, 1, self.states // k.shape[2], 1)",
        ("modeling/test_initialization.py",),
        "shared_projections",
    ),
    Mutation(
        "shared queries and keys of the previous token",
        "decode/mixers",
        r"heads\.prepared = None\n\n",
        "heads.end = heads.end\n\n",
        (ENGINE,),
    ),
    Mutation(
        "low-rank gates can never learn",
        "modeling/initialization",
        r"copy_\(rows / shape\.width\*\*0\.5\)",
        "copy_(rows * 0)",
        ("modeling/test_initialization.py",),
        "low_rank",
    ),
    Mutation(
        "the window drops the softcap",
        "window",
        r"logits = softcap \* torch\.tanh\(logits / softcap\)",
        "logits = logits * 1.0",
        ("modeling/test_window.py",),
    ),
    Mutation(
        "a state does not know which tokens it has seen",
        "modeling/cache",
        r"self\.fingerprint \+= .*",
        "pass",
        ("modeling/test_continuing.py",),
    ),
    Mutation(
        "new tokens alone are taken as the whole sequence",
        "modeling/generation",
        r"return mask if whole else .*",
        "return mask",
        ("modeling/test_continuing.py",),
    ),
    Mutation("positions do not advance", "modeling/cache", r"self\.lengths \+= real", "pass", (PARITY,)),
    Mutation(
        "the cache does not count tokens",
        "modeling/cache",
        r"self\.seen \+= length",
        "self.seen += 0",
        ("modeling/test_generation.py",),
    ),
    Mutation(
        "beams do not reorder the state",
        "modeling/cache",
        r"held\.index_select\(0, rows\.to\(held\.device\)\)",
        "held.clone()",
        (PARITY,),
        "beam",
    ),
    Mutation(
        "a forked state shares memory",
        "modeling/cache",
        r"copy\.deepcopy\(self, \{[^}]*\}\)",
        "copy.copy(self)",
        ("modeling/test_generation.py",),
    ),
    Mutation(
        "a state of another model is accepted",
        "modeling/state_format",
        r"not _same_weights\(.*\)",
        'tensors.pop("model") is None',
        ("modeling/test_generation.py",),
    ),
    Mutation(
        "layers to retain are ignored",
        "config",
        r"return self\.layers is None or layer_index in self\.layers",
        "return True",
        ("modeling/test_classes.py", "modeling/test_description.py"),
    ),
    Mutation(
        "the weakest rotary pairs are chosen",
        "modeling/initialization",
        r"strength\.topk\(",
        "(-strength).topk(",
        ("modeling/test_initialization.py",),
    ),
    Mutation(
        "packed documents are not separated",
        "modeling/packing",
        r"return reset\.expand\(batch, -1\)",
        "return None",
        (PARITY,),
    ),
    # data, training
    Mutation(
        "a document's first token is predicted",
        "data/",
        r"np\.where\(is_start, IGNORED, ids\)",
        "ids",
        ("data/test_batches.py",),
    ),
    Mutation(
        "the seed does not change the order",
        "data/",
        r"default_rng\(\[self\.seed, epoch\]\)",
        "default_rng([0, epoch])",
        ("data/test_batches.py", TRAINER),
    ),
    Mutation(
        "the limit does not cut a document",
        "data/token_files",
        r"document\.ids\[:length\]",
        "document.ids",
        ("data/test_token_files.py",),
    ),
    Mutation(
        "the learning rate does not decay",
        "training/optimizer",
        r"0\.5 \* \(1 \+ math\.cos\(math\.pi \* \w+\)\)",
        "1.0",
        ("training/test_optimizer.py",),
    ),
    Mutation(
        "norm weights decay",
        "training/optimizer",
        r"p\.ndim <= 1 or p in norms",
        "p.ndim <= 1",
        ("training/test_optimizer.py",),
    ),
    Mutation(
        "the divergence watch is off",
        "training/optimizer",
        r"if self\.above >= self\.patience",
        "if False",
        ("training/test_optimizer.py", "training/test_failures.py"),
    ),
    Mutation(
        "a run resumes without optimizer state",
        "training/",
        r"if resumed:\n( +)assert self\.last is not None\n +saved\.restore_optimizer",
        r"if False:\n\1saved.restore_optimizer",
        (TRAINER,),
    ),
    Mutation(
        "the worst validation is called the best",
        "training/",
        r"loss <= progress\.best\.loss",
        "loss >= progress.best.loss",
        (TRAINER,),
    ),
    Mutation(
        "the fitted output ignores the bias",
        "training/output_fit",
        r"onto\[:-1\] - gram",
        "onto[:-1] + gram",
        ("training/test_losses.py",),
    ),
    Mutation(
        "the teacher's attention distances cross documents",
        "modeling/attention_weights",
        r" & \(distance <= place\[rows, None\]\)",
        "",
        ("training/test_attention_distance.py",),
    ),
    Mutation(
        "wide layers are chosen by what stands before the repeated token",
        "modeling/attention_weights",
        r"1 \+ length \+ repeated, 1 \+ repeated",
        "1 + length + repeated, repeated - 1",
        ("modeling/test_wide_windows.py",),
    ),
    Mutation(
        "all layers have the wide window",
        "config",
        r"self\.wide_window if layer_index in self\.wide_layers else self\.window",
        "self.wide_window",
        ("test_config.py",),
    ),
    Mutation(
        "the scale of the keys does not follow the memory lengths",
        "modeling/initialization",
        r"rule\.key_scale\.copy_\(\(-logits\)\.sigmoid\(\)\)",
        "pass",
        ("training/test_attention_distance.py",),
    ),
    Mutation(
        "the distillation loss is not scaled by the temperature",
        "training/",
        r"temperature\*\*2 \* divergence",
        "divergence",
        ("training/test_chunked_loss.py",),
    ),
    # evaluation, decoding
    Mutation(
        "a token is scored twice",
        "evaluation/perplexity",
        r"done, scored\)\)\n    return windows",
        "done, min(length, scored + 1)))\n    return windows",
        (PERPLEXITY,),
    ),
    Mutation(
        "a bucket misses its last position",
        "evaluation/",
        r"totals\[start:end\]",
        "totals[start : end - 1]",
        (PERPLEXITY,),
    ),
    Mutation(
        "recall asks for the wrong key",
        "evaluation/",
        r"block\[2 \* pair : 2 \* pair \+ 1\]",
        "block[2 * pair + 1 : 2 * pair + 2]",
        ("evaluation/test_recall.py",),
    ),
    Mutation(
        "layers are ranked worst first",
        "evaluation/layer_ranking",
        r"= sorted\(zip\(each, candidates, strict=True\)\)",
        "= sorted(zip(each, candidates, strict=True), reverse=True)",
        ("evaluation/test_layer_ranking.py",),
    ),
    Mutation(
        "the engine fills the wrong slot",
        "decode/batch",
        r"self\.decoder\.set_slot\(slot, reader\.state\)",
        "self.decoder.set_slot(0, reader.state)",
        (ENGINE,),
    ),
    Mutation(
        "top-p keeps one token too many",
        "decode/",
        r"scores\.softmax\(-1\)\.cumsum\(-1\) <=",
        "scores.softmax(-1).cumsum(-1) - scores.softmax(-1) <=",
        ("decode/test_device_sampler.py",),
    ),
    Mutation(
        "the repetition penalty rewards",
        "decode/",
        r"scores / penalty",
        "scores * penalty",
        ("decode/test_device_sampler.py",),
    ),
    # loading, settings, reports, errors
    Mutation(
        "a model from a GGUF file stays quantized",
        "",
        r'"quantization_method", None\) == "gguf"',
        '"quantization_method", None) == "none"',
        ("test_loading_gguf.py",),
    ),
    Mutation(
        "a layer named twice is accepted",
        "config",
        r"or len\(set\(layers\)\) != len\(layers\)",
        "",
        ("test_config.py", "cli/test_bad_values.py"),
    ),
    Mutation(
        "an error does not show the value found",
        "utils/settings",
        r", found \{value!r\}\"",
        '"',
        ("test_config.py", "cli/test_bad_values.py", "cli/test_bad_input.py"),
    ),
    Mutation(
        "the report's ratio is inverted", "report/", r"above / below", "below / above", ("report/test_report.py",)
    ),
    Mutation(
        "a grid's run ignores its seed",
        "experiments/grid",
        r"replace\(recipe, seed=seed\)",
        "recipe",
        ("experiments/test_grid.py", "experiments/test_runner.py"),
    ),
    # recall in training
    Mutation(
        "a passage is repeated in another document",
        "data/recall_rows",
        r"return places\[document\[places\] == .*\]",
        "return places",
        ("data/test_recall_rows.py",),
    ),
    Mutation(
        "all processes have the same rows that need recall",
        "data/batches",
        r"step \* self\.rows \+ rank \* share\)",
        "step * self.rows)",
        ("data/test_recall_rows.py",),
    ),
    Mutation(
        "the window is left out of all rows of a batch",
        "modeling/layer",
        r"self\.rows_without_window\.to\(from_rule\.device\)\[",
        "self.rows_without_window.any()[None][",
        ("modeling/test_modes.py",),
    ),
]
