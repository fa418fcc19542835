"""scripts/bench_gpu.py where kernels fail: rows instead of an end, within its minutes."""

from __future__ import annotations

import json
import sys

import pytest
import quarter_tools as tools
import torch


class CompilerError(Exception):
    """As triton's own errors: no RuntimeError."""


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(tools.ROOT / "scripts"))
    import bench_gpu

    return bench_gpu


def options(bench, output, *more):
    return bench.make_parser().parse_args([*more, "--dry-run", "--output", str(output)])


def broken(*given, **options):
    raise CompilerError("out of resource: shared memory\nmore")


def test_only_the_timed_methods_are_compared_and_a_failure_is_a_row(bench, tmp_path, monkeypatch):
    asked = []

    def run(problem, closed_form):
        asked.append(problem.method.name)
        if problem.method.name == "alibi":
            broken()
        out = bench.oracle(problem)
        return out * 1.1 if problem.method.name == "rpe" else out

    monkeypatch.setattr(bench.ours, "run", run)
    output = tmp_path / "rows.jsonl"
    bad = bench.check(options(bench, output, "kerple_log", "alibi", "rpe"), lambda: False)
    assert bad == ["alibi", "rpe"] and set(asked) == {"kerple_log", "alibi", "rpe"}
    rows = {r["method"]: r for r in map(json.loads, output.read_text().splitlines())}
    assert rows["kerple_log"]["mistakes"] == []
    assert len(rows["alibi"]["mistakes"]) == 4  # two precisions, with and without a window
    assert "out of resource: shared memory" in rows["alibi"]["mistakes"][0]
    assert "output is off by 0.1" in rows["rpe"]["mistakes"][0]
    asked.clear()
    assert bench.check(options(bench, output, "rpe", "--check", "kerple_log"), lambda: False) == []
    assert set(asked) == {"kerple_log"}


def test_comparing_counts_in_the_minutes(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.ours, "run", broken)
    assert bench.check(options(bench, tmp_path / "rows.jsonl", "rpe"), lambda: True) == ["rpe"]
    assert "out of time: rpe not compared" in capsys.readouterr().out


@pytest.mark.parametrize("variant", ["triton", "flex"])
def test_a_variant_that_cannot_be_compiled_is_skipped(variant, bench, monkeypatch):
    monkeypatch.setitem(bench.VARIANTS, variant, lambda x: broken)
    x = bench.make_inputs("alibi", (1, 2, 16, 16), torch.float32, "cpu")
    assert bench.prepare(x, variant, "forward", None) == {
        "skipped": "out of resource: shared memory"
    }


def test_a_cell_that_fails_is_a_row_and_the_others_go_on(bench, tmp_path, monkeypatch):
    cells = []

    def cell(name, length, mode, arguments, late):
        cells.append((name, length, mode))
        broken()

    monkeypatch.setattr(bench, "cell", cell)
    monkeypatch.setattr(bench, "check", lambda *given: [])
    monkeypatch.setattr(bench.ours, "refuses", lambda problem: None)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    inputs = bench.make_inputs
    monkeypatch.setattr(bench, "make_inputs", lambda n, s, d, device: inputs(n, s, d, "cpu"))
    output = tmp_path / "rows.jsonl"
    given = ["bench_gpu.py", "alibi", "--lengths", "512", "1024", "--modes", "forward"]
    monkeypatch.setattr(sys, "argv", [*given, "--output", str(output)])
    assert bench.main() == 1 and len(cells) == 2
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["length"] for row in rows] == [512, 1024]
    assert {row["failed"] for row in rows} == {"out of resource: shared memory"}
