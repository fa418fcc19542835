"""plan.json and the folder around it: what is written, what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import quarter_tools as tools

from data_prep.errors import DataError
from megatron_patches.config import ConfigError
from megatron_patches.quarter.plan import PlanError, commit_here, open_text, read_plan
from megatron_patches.quarter.prepare import prepare
from megatron_patches.quarter.results import trained_sha


@pytest.fixture
def copy(data, tmp_path):
    return shutil.copytree(data, tmp_path / "copy")


# ---- plan.json ------------------------------------------------------------------------------------


def test_a_plan_comes_back_as_it_was_written(study, data, tmp_path):
    written = prepare(study, tmp_path / "again", lambda text: None)
    assert read_plan(tmp_path / "again") == written
    assert [run.training.pos_emb for run in written.runs] == list(tools.METHODS)
    assert written.runs[0].parameters == 2 * 64 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 64 + 4


def tamper(folder, change):
    content = json.loads((folder / "plan.json").read_text())
    change(content)
    (folder / "plan.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: plan["runs"].clear(), "no runs"),
        (lambda plan: plan.pop("git_sha"), "missing or unknown: git_sha"),
        (lambda plan: plan.update(extra=1), "missing or unknown: extra"),
        (lambda plan: plan.update(format="gpu_quarter_hour 1"), "not of the format"),
        (
            lambda plan: plan["runs"][1]["training"].update(position_weight_decay=1),
            r"plan.runs\[1\].training.position_weight_decay: 1 is not bool",
        ),
    ],
)
def test_a_plan_that_is_not_whole_is_refused(change, words, copy):
    tamper(copy, change)
    with pytest.raises(PlanError, match=words):
        read_plan(copy)


def test_another_seed_in_the_plan_is_another_run(copy):
    """A plan may be edited; its rows then do not pass for those of the study."""
    before = trained_sha(read_plan(copy).runs[0], 10)
    tamper(copy, lambda plan: plan["runs"][0]["training"].update(seed=8))
    assert trained_sha(read_plan(copy).runs[0], 10) != before


def test_what_is_no_plan_is_refused(copy, tmp_path):
    with pytest.raises(PlanError, match="no prepared folder"):
        read_plan(tmp_path / "nowhere")
    for text in ("{", "[]", '{"format": "other"}', "[" * 100_000):
        (copy / "plan.json").write_text(text)
        with pytest.raises(PlanError, match="plan.json"):
            read_plan(copy)


def test_another_text_is_refused(copy):
    plan = read_plan(copy)
    with open(copy / "train.bin", "r+b") as file:
        file.write(b"\x07\x00")
    with pytest.raises(DataError, match="not what its sidecar describes"):
        open_text(copy, "train", plan)
    for end in ("bin", "idx", "json"):
        shutil.copy(copy / f"valid.{end}", copy / f"train.{end}")
    with pytest.raises(PlanError, match="another text"):
        open_text(copy, "train", plan)
    (copy / "valid.idx").unlink()
    with pytest.raises(DataError, match="missing"):
        open_text(copy, "valid", plan)


def test_without_git_the_plans_commit_counts(plan, monkeypatch):
    from megatron_patches.quarter import plan as plans

    plan = replace(plan, git_sha="abc")
    monkeypatch.setattr(plans, "git_sha", lambda: "unknown")
    assert commit_here(plan) == "abc"
    monkeypatch.setattr(plans, "git_sha", lambda: "def")
    assert commit_here(plan) == "def"


@pytest.mark.parametrize("sha", ["abc", "abc-dirty"])
def test_uncommitted_changes_are_said_when_a_folder_is_made(sha, study, tmp_path, monkeypatch):
    from megatron_patches.quarter import prepare as preparing

    monkeypatch.setattr(preparing, "git_sha", lambda: sha)
    said: list[str] = []
    assert prepare(study, tmp_path / "out", said.append).git_sha == sha
    assert any(line.startswith("warning: uncommitted") for line in said) == (sha == "abc-dirty")


def test_the_hash_of_a_run_knows_its_steps_and_its_precision(plan):
    run = plan.runs[0]
    shas = {trained_sha(run, 10), trained_sha(run, 11), run.config_sha}
    half = replace(run, training=replace(run.training, precision="bfloat16"))
    assert len(shas | {trained_sha(half, 10)}) == 4
    assert trained_sha(run, 10) == trained_sha(run, 10)


# ---- prepare --------------------------------------------------------------------------------------


def test_more_than_the_limit_is_refused_and_nothing_is_touched(study, copy):
    before = sorted(copy.iterdir())
    with pytest.raises(PlanError, match="MB, more than the"):
        prepare(study, copy, lambda text: None, max_bytes=10_000)
    assert sorted(copy.iterdir()) == before and read_plan(copy)


def test_a_folder_of_something_else_is_not_replaced(study, tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(PlanError, match="another --output"):
        prepare(study, tmp_path / "mine", lambda text: None)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("train_lengths: [32]", "train_lengths: [32, 16]", "train_lengths"),
        (
            "[nonoverlap, position]",
            "[nonoverlap, last]\n  last_k: 8",
            "only nonoverlap and position",
        ),
        ("  kernels", "  splits: [test]\n  kernels", "valid"),
        ("[32, 64, 128]", "[32, 4096]", "prepare more held-out text"),
        ("precision: fp32", "precision: fp16", "bfloat16 or fp32"),
    ],
)
def test_studies_that_do_not_fit_are_refused(old, new, words, study, tmp_path):
    text = study.read_text()
    assert old in text
    other = tmp_path / "other.yml"
    other.write_text(text.replace(old, new))
    with pytest.raises((PlanError, ConfigError), match=words):
        prepare(other, tmp_path / "out", lambda text: None)
    assert not (tmp_path / "out").exists()


def test_missing_text_names_the_command(tmp_path):
    study = tools.write_study(tmp_path)
    (tmp_path / "train.idx").unlink()
    with pytest.raises(PlanError, match="data_prep"):
        prepare(study, tmp_path / "out", lambda text: None)
