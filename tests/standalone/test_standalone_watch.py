"""What a run writes into log.jsonl."""

from __future__ import annotations

import json
import os

import pytest
import standalone_tools as tools

from megatron_patches.standalone.train import train
from megatron_patches.training import log


@pytest.fixture(autouse=True)
def inside_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_log_of_a_run(config):
    folder = train(config(train_iters=5, log_interval=2, eval_iters=1, eval_interval=4))
    rows = tools.log(folder)
    assert [(row["iteration"], "lm_loss" in row) for row in rows] == [
        (2, True),
        (4, True),
        (4, False),
        (5, True),
        (5, False),
    ]
    steps = [row for row in rows if "lm_loss" in row]
    assert [row["tokens"] for row in steps] == [2 * 128, 4 * 128, 5 * 128]
    for row in steps:
        assert row["tokens_per_second"] == pytest.approx(128 * row["steps_per_second"])
        assert row["gradient_norm"] > 0
        low, mean, high = (row[f"position/bias_p_{kind}"] for kind in ("min", "mean", "max"))
        assert 0 < low <= mean <= high
    assert {"config.yml", "run.json", "log.jsonl", "latest"} <= set(os.listdir(folder))


def test_the_mean_over_the_logged_interval(config):
    every = tools.losses(train(config("every", train_iters=6, log_interval=1)))
    third = tools.losses(train(config("third", train_iters=6, log_interval=3)))
    assert third == pytest.approx([sum(every[:3]) / 3, sum(every[3:]) / 3], rel=1e-6)


def test_statistics_of_each_layer(config):
    row = tools.log(train(config(train_iters=1, position_sharing="layer")))[0]
    assert "position/layer0/bias_p_mean" in row and "position/layer1/bias_p_mean" in row


def test_a_log_cut_by_an_interruption(tmp_path):
    path = tmp_path / "log.jsonl"
    rows = [{"iteration": n, "lm_loss": 1.0} for n in (1, 2, 3, 4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 5, "lm_')
    log.forget_after(path, 3)
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows[:3]
