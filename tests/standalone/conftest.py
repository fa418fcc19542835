"""One toy text for all tests, and a process group that the tests of one process share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import standalone_tools as tools
import torch
import tracker_tools

from megatron_patches.config import Config

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for reason in FOREIGN_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(reason))


# Warnings of the libraries about their own code; ours stay errors.
FOREIGN_WARNINGS = (
    # torch 2.13 on its own mkldnn classes, when DeepSpeed imports its compiler
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    # DeepSpeed 0.19 under ZeRO 3 calls collectives by the names they had before torch 2.13
    "ignore:`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated:FutureWarning",
)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The engine divides the cores among the processes of a host: here as if there were many."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = "1024"
    yield
    if before is None:
        del os.environ["LOCAL_WORLD_SIZE"]
    else:
        os.environ["LOCAL_WORLD_SIZE"] = before


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the toy text's `train`, `valid` and `test`."""
    folder = tmp_path_factory.mktemp("text")
    tools.write_text(folder)
    return folder


@pytest.fixture
def config(text: Path, tmp_path: Path) -> Callable[..., Config]:
    """config(name="run", **changes) -> the tiny configuration of a run in `tmp_path`."""

    def make(name: str = "run", **changes: Any) -> Config:
        return tools.tiny(text, tmp_path / name, **changes)

    return make


@pytest.fixture(scope="session")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished tiny run; tests only read it."""
    from megatron_patches.standalone.train import train

    return train(tools.tiny(text, tmp_path_factory.mktemp("trained") / "run", train_iters=12))


@pytest.fixture(scope="session")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the steps 3 and 6 of 9; the last step was never reached. Tests copy it."""
    from megatron_patches.standalone import saving
    from megatron_patches.standalone.train import train

    folder = tmp_path_factory.mktemp("finished") / "run"
    train(tools.tiny(text, folder, **tools.THREE_STEPS))
    shutil.rmtree(folder / "global_step9")
    saving.point_latest(folder, "global_step6")
    return folder


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of its own, and nothing of this machine's account with wandb."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    (tmp_path / "netrc").write_text("")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """client(mischief) -> the file of what a stand-in for wandb gets."""
    (tmp_path / "client").mkdir()
    return lambda mischief="": tracker_tools.stand_in(tmp_path / "client", monkeypatch, mischief)
