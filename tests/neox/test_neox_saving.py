"""What is saved at ZeRO 3, how wandb is named, and that the documentation knows every correction."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from neox_tools import STUB

from megatron_patches.neox import fixes, install, uninstall

ROOT = Path(__file__).resolve().parents[2]


class Engine:
    """DeepSpeed's engine as far as saving goes."""

    def __init__(self, sliced: bool) -> None:
        self.sliced = sliced

    def zero_optimization_partition_weights(self) -> bool:
        return self.sliced

    def _zero3_consolidated_16bit_state_dict(self) -> dict[str, torch.Tensor]:
        return {"sequential.0.weight": torch.arange(3.0)}

    def save_checkpoint(self, folder: str, tag: str) -> None:
        Path(folder, tag).mkdir(parents=True)


@pytest.mark.parametrize(("sliced", "off"), [(True, False), (False, False), (True, True)])
def test_whole_weights_beside_the_slices(clean, tmp_path, monkeypatch, sliced, off):
    install(home=STUB, fixes_off=["whole_weights"] if off else [])
    from megatron import checkpointing

    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_, **__: 0)
    checkpointing.save_ds_checkpoint(5, Engine(sliced), SimpleNamespace(save=str(tmp_path)))
    files = [path.name for path in (tmp_path / "global_step5").iterdir()]
    if not sliced or off:
        assert files == []
        return
    assert files == ["mp_rank_00_model_states.pt"]
    stored = torch.load(tmp_path / "global_step5" / files[0], weights_only=True)
    assert stored["iteration"] == 5
    assert torch.equal(stored["module"]["sequential.0.weight"], torch.arange(3.0))


def test_the_other_ranks_write_nothing(clean, tmp_path, monkeypatch):
    install(home=STUB)
    from megatron import checkpointing

    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_, **__: 1)
    checkpointing.save_ds_checkpoint(5, Engine(True), SimpleNamespace(save=str(tmp_path)))
    assert list((tmp_path / "global_step5").iterdir()) == []


def test_wandb_gets_the_function_back(clean, monkeypatch):
    wandb, util = types.ModuleType("wandb"), types.ModuleType("wandb.util")
    sdk, lib = types.ModuleType("wandb.sdk"), types.ModuleType("wandb.sdk.lib")
    lib.runid = types.SimpleNamespace(generate_id=lambda: "id")
    wandb.util, wandb.sdk, sdk.lib = util, sdk, lib
    wandb.__spec__ = SimpleNamespace()
    for module in (wandb, util, sdk, lib):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    install(home=STUB, launcher=True)
    assert util.generate_id() == "id"
    uninstall()
    assert not hasattr(util, "generate_id")


def test_the_documentation_lists_every_correction():
    text = (ROOT / "docs" / "neox.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert {name for name in fixes.FIXES if rows.count(name) != 1} == set()
