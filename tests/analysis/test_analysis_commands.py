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
    assert "| kerple_log, KERPLE Table 3 | 1.000 | 0.921 |" in done.stdout
    # Models of a thousand parameters: the trend alone may be compared, and so the difference is of it.
    ratio = (22.0 / 23.8 + 22.1 / 23.9 + 22.2 / 24.0) / 3
    assert f"| kerple_log, difference | +0.000 | {ratio - 22.0 / 23.9:+.3f} |" in done.stdout


def test_table3_of_the_papers_size_has_the_difference_of_perplexities(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    size = {"dataset": "openwebtext2", "parameters": 162_000_000, "step": 50_000}
    size |= {"tokenizer": "c9c1848c204159d7"}
    append_rows(path, [make("kerple_log", 1, n, p, **size) for n, p in ((512, 24.4), (1024, 22.5))])
    done = run("tables", path, "--table", "table3")
    assert (done.returncode, done.stderr) == (0, "")
    titles = [line for line in done.stdout.splitlines() if line.startswith("### ")]
    assert titles == [
        "### Perplexity by evaluation length, openwebtext2",
        "### Published: KERPLE, Table 3, perplexity, openwebtext2",
        "### Perplexity beside KERPLE Table 3, openwebtext2",
        "### Perplexity relative to that at the training length, openwebtext2",
    ]
    assert "| kerple_log, difference | +0.5 | +0.5 |" in done.stdout
    part = done.stdout.split(titles[2])[1]
    assert (
        "data data-1, tokenizer c9c1848c2041" in part and "configs kerple_log kerple_log1" in part
    )


def test_tables_keep_questions_apart(tmp_path: Path) -> None:
    """Two training lengths, as a whole study leaves them: a table each, in order of length."""
    path = tmp_path / "rows.jsonl"
    other = [make("alibi", 1, n, 20.0 + n / 512, train_length=1024) for n in (1024, 2048)]
    longer = [make("rotary", 1, 1024, 30.0, train_length=4096)]
    append_rows(path, [*other, *longer, *study()])
    done = run("tables", path)
    assert (done.returncode, done.stderr) == (0, "")
    tables = done.stdout.split("### Perplexity by evaluation length, books")[1:]
    lengths = ("trained on 512 ", "trained on 1024 ", "trained on 4096 ")
    assert all(text in table for text, table in zip(lengths, tables, strict=True))
    assert "| alibi | **22.0** | **24.0** |" in tables[1] and "rotary" not in tables[1]
    # A method of one of them is no reason to refuse the others.
    some = run("tables", path, "--methods", "rotary", "alibi", "--table", "relative")
    assert (some.returncode, some.stdout.count("### ")) == (0, 3)
    one = run("tables", path, "--methods", "rotary")
    assert (one.returncode, one.stdout.count("### ")) == (0, 1)
    assert run("tables", path, "--methods", "rotary", "sinusoidal").returncode == 2
    # The published table is the same beside both.
    beside = run("tables", path, "--table", "table3", "--published-dataset", "github")
    assert beside.returncode == 0 and beside.stdout.count("### Published") == 1
    append_rows(path, [make("alibi", 1, 512, 21.0, config_sha="other")])
    clash = run("tables", path)
    assert clash.returncode == 1 and "results of two configurations" in clash.stderr


def test_brief_keeps_what_was_measured_with(rows: Path, tmp_path: Path) -> None:
    brief, whole = (run("tables", rows, *words).stdout for words in (["--brief"], []))
    assert "engine standalone, attention chunked, float32" in brief
    gone = set(whole.splitlines()) - set(brief.splitlines())
    assert {line.split()[0] for line in gone} == {"data", "commit", "configs"}
    runs = tmp_path / "training.jsonl"
    append_training(runs, [training("alibi", 1)])
    text = run("tables", runs, "--table", "training", "--brief").stdout
    assert "\nengine standalone  \nmachine: a CPU, 2 cores" in text and "tok-1" not in text


def test_brief_keeps_the_hashes_that_alone_tell_tables_apart(rows: Path) -> None:
    assert "data data-1" not in run("tables", rows, "--brief").stdout
    append_rows(rows, [make("alibi", 1, 512, 20.0, data="data-2")])
    text = run("tables", rows, "--brief").stdout
    assert text.count("### ") == 2 and "data data-1" not in text and "data data-2" not in text
    append_rows(
        rows, [make(m, s, 512, 20.0, data="data-2") for m in ("alibi", "learned") for s in (2, 3)]
    )
    append_rows(rows, [make("alibi", 1, n, 20.0, data="data-2") for n in (1024, 2048)])
    text = run("tables", rows, "--brief").stdout
    assert "data data-1" in text and "data data-2" in text


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
    both = run("tables", rows)
    assert both.returncode == 0 and both.stdout.count("### ") == 2
    append_rows(rows, [make("rotary", 1, 512, 20.0, split="test", parameters=2000)])
    mixed = run("tables", rows)
    assert mixed.returncode == 1 and mixed.stdout == ""
    assert mixed.stderr == (
        "error: these results cannot be compared, they differ in: parameters (1000, 2000)\n"
    )
    chosen = run("tables", rows, "--where", "split=test", "--methods", "alibi")
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
    # Options that no row fits are wrong options, not wrong rows.
    for choice in (["--dataset", "nowhere"], ["--methods", "nothing"], ["--where", "step=7"]):
        none = run("tables", rows, *choice)
        assert none.returncode == 2 and none.stderr.startswith("error: no rows ")
        assert run("report", rows, "--output", tmp_path / "page.html", *choice).returncode == 2


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
    # Kernels of a data set without rows, too: only a choice on the command line leaves them out.
    stems = ("kernels-a_b-seed1", "reach-a_b", "kernels-books-seed1", "reach-books")
    stems += ("position-a_b-1024",)
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
    assert none.returncode == 2 and none.stderr.startswith("error: no training rows match")
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
    assert "| alibi, seed 1 | 3.0000 | 3.3000 | – | +18.000 | 10,240 | 20 |" in done.stdout
    one = run("tables", runs, "--table", "training", "--dataset", "code")
    assert "rotary" in one.stdout and "alibi" not in one.stdout
    reach = run("tables", kernels, "--table", "reach")
    assert "| kerple_log, books | 1 | 1 | 0 | 13 | 13 | 13 | 13 | 13 |" in reach.stdout
    none = run("tables", kernels, "--table", "reach", "--methods", "alibi")
    assert none.returncode == 2 and none.stderr.startswith("error: no rows match")
    wrong = run("tables", runs, "--table", "reach")
    assert wrong.returncode == 1 and f"error: {runs}:1: missing" in wrong.stderr
