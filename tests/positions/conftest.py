from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

GOLDENS = Path(__file__).parents[1] / "goldens" / "kernels"
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kernels() -> dict[str, Tensor]:
    return load_file(GOLDENS / "kernels.safetensors")


@pytest.fixture(scope="session")
def fork_rows() -> dict[str, Tensor]:
    return load_file(GOLDENS / "fork_rows.safetensors")


@pytest.fixture(scope="session")
def clamping() -> dict[str, Tensor]:
    return load_file(GOLDENS / "clamping.safetensors")
