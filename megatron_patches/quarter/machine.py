"""The device under a run: its name, its peak, its numerics, its memory."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
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


def free(device: torch.device) -> None:
    """Give the allocator's unused blocks back, for the next model to cut anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


QUERY = (
    *("name", "pstate", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit"),
    *("temperature.gpu", "utilization.gpu", "memory.used"),
)


def clocks(device: torch.device) -> str | None:
    """nvidia-smi's line on clocks, power and temperature; None where it does not exist or answer.

    A throttled or shared device explains speeds that nothing else does. Only read, nothing is set.
    """
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        return None
    command = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
