"""A run that still trains saves a newer step while another program reads it: one step is read, and named."""

from __future__ import annotations

import json
import shutil

import pytest
import standalone_tools as tools
from test_standalone_convert import convert  # noqa: F401  the script, as a fixture

from megatron_patches.standalone import checkpoint, cli, load_model, saving
from megatron_patches.standalone.evaluate import Evaluation, Request


@pytest.fixture
def moving(finished, tmp_path, monkeypatch):
    """A run whose `latest` moves on from step 3 to step 6 as soon as weights were read."""
    run = tmp_path / "moving"
    shutil.copytree(finished, run)
    saving.point_latest(run, "global_step3")
    real = checkpoint.read_shards

    def then_saved(folder):
        found = real(folder)
        saving.point_latest(run, "global_step6")
        return found

    monkeypatch.setattr(checkpoint, "read_shards", then_saved)
    return run


def test_rows_name_the_step_that_was_scored(moving):
    evaluation = Evaluation(moving, Request((32,)))
    assert (moving / "latest").read_text() == "global_step6"
    assert evaluation.step == evaluation.row(32).step == 3
    tools.assert_same(
        evaluation.model.state_dict(), load_model(moving / "global_step3").state_dict()
    )


def test_kernels_name_the_step_that_they_are_of(moving, tmp_path):
    written = tmp_path / "kernels.jsonl"
    assert cli.eval_main(["--checkpoint", str(moving), "--only-kernels", str(written)]) == 0
    assert {json.loads(line)["step"] for line in written.read_text().splitlines()} == {3}


def test_converted_weights_keep_their_iteration(convert, moving, tmp_path):  # noqa: F811
    assert convert.main([str(moving), str(tmp_path / "to")]) == 0
    assert (tmp_path / "to" / "latest").read_text() == "global_step3"
    tools.assert_same(
        load_model(tmp_path / "to").state_dict(), load_model(moving / "global_step3").state_dict()
    )


def test_a_folder_for_hugging_face_names_its_step(moving, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from megatron_patches.hf import carry, describing

    carry(moving, tmp_path / "carried", with_tokenizer=False)
    assert json.loads((tmp_path / "carried" / describing.RECORD).read_text())["step"] == 3
