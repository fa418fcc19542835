"""The benchmarks run and print their tables; no time is asserted, machines are too different."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SMALLEST = {
    "bench_attention": [
        *("kerple_log", "--lengths", "64", "--dtypes", "fp32", "--rounds", "2", "--no-memory")
    ],
    "bench_methods": ["fox", "fire", "--lengths", "64", "--rounds", "2"],
    "bench_training": ["--models", "smallest", "--steps", "2"],
    "bench_checkpoint": ["--model", "smallest", "--rounds", "2"],
    "bench_evaluation": ["--lengths", "32", "64", "--rounds", "2"],
}
EXPECTED = {
    "bench_attention": [
        "kerple_log, fp32, forward",
        "kerple_log, fp32, training",
        "chunked / sdpa",
    ],
    "bench_methods": ["in multiples of kerple_log", "| fox | content | flat |", "| fire |"],
    "bench_training": ["training step", "engine_seconds"],
    "bench_checkpoint": ["saving as a share of training", "save_seconds"],
    "bench_evaluation": ["one window of each length", "all lengths in one evaluation"],
}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALLEST)
def test_a_benchmark_prints_its_tables_and_writes_rows(script, tmp_path):
    output = tmp_path / "bench.jsonl"
    done = run(script, *SMALLEST[script], "--output", str(output))
    assert done.returncode == 0, done.stderr
    for text in EXPECTED[script]:
        assert text in done.stdout
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert rows and all(row["threads"] == 1 and row["torch"] and row["cpu"] for row in rows)


def test_an_unknown_method_is_refused():
    done = run("bench_attention", "kerple_logg")
    assert done.returncode == 2
    assert "kerple_logg" in done.stderr and "Traceback" not in done.stderr


def test_the_method_with_ratio_one_must_have_a_table():
    done = run("bench_methods", "fox", "--against", "cope")
    assert done.returncode == 2 and "--against cope has no table of distances" in done.stderr


def test_no_ratio_from_a_wrong_result(monkeypatch):
    """A variant that ignores the bias is caught before its time is compared."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import torch
    from bench_attention_variants import Oracle, chunked, make_inputs, sdpa

    x = make_inputs("kerple_log", 64, torch.float32, True)
    oracle = Oracle(x, training=True)
    assert oracle.check("chunked", chunked) < 5e-5
    with pytest.raises(ValueError, match="no time is compared"):
        oracle.check("chunked", sdpa)
