"""What every worker does before GPT-NeoX's own script runs in it."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

# Idle OpenMP threads that spin take the core from whoever has work. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def run(script: str) -> None:
    """Install the patches, run the checkout's `script` as the main program, and end the process."""
    from megatron_patches.neox import cpu
    from megatron_patches.neox.install import install
    from megatron_patches.training.leaving import leave

    if cpu.wanted() and "OMP_NUM_THREADS" not in os.environ:
        import torch

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        torch.set_num_threads(max(1, cores // cpu.processes()))
    # NeoX's Makefile calls python3 on every host: it must be this one, which has pybind11.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    installed = install()
    runpy.run_path(str(installed.checkout.home / script), run_name="__main__")
    leave(0)
