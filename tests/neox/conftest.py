"""A process without GPT-NeoX before and after each test, and the stub patched in it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from neox_tools import LEFT_OUT, STUB, neox_modules

from megatron_patches.neox import Installed, install, uninstall
from megatron_patches.neox.install import FIXES_OFF

torch.set_num_threads(1)


@contextmanager
def process() -> Iterator[None]:
    """Nothing of GPT-NeoX is imported, patched or named by the environment, before and after."""
    path, environment = list(sys.path), dict(os.environ)
    assert not neox_modules()
    for name in ("NEOX_HOME", "LOCAL_SIZE", FIXES_OFF):
        os.environ.pop(name, None)
    os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        yield
    finally:
        uninstall()
        for name in neox_modules():
            del sys.modules[name]
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)


@pytest.fixture
def clean() -> Iterator[None]:
    """For tests that install by themselves."""
    with process():
        yield


@pytest.fixture
def neox(clean: None) -> Installed:
    """The stub with everything that a worker gets, for one test."""
    return install(home=STUB)


@pytest.fixture(scope="module")
def parsing() -> Iterator[Installed]:
    """The stub with what a launcher gets, for all tests of a module; they leave it as it is."""
    with process():
        yield install(home=STUB, launcher=True, fixes_off=[LEFT_OUT])


@pytest.fixture(scope="module")
def worker() -> Iterator[Installed]:
    """The stub with everything that a worker gets, for all tests of a module."""
    with process():
        yield install(home=STUB)


@pytest.fixture
def shared(worker: Installed) -> Iterator[Installed]:
    """As `worker`; where this process stands among the ranks is forgotten after each test."""
    from megatron import mpu

    mpu.place()
    yield worker
    mpu.place()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the stub that a test may change."""
    home = tmp_path / "neox"
    shutil.copytree(STUB, home, ignore=shutil.ignore_patterns("__pycache__"))
    return home


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone; that of other tests in this process will do."""
    if torch.distributed.is_initialized():
        assert torch.distributed.get_world_size() == 1
        yield
        return
    store: Any = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
