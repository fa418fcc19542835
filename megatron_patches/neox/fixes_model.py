"""Corrections of what GPT-NeoX and DeepSpeed compute; `fixes.py` names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.neox.patches import Patches

# ---- positions -----------------------------------------------------------------------------------


def alibi_cache(patches: Patches) -> None:
    """The cached matrix grows to four times its size once, whatever the length; bf16 rounds it."""
    from megatron.model import positional_embeddings

    from megatron_patches.attention.spread import spread

    def dense(alibi: Any, queries: int, keys: int) -> torch.Tensor:
        # Kept as NeoX keeps its own, for the latest shape: in training that is the only one.
        held: tuple[tuple[int, int], torch.Tensor] | None = alibi.__dict__.get("_latest")
        if held is None or held[0] != (queries, keys) or held[1].device != alibi.slopes.device:
            # Distances above 256 are not exact in bfloat16: float32 here, whatever the scores are.
            distance_L = torch.arange(keys, device=alibi.slopes.device, dtype=torch.float32)
            bias = spread(-alibi.slopes.float()[:, None] * distance_L, queries)
            held = alibi.__dict__["_latest"] = ((queries, keys), bias)
        return held[1]

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


def rpe_cache(patches: Patches) -> None:
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


def cache_between_prompts(patches: Patches) -> None:
    """Keys and values of one prompt stay in the cache, and the next prompt attends to them."""
    from megatron import text_generation_utils

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def stream_tokens(neox_args: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            model.module.clear_cache()
            yield from original(neox_args, model, *args, **kwargs)

        return stream_tokens

    patches.wrap(text_generation_utils, "stream_tokens", make)


def sliding_window(patches: Patches) -> None:
    """Without pipeline stages the mask is made again without `sliding_window_width`."""
    from megatron import training, utils

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_batch_sequential(forward_input: Any, neox_args: Any) -> Any:
            tokens, positions, mask = original(forward_input, neox_args)
            if neox_args.sliding_window_width is not None:
                mask = utils.get_attn_mask(
                    tokens.shape[1], tokens.device, neox_args.sliding_window_width
                )
            return tokens, positions, mask

        return get_batch_sequential

    patches.wrap(training, "get_batch_sequential", make)


# ---- updates and gradients -----------------------------------------------------------------------


def hidden_update(patches: Patches) -> None:
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


def pipeline_clipping(patches: Patches) -> None:
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
