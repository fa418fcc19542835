"""The command lines, run as users run them: from the repository, nothing installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from analysis_rows import fields, kernel, make, study, training

from megatron_patches.analysis.rows import Row, append_kernels, append_rows
from megatron_patches.analysis.training_rows import append_training

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
    stems = ("kernels-a_b-seed1", "reach-a_b", "position-a_b-1024")
    names = [f"{stem}.{suffix}" for stem in stems for suffix in ("svg", "png")]
    assert [Path(line).name for line in done.stdout.splitlines()] == names
    assert all((tmp_path / "out" / name).stat().st_size > 1000 for name in names)


def test_figures_of_training_alone(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    shorter = {"train_length": 128, "global_batch": 16}
    append_training(
        path, [training("kerple_log", 1), training("rotary", 1, position={}, **shorter)]
    )
    out = tmp_path / "out"
    done = run("figures", "--training", path, "--output", out)
    assert (done.returncode, done.stderr) == (0, "")
    names = [Path(line).stem for line in done.stdout.splitlines()]
    stems = ["training-books-train128", "training-books-train512", "parameters-books-train512"]
    assert names == [stem for stem in stems for _ in range(2)]
    one = run("figures", "--training", path, "--output", out, "--where", "train_length=128")
    assert [Path(line).name for line in one.stdout.splitlines()][1] == "training-books.png"
    none = run("figures", "--training", path, "--output", out, "--methods", "alibi")
    assert none.returncode == 1 and none.stderr.startswith("error: no training rows match")
    nothing = run("figures", "--output", out)
    assert nothing.returncode == 2 and "name files of rows" in nothing.stderr


def test_figures_keep_questions_apart(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    other = [make("alibi", 1, n, 20.0, train_length=128) for n in (512, 1024)]
    position = [Row(**fields(protocol="position", position_losses=[2.5, 1.5]))]
    append_rows(path, [*study(), *other, *position])
    done = run("figures", path, "--output", tmp_path / "out", "--methods", "alibi", "kerple_log")
    assert (done.returncode, done.stderr) == (0, "")
    names = [Path(line).name for line in done.stdout.splitlines() if line.endswith(".png")]
    assert sorted(names) == [
        "perplexity-books-train128-nonoverlap.png",
        "perplexity-books-train512-nonoverlap.png",
        "position-books-1024-train512-position.png",
    ]
    append_rows(path, [make("alibi", 1, 512, 21.0, config_sha="other")])
    clash = run("figures", path, "--output", tmp_path / "out")
    assert clash.returncode == 1 and "results of two configurations" in clash.stderr


def test_tables_of_models(tmp_path: Path) -> None:
    runs, kernels = tmp_path / "training.jsonl", tmp_path / "kernels.jsonl"
    append_training(runs, [training("alibi", 1), training("rotary", 1, dataset="code")])
    append_kernels(kernels, [kernel(0, searched_to=63, effective_length=13)])
    done = run("tables", runs, "--table", "training")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("### Training runs, ") == 2
    assert "| alibi, seed 1 | 3.0000 | 3.3000 | – | 10,240 | 20 |" in done.stdout
    one = run("tables", runs, "--table", "training", "--dataset", "code")
    assert "rotary" in one.stdout and "alibi" not in one.stdout
    reach = run("tables", kernels, "--table", "reach")
    assert "| kerple_log, books | 1 | 1 | 0 | 13 | 13 | 13 | 13 | 13 |" in reach.stdout
    none = run("tables", kernels, "--table", "reach", "--methods", "alibi")
    assert none.returncode == 1 and none.stderr.startswith("error: no rows match")
    wrong = run("tables", runs, "--table", "reach")
    assert wrong.returncode == 1 and f"error: {runs}:1: missing" in wrong.stderr
