"""Settings for all tests: one thread, and what is skipped on machines that lack something."""

from __future__ import annotations

import os

import pytest

# Read when torch is imported; spinning OpenMP threads would slow tests that start processes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("neox") and not os.environ.get("NEOX_HOME"):
            item.add_marker(pytest.mark.skip(reason="NEOX_HOME names no GPT-NeoX checkout"))
        if item.get_closest_marker("gpu"):
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
