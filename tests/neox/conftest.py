"""A process without GPT-NeoX before and after each test, and the stub patched in it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from neox_tools import STUB, neox_modules

from megatron_patches.neox import Installed, install, uninstall
from megatron_patches.neox.install import FIXES_OFF

torch.set_num_threads(1)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of GPT-NeoX is imported, patched or named by the environment."""
    for name in ("NEOX_HOME", "LOCAL_SIZE", FIXES_OFF):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    path, environment = list(sys.path), dict(os.environ)
    assert not neox_modules()
    yield
    uninstall()
    for name in neox_modules():
        del sys.modules[name]
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def neox(clean: None) -> Installed:
    """The stub with everything in it that a worker gets."""
    return install(home=STUB)


@pytest.fixture
def unfixed(clean: None) -> Callable[..., Installed]:
    """unfixed(name, ...): the stub patched without these fixes."""

    def make(*names: str) -> Installed:
        uninstall()
        return install(home=STUB, fixes_off=names)

    return make


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the stub that a test may change."""
    home = tmp_path / "neox"
    shutil.copytree(STUB, home, ignore=shutil.ignore_patterns("__pycache__"))
    return home


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    store: Any = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
