"""The command lines, run as users run them: from the repository, nothing installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from analysis_rows import fields, kernel, make, study

from megatron_patches.analysis.rows import Row, append_kernels, append_rows

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", f"scripts/{script}.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    append_rows(path, study())
    return path


def test_table3_prints_ours_published_and_trend(rows: Path) -> None:
    done = run("tables", rows, "--table", "table3", "--published-dataset", "openwebtext2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("### ") == 3
    assert "| kerple_log | 23.9±0.1 | **22.1±0.1** |" in done.stdout
    assert "### Published: KERPLE, Table 3, perplexity, openwebtext2" in done.stdout
    assert "| kerple_log, KERPLE Table 3 | 1.00 | 0.921 |" in done.stdout


def test_csv_output_goes_to_a_file(rows: Path, tmp_path: Path) -> None:
    append_rows(rows, [make("alibi", 1, 512, 20.0, dataset="code")])
    target = tmp_path / "new" / "table.csv"
    done = run("tables", rows, "--format", "csv", "--output", target, "--table", "relative")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    lines = target.read_text().splitlines()
    assert [line for line in lines if line.startswith("table,")] == lines[:1]
    assert [path.name for path in target.parent.iterdir()] == ["table.csv"]


def test_where_chooses_rows(rows: Path) -> None:
    append_rows(rows, [make("alibi", 1, 512, 20.0, split="test")])
    mixed = run("tables", rows)
    assert mixed.returncode == 1 and mixed.stdout == ""
    assert (
        "error: these results cannot be compared, they differ in: split (test, valid)"
        in (mixed.stderr.splitlines()[0])
    )
    assert len(mixed.stderr.splitlines()) == 1
    chosen = run("tables", rows, "--where", "split=test")
    assert chosen.returncode == 0 and "| alibi | **20.0** |" in chosen.stdout
    assert run("tables", rows, "--dataset", "nowhere").stderr == (
        "error: no rows match dataset=nowhere\n"
    )


def test_errors_have_the_right_exit_code(rows: Path, tmp_path: Path) -> None:
    for arguments in (["absent.jsonl"], [rows, "--table", "x"], [rows, "--where", "no=1"], []):
        assert run("tables", *arguments).returncode == 2
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    plain, debug = run("tables", bad), run("tables", bad, "--debug")
    assert plain.returncode == debug.returncode == 1
    assert plain.stderr.startswith(f"error: {bad}:1: missing")
    assert "Traceback" in debug.stderr and "Traceback" not in plain.stderr
    assert run("figures", bad, "--output", tmp_path).returncode == 1
    assert run("figures", rows).returncode == 2


@pytest.mark.parametrize("script", ["tables", "figures"])
def test_help_has_an_example(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0
    assert f"Example: python scripts/{script}.py results/runs.jsonl" in done.stdout


def test_figures_writes_all_kinds(rows: Path, tmp_path: Path) -> None:
    rows.unlink()
    append_rows(rows, [Row(**fields(dataset="a/b", position_losses=[2.5, 1.5]))])
    kernels = tmp_path / "kernels.jsonl"
    append_kernels(kernels, [kernel(0, dataset="a/b"), kernel(0)])
    done = run("figures", rows, "--kernels", kernels, "--output", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    stems = ("kernels-a_b-seed1", "perplexity-a_b", "position-a_b-1024")
    names = [f"{stem}.{suffix}" for stem in stems for suffix in ("svg", "png")]
    assert [Path(line).name for line in done.stdout.splitlines()] == names
    assert all((tmp_path / "out" / name).stat().st_size > 1000 for name in names)
