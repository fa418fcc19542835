"""The device under a run: its name, its peak, its numerics, its memory."""

from __future__ import annotations

import platform
from typing import Any

import torch

from megatron_patches.quarter.budget import peak_flops


def set_numerics() -> dict[str, str]:
    """float32 products exact, without TF32; bfloat16 ones use the tensor cores in any case."""
    torch.set_float32_matmul_precision("highest")
    return {"float32_matmul": torch.get_float32_matmul_precision()}


def name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def peak(device: torch.device, precision: str, given_tflops: float | None) -> float | None:
    """FLOP/s by the data sheet, or as given; None where neither says it."""
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda" or precision != "bfloat16":
        return None
    return peak_flops(name(device))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Most memory in use since `forget_peak`; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def facts(device: torch.device) -> dict[str, Any]:
    return {
        "device": name(device),
        "device_type": device.type,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
