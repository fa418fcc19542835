"""Faults of GPT-NeoX and DeepSpeed on our way, each corrected from outside behind a name.

`neox_fixes_off: [name, ...]` in the configuration leaves some of them as they are.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patches.neox.patches import Patches


@dataclass(frozen=True)
class Fix:
    """`before` runs before anything of NeoX is imported, `apply` in a worker when all of it is.

    Where both are None, the module of that part of NeoX asks for the fix by its name.
    """

    what: str
    apply: Callable[[Patches], None] | None = None
    before: Callable[[Patches], None] | None = None


# ---- imports -------------------------------------------------------------------------------------


def _pkg_resources(patches: Patches) -> None:
    """NeoX takes `packaging` from pkg_resources, which left setuptools in version 82."""
    if "pkg_resources" in sys.modules or importlib.util.find_spec("pkg_resources") is not None:
        return
    import packaging.version  # NeoX uses this part of it

    stub = types.ModuleType("pkg_resources")
    stub.packaging = packaging  # type: ignore[attr-defined]
    sys.modules["pkg_resources"] = stub
    patches.add(lambda: sys.modules.pop("pkg_resources", None) and None)


# ---- evaluation ----------------------------------------------------------------------------------


def _pipeline_evaluation(patches: Patches) -> None:
    """`forward_step` gives one value with pipeline stages, `evaluate` unpacks two."""
    from megatron import training

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step(
            data_iterator: Any, model: Any, neox_args: Any, *args: Any, **kwargs: Any
        ) -> Any:
            out = original(data_iterator, model, neox_args, *args, **kwargs)
            logits = kwargs.get("return_logits") or (len(args) > 1 and args[1])
            if neox_args.is_pipe_parallel and not logits and not isinstance(out, tuple):
                return out, {}
            return out

        return forward_step

    patches.wrap(training, "forward_step", make)


def _evaluation_only(patches: Patches) -> None:
    """`train_iters: 0` is refused, although it is how a checkpoint is evaluated without training."""
    from megatron.data import data_utils

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def build_train_valid_test_data_loaders(neox_args: Any) -> Any:
            if neox_args.train_iters != 0 or neox_args.train_epochs:
                return original(neox_args)
            neox_args.train_iters = 1  # enough for one evaluation; nothing is trained
            try:
                loaders = original(neox_args)
            finally:
                neox_args.train_iters = 0
            neox_args.do_train = 0
            neox_args.save = None  # the weights are those of the checkpoint that was loaded
            return loaders

        return build_train_valid_test_data_loaders

    patches.wrap(data_utils, "build_train_valid_test_data_loaders", make)


def _evaluation_lengths(patches: Patches) -> None:
    """A checkpoint refuses another `max_position_embeddings`, which most methods never read.

    The rotary table's length is the other half of this fix (`attention.py`).
    """
    from megatron import checkpointing

    from megatron_patches.positions import method_class

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def check_checkpoint_args(neox_args: Any, checkpoint_args: Any) -> Any:
            if method_class(neox_args.pos_emb).place == "attention":
                key = "max_position_embeddings"
                checkpoint_args = {k: v for k, v in checkpoint_args.items() if k != key}
            return original(neox_args, checkpoint_args)

        return check_checkpoint_args

    patches.wrap(checkpointing, "check_checkpoint_args", make)


def _fixed_validation(patches: Patches) -> None:
    from megatron import training
    from megatron.data import data_utils

    from megatron_patches.neox.data import FixedValidation

    fixed = FixedValidation()
    patches.wrap(data_utils, "shift_and_wrap_data_loaders", fixed.wrap)
    patches.wrap(training, "evaluate", fixed.evaluate)


def _stale_index_maps(patches: Patches) -> None:
    from megatron.data import gpt2_dataset

    from megatron_patches.neox.data import fresh_index_maps

    patches.wrap(gpt2_dataset, "_build_index_mappings", fresh_index_maps)


# ---- positions -----------------------------------------------------------------------------------


def _alibi_cache(patches: Patches) -> None:
    """The cached matrix grows to four times its size once, whatever the length; bf16 rounds it."""
    from megatron.model import positional_embeddings

    from megatron_patches.attention.spread import spread

    def dense(alibi: Any, queries: int, keys: int) -> torch.Tensor:
        # Distances above 256 are not exact in bfloat16: float32 here, whatever the scores are.
        distance_L = torch.arange(keys, device=alibi.slopes.device, dtype=torch.float32)
        return spread(-alibi.slopes.float()[:, None] * distance_L, queries)

    def forward(_: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return (x + dense(self, x.shape[-2], x.shape[-1]).to(x.device)).to(x.dtype)

        return forward

    def bias(_: Callable[..., Any]) -> Callable[..., Any]:
        def bias(
            self: Any, seq_len_q: int, seq_len_k: int, device: Any, dtype: Any
        ) -> torch.Tensor:
            return dense(self, seq_len_q, seq_len_k).to(device=device, dtype=dtype)

        return bias

    patches.wrap(positional_embeddings.AliBi, "forward", forward)
    patches.wrap(positional_embeddings.AliBi, "bias", bias)


def _rpe_cache(patches: Patches) -> None:
    """T5's bias counts queries from 0; with a key/value cache they are the last positions."""
    from megatron.mpu import layers

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, q_len: int, k_len: int) -> Any:
            if q_len == k_len:
                return original(self, q_len, k_len)
            whole = original(self, k_len, k_len)
            return whole[..., k_len - q_len :, :]

        return forward

    patches.wrap(layers.ParallelRelativePositionBias, "forward", make)


def _cache_between_prompts(patches: Patches) -> None:
    """Keys and values of one prompt stay in the cache, and the next prompt attends to them."""
    from megatron import text_generation_utils

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def stream_tokens(neox_args: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            model.module.clear_cache()
            yield from original(neox_args, model, *args, **kwargs)

        return stream_tokens

    patches.wrap(text_generation_utils, "stream_tokens", make)


# ---- updates and gradients ------------------------------------------------------------------------


def _hidden_update(patches: Patches) -> None:
    """In half precision at ZeRO 0 DeepSpeed updates once with zero gradients, and Adam counts it."""
    import deepspeed

    from megatron_patches.training.first_update import forget_first_update, without_rate

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize(*args: Any, **kwargs: Any) -> Any:
            optimizer = kwargs.get("optimizer")
            if optimizer is None:
                return original(*args, **kwargs)
            with without_rate(optimizer):
                made = original(*args, **kwargs)
            forget_first_update(made[1])
            return made

        return initialize

    patches.wrap(deepspeed, "initialize", make)


def _pipeline_clipping(patches: Patches) -> None:
    """DeepSpeed clips fp32 gradients by a norm that leaves out most of the later stages."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    def clip_fp32_gradients(self: Any) -> None:
        norm = clip_over_stages(self.module.parameters(), self.gradient_clipping(), self.grid)
        self._global_grad_norm = norm

    patches.set(PipelineEngine, "clip_fp32_gradients", clip_fp32_gradients)


@torch.no_grad()
def clip_over_stages(parameters: Any, limit: float, grid: Any) -> float:
    """Clip by the norm over all stages and tensor-parallel shards, each parameter counted once."""
    gradients = [(p, p.grad) for p in parameters if p.grad is not None]
    first_shard = grid.get_tensor_model_parallel_rank() == 0
    counted = [
        grad.float().norm() ** 2
        for p, grad in gradients
        if not getattr(p, "ds_pipe_replicated", False)
        and (first_shard or getattr(p, "model_parallel", False))
    ]
    device = gradients[0][1].device if gradients else "cpu"
    total = torch.stack(counted).sum() if counted else torch.zeros((), device=device)
    torch.distributed.all_reduce(total, group=grid.get_model_parallel_group())
    norm = float(total.sqrt())
    scale = limit / (norm + 1e-6)  # DeepSpeed's own rule
    if scale < 1.0:
        for _, grad in gradients:
            grad.mul_(scale)
    return norm


FIXES: dict[str, Fix] = {
    "pkg_resources": Fix(
        "NeoX imports pkg_resources, which setuptools 82 removed", before=_pkg_resources
    ),
    "pipeline_evaluation": Fix(
        "validation with pipeline stages stops with a TypeError", _pipeline_evaluation
    ),
    "hidden_update": Fix(
        "in half precision at ZeRO 0 the first updates have a wrong size", _hidden_update
    ),
    "pipeline_clipping": Fix(
        "with pipeline stages fp32 gradients are clipped by a wrong norm", _pipeline_clipping
    ),
    "evaluation_only": Fix(
        "`train_iters: 0` (evaluate, do not train) is refused", _evaluation_only
    ),
    "evaluation_lengths": Fix(
        "rotary and checkpoints refuse to validate at a longer length", _evaluation_lengths
    ),
    "fixed_validation": Fix(
        "each validation reads other text, depending on the iteration", _fixed_validation
    ),
    "stale_index_maps": Fix(
        "cached index maps are used although the text or the split changed", _stale_index_maps
    ),
    "alibi_cache": Fix(
        "ALiBi stops when the length grows more than fourfold, and rounds distances in bf16",
        _alibi_cache,
    ),
    "rpe_cache": Fix("T5's bias is wrong with a key/value cache", _rpe_cache),
    "cache_between_prompts": Fix(
        "generation attends to the prompts before this one", _cache_between_prompts
    ),
    "rpe_pipeline": Fix("pipeline stages train different copies of T5's bias"),
}
