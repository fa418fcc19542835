"""Triton, host side: tile sizes and the arguments that all kernels share."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

LOG2E = math.log2(math.e)


class Blocks(NamedTuple):
    """Tile sizes. Fixed by dtype, head dimension and device, not tuned at run time: sums keep their order."""

    forward: tuple[int, int]  # queries, keys
    backward: tuple[int, int]  # rows held by the program, rows it walks over
    diagonal: int  # a power of two
    warps: int
    stages: int


def blocks_of(dtype: torch.dtype, head_dim: int, roomy: bool) -> Blocks:
    """Sizes chosen by compiling for 8.0, 8.9 and 9.0: few spilled registers, shared memory that fits.

    Not tuned by time. float32 without tensor cores unrolls its products, so its tiles are small.
    """
    if dtype == torch.float32:
        return Blocks(forward=(32, 32), backward=(32, 32), diagonal=32, warps=8, stages=2)
    if head_dim <= 64 or roomy:
        return Blocks(forward=(128, 64), backward=(64, 64), diagonal=64, warps=8, stages=2)
    return Blocks(forward=(64, 64), backward=(64, 32), diagonal=64, warps=8, stages=2)


def is_roomy(device: torch.device) -> bool:
    """Whether a program may have 160 KB of shared memory: data centre GPUs. True for the interpreter."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= 160 << 10


@dataclass(frozen=True)
class Call:
    """What decides the outcome beside the tensors."""

    kind: str  # "none", "table", or that of a ClosedForm
    score_scale: float
    offset: int
    window: int | None
    blocks: Blocks


def kernels() -> ModuleType:
    return importlib.import_module("megatron_patches.attention._triton_kernels")


def backward_kernels() -> ModuleType:
    return importlib.import_module("megatron_patches.attention._triton_backward")


@dataclass(frozen=True)
class Launch:
    """The arguments that all kernels share, spelled as theirs."""

    factor: float
    heads: int
    queries: int
    keys: int
    offset: int
    window: int
    HEAD_DIM: int
    BLOCK_D: int
    KIND: str
    WEIGHTED: bool
    WINDOWED: bool
    PRECISION: str
    UPCAST: bool
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, weighted: bool, call: Call) -> Launch:
        exact = torch.get_float32_matmul_precision() == "highest"
        return cls(
            factor=call.score_scale * LOG2E,
            heads=q.shape[1],
            queries=q.shape[2],
            keys=k.shape[2],
            offset=call.offset,
            window=call.window or 0,
            HEAD_DIM=q.shape[3],
            BLOCK_D=max(16, 1 << (q.shape[3] - 1).bit_length()),
            KIND=call.kind,
            WEIGHTED=weighted,
            WINDOWED=call.window is not None,
            PRECISION="ieee" if exact else "tf32",
            UPCAST=kernels().INTERPRETED and q.dtype == torch.bfloat16,
            num_warps=call.blocks.warps,
            num_stages=call.blocks.stages,
        )

    def arguments(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def programs(tensor: Tensor, block: int) -> int:
    """Blocks of rows of a [B, H, L, D] tensor."""
    return tensor.shape[0] * tensor.shape[1] * -(-tensor.shape[2] // block)
