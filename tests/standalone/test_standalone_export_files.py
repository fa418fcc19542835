"""Conversions that are refused, interrupted or out of room: nothing that looks finished, nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from export_cases import a_model

from megatron_patches.standalone import CheckpointError, export
from megatron_patches.standalone.export import Form


def test_what_is_there_is_never_overwritten(tmp_path):
    model, config = a_model()
    export.export(model, tmp_path, step=1, config=config, form=Form())
    with pytest.raises(CheckpointError, match=r"global_step1: exists; choose another"):
        export.export(model, tmp_path, step=1, config=config, form=Form())
    with pytest.raises(CheckpointError, match=r"config\.yml: of another run or form"):
        export.export(model, tmp_path, step=2, config=config, form=Form("layers"))
    export.export(model, tmp_path, step=2, config=config, form=Form())
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert (tmp_path / "global_step1" / "configs" / "config.yml").is_file()


@pytest.mark.parametrize("fault", [OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing_that_looks_finished(fault, tmp_path, monkeypatch):
    model, config = a_model()
    export.export(model, tmp_path, step=1, config=config, form=Form("single", 2))
    before = (tmp_path / "latest").read_text()
    real, count = torch.save, [0]

    def failing(content, file):
        count[0] += 1
        if count[0] == 2:
            Path(file).write_bytes(b"half")
            raise fault
        real(content, file)

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(type(fault)):
        export.export(model, tmp_path, step=2, config=config, form=Form("single", 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.yml",
        "global_step1",
        "latest",
    ]
    assert (tmp_path / "latest").read_text() == before
    monkeypatch.undo()
    (tmp_path / "writing-global_step7").mkdir()  # of a conversion that was killed
    export.export(model, tmp_path, step=2, config=config, form=Form("single", 2))
    assert not list(tmp_path.glob("writing-*"))


def test_latest_comes_last(tmp_path, monkeypatch):
    model, config = a_model()

    def failing(path, text):
        if path.name == "latest":
            assert (tmp_path / "global_step1" / "mp_rank_00_model_states.pt").is_file()
            assert (tmp_path / "config.yml").is_file()
            raise OSError("disk full")
        path.write_text(text)

    monkeypatch.setattr(export, "write_text", failing)
    with pytest.raises(OSError, match="disk full"):
        export.export(model, tmp_path, step=1, config=config, form=Form())
    assert not (tmp_path / "latest").exists()


def test_what_belongs_to_others_stays(tmp_path):
    """The destination is any folder: only an unfinished step of a conversion is replaced."""
    model, config = a_model()
    for name in ("writing-thesis", "writing-global_step7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "writing-notes.txt").write_text("x")
    export.export(model, tmp_path, step=1, config=config, form=Form())
    left = sorted(path.name for path in tmp_path.glob("writing-*"))
    assert left == ["writing-notes.txt", "writing-thesis"]
    assert (tmp_path / "writing-thesis" / "file").read_text() == "x"


def test_all_that_a_run_needs_comes_before_latest(tmp_path, monkeypatch):
    model, config = a_model()
    real = Path.write_bytes

    def failing(path, content):
        if path.name == ".tokenizer.json.tmp":
            raise OSError("disk full")
        return real(path, content)

    monkeypatch.setattr(Path, "write_bytes", failing)
    beside = {"tokenizer.json": b"words"}
    with pytest.raises(OSError, match="disk full"):
        export.export(model, tmp_path, step=1, config=config, form=Form(), beside=beside)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yml"]
    monkeypatch.undo()
    export.export(model, tmp_path, step=1, config=config, form=Form(), beside=beside)
    assert (tmp_path / "tokenizer.json").read_bytes() == b"words"
