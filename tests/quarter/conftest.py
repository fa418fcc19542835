"""A small text, a study on it, and the folder that `prepare` makes of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import quarter_tools as tools
import torch

from megatron_patches.quarter.plan import QuarterPlan, read_plan

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study file of two methods whose text lies beside it."""
    return tools.write_study(tmp_path_factory.mktemp("study"))


@pytest.fixture(scope="session")
def data(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder; tests only read it."""
    return tools.prepared(study, tmp_path_factory.mktemp("prepared") / "data")


@pytest.fixture
def plan(data: Path) -> QuarterPlan:
    return read_plan(data)
