"""What goes wrong in a run: time that ends, methods that fail, and the rows of the others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import quarter_tools as tools

from megatron_patches.analysis.rows import read_rows
from megatron_patches.quarter import calibration, evaluation, training
from megatron_patches.quarter import run as running
from megatron_patches.quarter import train as fitting
from megatron_patches.quarter.budget import Speed
from megatron_patches.quarter.calibration import Calibration
from megatron_patches.quarter.collect import collect

CELLS = 3 * 3 * 2  # methods, lengths, protocols


def test_time_that_ends_in_training_gives_failed_rows(plan, data, tmp_path, monkeypatch):
    """A clock by which training takes far longer than calibrated: no row is missing, none overruns."""
    monkeypatch.setattr(running.budget, "FEWEST_STEPS", 1)
    clock = tools.FakeClock(1.0)
    asked = tools.request(data, tmp_path / "out", minutes=1.0)
    hour, failed, _ = tools.run(plan, asked, clock)
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert failed == len(rows) == CELLS
    assert all(row.status == "failed" and "out of time" in (row.message or "") for row in rows)
    assert hour.results.summary["state"] == "finished"


def test_time_that_ends_in_the_evaluation_leaves_whole_columns(plan, data, tmp_path, monkeypatch):
    """Each forward pass costs; the shortest lengths of all methods are scored first."""
    clock = tools.FakeClock(0.0)
    original = running.QuarterHour._score_all

    def slow(hour, models, calibration):
        clock.tick = (hour.deadline - clock.now()) / 130
        speeds = {n: replace(s, base=0.0, slope=0.0) for n, s in calibration.speeds.items()}
        original(hour, models, replace(calibration, speeds=speeds, pass_tokens=32))
        clock.tick = 0.0

    monkeypatch.setattr(running.QuarterHour, "_score_all", slow)
    tools.run(plan, tools.request(data, tmp_path / "out"), clock)
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert len(rows) == CELLS
    states = {n: {r.status for r in rows if r.eval_length == n} for n in (32, 64, 128)}
    # 32 looks at the clock for 32 windows, 16 and 8 for the longer ones, and two more each
    assert states[32] == {"ok"} and states[128] == {"failed"}
    assert len({r.method for r in rows if r.status == "ok"}) == 3
    assert "out of time" in next(row.message for row in rows if row.eval_length == 128)
    order = [(row.eval_length, row.method) for row in rows if row.protocol == "position"]
    assert order == [(n, m) for n in (32, 64, 128) for m in tools.METHODS]


@pytest.mark.parametrize("slower", [1.0, 1.08])
def test_steps_slower_than_calibrated_cost_no_cell(slower, plan, data, tmp_path, monkeypatch):
    """Under a clock that only steps and forward passes move, all of them slower than calibrated."""
    clock = tools.FakeClock(0.0)
    speed = Speed(0.3, 5e-4, 0.0, 0.5)
    speeds = {run.name: speed for run in plan.runs}
    monkeypatch.setattr(running, "calibrate", lambda *_: Calibration(8, 4096, speeds, None))
    step, score = training.Trainer.step, evaluation.score

    def slow_step(*given):
        clock.seconds += 0.3 * slower
        return step(*given)

    def slow_score(model, tokens, windows, **options):
        clock.seconds += slower * speed.scoring(len(windows) * windows[0].length, windows[0].length)
        return score(model, tokens, windows, **options)

    monkeypatch.setattr(training.Trainer, "step", slow_step)
    monkeypatch.setattr(evaluation, "score", slow_score)
    runs = [replace(r, training=replace(r.training, train_iters=10**6)) for r in plan.runs]
    monkeypatch.setattr(running.budget, "FEWEST_STEPS", 10)
    monkeypatch.setattr(running.budget, "MAX_PASSES", 10**3)
    changed = replace(plan, runs=tuple(runs))
    hour, failed, _ = tools.run(changed, tools.request(data, tmp_path / "out", minutes=1.0), clock)
    assert hour.results.summary["steps_decided_by"] == "the time left"
    assert failed == 0 and 0.75 * 60 < clock.seconds <= hour.deadline
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert len(rows) == CELLS and {row.status for row in rows} == {"ok"}


class CompilerError(Exception):
    """As triton's own errors: no RuntimeError, no ValueError."""


@pytest.mark.parametrize("where", ["calibration", "train", "score"])
def test_an_unexpected_error_costs_its_own_cells_alone(where, plan, data, tmp_path, monkeypatch):
    module, name = {
        "calibration": (calibration, "_time_training"),
        "train": (running, "train"),
        "score": (evaluation, "score"),
    }[where]
    original = getattr(module, name)

    def broken(what, *given, **options):
        found = what.position_method.name if where == "score" else what.training.pos_emb
        if found == "alibi":
            raise CompilerError("out of resource: shared memory")
        return original(what, *given, **options)

    if where == "score":  # the calibration scores, too
        speeds = {run.name: Speed(0.01, 0.0, 0.0, 0.0) for run in plan.runs}
        monkeypatch.setattr(running, "calibrate", lambda *_: Calibration(8, 4096, speeds, None))
    monkeypatch.setattr(module, name, broken)
    _, failed, _ = tools.run(plan, tools.request(data, tmp_path / "out"))
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert failed == 6 and len(rows) == CELLS
    for row in rows:
        assert (row.status == "failed") == (row.method == "alibi")
        assert row.status == "ok" or row.message == "out of resource: shared memory"
    text = (tmp_path / "out" / "errors.log").read_text()
    assert "Traceback" in text and "CompilerError" in text and "in broken" in text
    states = {row.method: row.status for row in collect(tmp_path / "out")}
    alibi = "ok" if where == "score" else "failed"
    assert states == {"kerple_log": "ok", "alibi": alibi, "rotary": "ok"}


def test_kernel_rows_that_fail_cost_no_score(plan, data, tmp_path, monkeypatch):
    def broken(*given, **options):
        raise CompilerError("no kernel")

    monkeypatch.setattr(running, "kernel_rows", broken)
    hour, failed, said = tools.run(plan, tools.request(data, tmp_path / "out"))
    assert failed == 0 and hour.lost == 3  # and exit code 1
    assert {row.status for row in read_rows(tmp_path / "out" / "rows.jsonl")} == {"ok"}
    assert any("no kernel rows" in line for line in said)
    assert hour.results.summary["runs"][plan.runs[0].name]["kernels_failed"] == "no kernel"
    assert "CompilerError" in (tmp_path / "out" / "errors.log").read_text()


def test_a_method_that_diverges_is_a_row_and_the_others_go_on(plan, data, tmp_path, monkeypatch):
    original = fitting.learning_rate

    def rate(training, step):
        return math.nan if training.pos_emb == "alibi" and step == 7 else original(training, step)

    monkeypatch.setattr(fitting, "learning_rate", rate)
    _, failed, _ = tools.run(plan, tools.request(data, tmp_path / "out"))
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert failed == 6 and len(rows) == CELLS
    assert [row.status for row in collect(tmp_path / "out")] == ["failed", "ok", "ok"]
    for row in rows:
        assert (row.status == "failed") == (row.method == "alibi")
        if row.method == "alibi":
            assert "not finite" in (row.message or "")
