"""transformers without a network, its copies of remote code in a folder of the test run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

# Read when transformers is imported.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp(prefix="hf_modules"))
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            # torch 2.13 on its own mkldnn classes
            item.add_marker(
                pytest.mark.filterwarnings(
                    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
                )
            )
