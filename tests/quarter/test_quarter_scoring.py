"""One model at one length: what is measured beside the loss."""

from __future__ import annotations

import json

import torch

from megatron_patches.quarter import evaluation
from megatron_patches.quarter.budget import Speed
from megatron_patches.quarter.evaluation import HeldOut, Limits, evaluate
from megatron_patches.quarter.plan import open_text
from megatron_patches.quarter.results import Results
from megatron_patches.standalone.model import GPT

SPEED = Speed(0.1, 0.0, 0.0, 0.0)


def test_memory_is_that_of_each_length(plan, data, tmp_path, monkeypatch):
    """A device whose peak only grows until it is reset: each length has its own."""
    memory = {"peak": 0}
    monkeypatch.setattr(evaluation.machine, "forget_peak", lambda device: memory.update(peak=0))
    monkeypatch.setattr(evaluation.machine, "peak_bytes", lambda device: memory["peak"])
    original = evaluation.score

    def score(model, tokens, windows, **options):
        memory["peak"] = max(memory["peak"], 1000 // windows[0].length)
        return original(model, tokens, windows, **options)

    monkeypatch.setattr(evaluation, "score", score)
    run, text = plan.runs[0], HeldOut.of(open_text(data, "valid", plan).tokens, plan.evaluation)
    results = Results(tmp_path / "out", plan, {"data": "x", "git_sha": "y"})
    limits = Limits(lambda: 0.0, 1.0, 4096)
    torch.manual_seed(0)
    model = GPT(run.shape)
    for length in (32, 64, 128):
        evaluate(run, model, length, text, plan, SPEED, limits, results)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    found = summary["runs"][run.name]["evaluation"]
    assert {n: own["peak_bytes"] for n, own in found.items()} == {"32": 31, "64": 15, "128": 7}
    assert all(own["tokens_per_second"] * own["seconds"] > 1000 for own in found.values())
    assert len(results.cells_left(run)) == 0 and results.failed == 0
    assert len(results.cells_left(plan.runs[1])) == 2 * 3
