"""Faults of GPT-NeoX and DeepSpeed on our way, each corrected from outside behind a name.

`neox_fixes_off: [name, ...]` in the configuration leaves some of them as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_patches.neox import fixes_model as model
from megatron_patches.neox import fixes_run as run
from megatron_patches.neox.patches import Patches


@dataclass(frozen=True)
class Fix:
    """`before` runs before anything of NeoX is imported, `apply` in a worker when all of it is.

    Where both are None, the module of that part of NeoX asks for the fix by its name.
    """

    what: str
    apply: Callable[[Patches], None] | None = None
    before: Callable[[Patches], None] | None = None


FIXES: dict[str, Fix] = {
    "pkg_resources": Fix(
        "NeoX imports pkg_resources, which setuptools 82 removed", before=run.pkg_resources
    ),
    "wandb_ids": Fix("a new wandb stops NeoX's launcher", before=run.wandb_ids),
    "whole_weights": Fix(
        "at ZeRO 3 a checkpoint holds slices of the weights that nothing else reads",
        run.whole_weights,
    ),
    "pipeline_evaluation": Fix(
        "validation with pipeline stages stops with a TypeError", run.pipeline_evaluation
    ),
    "hidden_update": Fix(
        "in half precision at ZeRO 0 the first updates have a wrong size", model.hidden_update
    ),
    "pipeline_clipping": Fix(
        "with pipeline stages fp32 gradients are clipped by a wrong norm", model.pipeline_clipping
    ),
    "evaluation_only": Fix(
        "`train_iters: 0` (evaluate, do not train) is refused", run.evaluation_only
    ),
    "evaluation_lengths": Fix(
        "rotary and checkpoints refuse to validate at a longer length", run.evaluation_lengths
    ),
    "fixed_validation": Fix(
        "each validation reads other text, depending on the iteration", run.fixed_validation
    ),
    "stale_index_maps": Fix(
        "cached index maps are used although the text or the split changed", run.stale_index_maps
    ),
    "alibi_cache": Fix(
        "ALiBi stops when the length grows more than fourfold, and rounds distances in bf16",
        model.alibi_cache,
    ),
    "rpe_cache": Fix("T5's bias is wrong with a key/value cache", model.rpe_cache),
    "cache_between_prompts": Fix(
        "generation attends to the prompts before this one", model.cache_between_prompts
    ),
    "sliding_window": Fix(
        "without pipeline stages `sliding_window_width` has no effect", model.sliding_window
    ),
    "rpe_pipeline": Fix("pipeline stages train different copies of T5's bias"),
}
