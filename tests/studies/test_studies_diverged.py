"""A training that diverged has its line in training.jsonl, and a later success beside it."""

from __future__ import annotations

import json
import math

import studies_tools as tools
from test_studies_follow import finish

from megatron_patches.analysis.training_rows import comparable_training, read_training
from megatron_patches.studies import carry_out, load_study, make_plan, record
from megatron_patches.studies.steps import Step


def test_a_diverged_training_gets_its_line(tmp_path, monkeypatch):
    """Through the sweep itself: the process ends with 1 after a log that ends in NaN."""
    study = tools.write_study(tmp_path)
    plan = make_plan(load_study(study))
    run = plan.runs[0]
    finish(run, losses=(4.0, math.nan))
    (run.folder / "latest").unlink()
    script = "import sys; print('error: iteration 4: the loss is nan'); sys.exit(1)"
    step = Step(("-c", script))
    monkeypatch.setattr(
        type(plan), "steps", lambda self, one: [step] if one.name == run.name else []
    )
    (failure,) = carry_out(plan, [{}], lambda _: None)
    (row,) = read_training(tmp_path / "results" / "training.jsonl")
    assert (row.status, row.config_sha, row.message) == ("failed", run.sha, failure.message)
    assert row.message == "error: iteration 4: the loss is nan"
    assert (row.iterations, row.lm_loss) == ([2], [4.0])
    # Trained after all: its line stands beside the other, and tables show the last good one.
    points = [json.loads(text) for text in (run.folder / "log.jsonl").read_text().splitlines()]
    points[1]["lm_loss"] = 3.5
    (run.folder / "log.jsonl").write_text("".join(json.dumps(p) + "\n" for p in points))
    (run.folder / "latest").write_text("global_step4")
    assert record(make_plan(load_study(study)), lambda _: None) == 1
    rows = read_training(tmp_path / "results" / "training.jsonl")
    assert [r.status for r in rows] == ["failed", "ok"]
    assert [r.status for r in comparable_training(rows)] == ["ok"]
