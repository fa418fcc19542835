"""What a study costs: tokens by protocol, seconds by length, and the limit of a Slurm task."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess

import pytest
import studies_tools as tools

from megatron_patches.analysis.rows import append_rows
from megatron_patches.studies import cost, estimate, load_study, make_plan, report
from megatron_patches.studies.execute import slots
from megatron_patches.studies.slurm import script
from megatron_patches.studies.speed import expected_vocabulary, operations

DESCRIBE = cost._describe


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(cost, "_describe", lambda run: cost.Model(16, "a model", 1.5))


def test_cost_counts_what_each_protocol_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "_describe", lambda run: cost.Model(16, "a model", 1.5))
    asked = {"lengths": [16, 32], "max_tokens": 129}
    asked |= {"protocols": ["nonoverlap", "last", "sliding"], "last_k": 4, "stride": 8}
    plan = make_plan(load_study(tools.write_study(tmp_path, eval=asked)))
    found = estimate(plan, 10.0)
    last = (128 - 32) // 8 + 1
    sliding = (1 + (128 - 16) // 8) * 16 + (1 + (128 - 32) // 8) * 32
    assert found.evaluation_tokens == 4 * (129 * 2 + last * 48 + sliding)
    assert found.training_tokens == 4 * 4 * 64
    at_16 = 129 + last * 16 + (1 + (128 - 16) // 8) * 16
    at_32 = 129 + last * 32 + (1 + (128 - 32) // 8) * 32
    scoring = 4 * (at_16 + at_32 * forward(32) / forward(16))
    hours = (found.training_tokens + scoring / 3) / 10 / 3600
    assert found.hours(1) == pytest.approx(hours) and found.hours(2) == pytest.approx(hours / 2)
    assert "memory about 1.5 GB a run" in report(plan, found, 2, "the CPU")
    assert len(slots(plan, 3, 1.5)) == 3
    assert len(slots(plan, None, 1e9)) == 1  # never more than the memory holds
    # A run a core, one thread each; cores that fewer runs leave over become threads.
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert [place["OMP_NUM_THREADS"] for place in slots(plan, None, None)] == ["1"] * 8
    assert [place["OMP_NUM_THREADS"] for place in slots(plan, 3, None)] == ["2"] * 3
    assert [place["OMP_NUM_THREADS"] for place in slots(plan, 16, None)] == ["1"] * 16


@pytest.mark.parametrize(("dataset", "rows"), [("local_code", 1024), ("text", 50264)])
def test_a_vocabulary_that_nobody_knows_yet_is_named_as_assumed(
    dataset, rows, tmp_path, monkeypatch
):
    """That of the corpus' own tokenizer, else GPT-2's; padded to the toy model's multiples of 8."""
    asked = []

    def told(command, **_):
        asked.append(command)
        text = (
            "model  9 parameters, vocabulary 8 (padded)\nbatch  4 sequences\nmemory  about 1.0 GB"
        )
        return subprocess.CompletedProcess(command, 0, text, "")

    study = load_study(tools.write_study(tmp_path))
    run = make_plan(study).runs[0]
    run = dataclasses.replace(run, config=run.config.model_copy(update={"dataset": dataset}))
    monkeypatch.setattr(cost.subprocess, "run", told)
    known = DESCRIBE(run)
    assert known.summary == "9 parameters, vocabulary 8 (padded); 4 sequences"
    (tmp_path / "train.json").unlink()
    guessed = DESCRIBE(run)
    assert (
        guessed.summary == f"{known.summary}; the vocabulary is assumed until the text is prepared"
    )
    assert f"padded_vocab_size={rows}" in asked[1] and not any("padded" in w for w in asked[0])
    assert expected_vocabulary(run.config) == rows


def forward(length, vocabulary=tools.ENTRIES):
    """Of the toy model: one layer of width 16, a feed-forward of 64; by hand."""
    weights = 4 * 16 * 16 + 2 * 16 * 64 + 16 * vocabulary
    return 2 * weights + 2 * 16 * length  # q.k and the sum of values, each over half the window


def test_a_token_costs_more_in_a_long_window(tmp_path):
    asked = {"lengths": [16, 4096], "max_tokens": 129}
    plan = make_plan(load_study(tools.write_study(tmp_path, methods=["alibi"], eval=asked)))
    assert operations(plan.runs[0].config, (4096, None), tools.ENTRIES) == forward(4096)
    windowed = operations(plan.runs[0].config, (4096, 8), tools.ENTRIES)
    assert forward(15) < windowed < forward(16)  # 8 - 8 * 8 / 8192 keys
    found = estimate(plan, 100.0)
    # Trained at 16: three forward passes of 16, at 100 tokens/s; 129 tokens at each length.
    seconds = 4 * 64 / 100 + 129 / 300 + 129 / 300 * forward(4096) / forward(16)
    assert found.seconds == pytest.approx([seconds] * 2)
    assert forward(4096) / forward(16) > 10


def test_measured_speeds_go_before_operations(tmp_path):
    asked = {"lengths": [16, 32, 64], "max_tokens": 129}
    study = tools.write_study(tmp_path, eval=asked, methods=["alibi"], seeds=[1, 2, 3])
    run, second, third = make_plan(load_study(study)).runs
    for owner, seconds in ((run, 4.0), (second, 8.0)):
        cell = {"protocol": "nonoverlap", "eval_length": 32, "windows": 4, "seconds": seconds}
        row = tools.row(owner, **cell, asked={"longest": 64})
        append_rows(tmp_path / "results" / "rows.jsonl", [row])
    plan = make_plan(load_study(study))
    found = estimate(plan, 100.0)
    speed = (32 + 16) / 2  # 128 tokens in 4 s and in 8 s
    at_16 = 129 / speed * forward(16) / forward(32)
    at_64 = 129 / speed * forward(64) / forward(32)
    train, at_32 = 4 * 64 / 100, 129 / speed
    # Cells that have a row are not counted again.
    expected = [train + at_16 + at_64] * 2 + [train + at_16 + at_32 + at_64]
    assert found.seconds == pytest.approx(expected)
    assert found.evaluation_tokens == (2 + 2 + 3) * 129
    # Three runs in four places: nobody shares a run.
    assert found.hours(4) == found.hours(3) == pytest.approx(max(expected) / 3600)
    assert found.hours(2) == pytest.approx(sum(expected) / 2 / 3600)
    assert third.name == "alibi-text-3"


def test_speeds_of_training_are_those_of_the_length(tmp_path):
    lengths = {"train_lengths": [16, 8], "methods": ["alibi"], "seeds": [1]}
    study = tools.write_study(tmp_path, **lengths, eval={"lengths": [16], "max_tokens": 129})
    plan = make_plan(load_study(study))
    assert estimate(plan).seconds is None and estimate(plan).hours(2) is None
    long, short = plan.runs
    assert "--time" not in (text := script(plan, estimate(plan)))[: text.index("# No --time")]
    assert "# No --time, because the speed is not known yet" in text
    long.folder.mkdir(parents=True)
    (long.folder / "log.jsonl").write_text(json.dumps({"tokens_per_second": 50.0}) + "\n")
    found = estimate(make_plan(load_study(study)))
    scoring = 129 / (3 * 50)
    scale = forward(8) / forward(16)
    # From the speed at 8 to that of scoring at 16 and back is the same figure.
    expected = [4 * 64 / 50 + scoring, 4 * 32 / 50 * scale + scoring]
    assert found.seconds == pytest.approx(expected) and found.tokens_per_second == 50.0


def test_the_limit_of_a_task_is_that_of_the_longest_run(tmp_path):
    study = tools.write_study(
        tmp_path,
        methods=["alibi"],
        train_lengths=[16, 8],
        length_overrides={16: {"train_iters": 4000}, 8: {"train_iters": 4}},
        overrides={},
        eval={"lengths": [16], "max_tokens": 129},
    )
    plan = make_plan(load_study(study))
    found = estimate(plan, 10.0)
    seconds = 4000 * 64 / 10 + 129 / 30
    assert max(found.seconds) == pytest.approx(seconds)
    assert f"#SBATCH --time={math.ceil(seconds / 60 * 1.5)}\n" in script(plan, found)


def test_no_limit_without_the_size_of_the_text(tmp_path):
    study = tools.write_study(tmp_path, eval={"lengths": [16]})
    (tmp_path / "valid.bin").unlink()
    plan = make_plan(load_study(study))
    found = estimate(plan, 10.0)
    assert found.evaluation_tokens is None and found.hours(1) is not None
    text = script(plan, found)
    assert "#SBATCH --time" not in text
    assert "# No --time, because the size of the text is not known yet" in text
    assert "evaluation not counted" in report(plan, found, 1, "the CPU")
