"""The kernels compile to machine code for real GPUs, without one: types, layouts, shared memory.

The interpreter checks none of these. What runs and how fast only a device can tell.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from megatron_patches.attention._triton_launch import (
    Blocks,
    backward_kernels,
    blocks_of,
    kernels,
)

pytestmark = pytest.mark.slow

SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes a program may have
POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
LIKE_Q = {"Q", "K", "V", "OUT", "GRAD_OUT", "GRAD_Q", "GRAD_K", "GRAD_V"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if kernels().INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set: there is nothing to compile")
    yield


def shared_memory(
    kernel: Any, target: int, dtype: torch.dtype, blocks: Blocks, constants: dict[str, Any]
) -> int:
    """Compile one kernel ahead of time; bytes of shared memory that it asks for."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, values = {}, {}
    for name in inspect.signature(kernel.fn).parameters:
        if name in constants:
            signature[name], values[name] = "constexpr", constants[name]
        elif name in LIKE_Q:
            signature[name] = POINTERS[dtype]
        elif name.isupper():
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name in ("factor", "score_scale") else "i32"
    # What triton finds out about the pointers of torch's tensors at a launch.
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, t in enumerate(signature.values()) if "*" in t
    }
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    source = ASTSource(kernel, signature, values, aligned)
    found = compile(source, target=GPUTarget("cuda", target, 32), options=options)
    return int(found.metadata.shared)


@pytest.mark.parametrize(
    ("target", "dtype", "head_dim", "kind", "weighted", "windowed"),
    [
        (80, torch.bfloat16, 64, "log", False, False),
        (89, torch.float16, 128, "table", True, True),
        (90, torch.bfloat16, 128, "table", False, False),
        (90, torch.float32, 80, "power", False, False),
    ],
)
def test_compiles_for(target, dtype, head_dim, kind, weighted, windowed):
    blocks = blocks_of(dtype, head_dim, SHARED_MEMORY[target] >= 160 << 10)
    formula = kind in ("log", "power", "linear")
    absent = [] if formula else ["SCALE", "RATE", "PARTS"]
    absent += [] if kind == "table" else ["TABLE", "TABLE_SUMS"]
    absent += [] if weighted else ["WEIGHT", "WEIGHT_SUMS"]
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": 1 << (head_dim - 1).bit_length(),
        "KIND": kind,
        "WEIGHTED": weighted,
        "WINDOWED": windowed,
        "LEARNED": formula,
        "TABLE_LEARNED": kind == "table",
        "WEIGHT_LEARNED": weighted,
        "PRECISION": "ieee",
        "UPCAST": False,
        "BLOCK": blocks.diagonal,
        **dict.fromkeys(absent),
    }
    held, walked = blocks.backward
    sizes = {
        kernels().forward: blocks.forward,
        backward_kernels().by_query: (held, walked),
        backward_kernels().by_key: (walked, held),
    }
    if kind == "table" or weighted:
        sizes[backward_kernels().by_distance] = (0, 0)
    for kernel, (block_m, block_n) in sizes.items():
        used = {**constants, "BLOCK_M": block_m, "BLOCK_N": block_n}
        assert shared_memory(kernel, target, dtype, blocks, used) <= SHARED_MEMORY[target], kernel
