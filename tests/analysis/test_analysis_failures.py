"""Failed steps: which of them still leave a gap, and that tables and the report name them."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import retrieval_row_cases
from analysis_rows import kernel, make, training

from megatron_patches.analysis import figures, figures_position, figures_training
from megatron_patches.analysis.command import lets_through
from megatron_patches.analysis.failures import (
    Failure,
    append_failures,
    open_failures,
    read_failures,
)
from megatron_patches.analysis.report import Extras, report
from megatron_patches.analysis.retrieval_rows import RetrievalRow
from megatron_patches.analysis.rows import RowError, append_kernels, append_rows
from megatron_patches.analysis.sections import Source, find_files
from megatron_patches.analysis.training_rows import append_training

ROOT = Path(__file__).resolve().parents[2]
LOSS = math.log(8.0)
YARN = {"eval_position_options": {"factor": 8, "scaling": "yarn"}}
FAILURE = Failure(
    study="toy",
    run="rotary-books-2",
    step="train",
    command="python deepy.py train.py",
    exit_code=1,
    message="error: the <loss> is not finite",
    log="checkpoints/toy/rotary-books-2/output.txt",
    when="2026-01-02T03:04:05+00:00",
    method="rotary",
    dataset="books",
    seed=2,
    train_length=512,
    config_sha="feed",
)


def retrieved(**changes):
    return RetrievalRow(**retrieval_row_cases.fields(config_sha="feed", **changes))


def scored(**changes):
    return make("rotary", 2, 1024, 8.0, **{"config_sha": "feed", **changes})


@pytest.mark.parametrize(
    ("step", "rows", "left"),
    [
        ("train", [], True),
        ("train", [scored()], False),
        ("train", [scored(config_sha="other")], True),
        ("eval nonoverlap valid", [scored()], False),
        ("eval nonoverlap valid", [scored(options={"attention_eps": 0.01})], True),
        ("train", [scored(options={"attention_eps": 0.01})], False),
        ("eval nonoverlap test", [scored()], True),
        ("eval last valid", [scored()], True),
        ("eval nonoverlap valid window 512", [scored()], True),
        ("eval nonoverlap valid", [scored(options={"sliding_window_width": 512})], False),
        (
            "eval nonoverlap valid window 512",
            [scored(), scored(options={"sliding_window_width": 512})],
            False,
        ),
        ("eval nonoverlap valid, scaling yarn, factor 8", [scored()], True),
        ("eval nonoverlap valid, scaling yarn, factor 8", [scored(options=YARN)], False),
        ("eval nonoverlap valid window 4, scaling yarn, factor 8", [scored(options=YARN)], True),
        ("eval nonoverlap valid", [scored(options=YARN)], True),
        ("retrieval valid, scaling yarn, factor 8", [retrieved()], True),
        ("retrieval valid, scaling yarn, factor 8", [retrieved(options=YARN)], False),
        (
            "eval nonoverlap valid window blockwise:8",
            [scored(options={"sliding_window_width": "blockwise:8"})],
            False,
        ),
        ("eval nonoverlap valid window blockwise:8", [scored()], True),
        ("retrieval", [scored()], True),
        ("retrieval", [retrieved()], False),
        ("retrieval valid", [retrieved()], False),
        ("retrieval test", [retrieved()], True),
        ("retrieval valid window 8", [retrieved()], True),
        ("retrieval valid window 8", [retrieved(options={"sliding_window_width": 8})], False),
        ("kernels", [scored(), retrieved()], True),
        ("record", [], True),
        ("record", [scored(), retrieved()], True),
        ("record", [training("rotary", 2, config_sha="feed")], False),
        ("record", [training("rotary", 2, config_sha="other")], True),
        ("train", [training("rotary", 2, config_sha="feed")], False),
    ],
)
def test_a_later_success_of_the_same_step_closes_a_failure(step, rows, left) -> None:
    assert bool(open_failures([replace(FAILURE, step=step)], rows)) is left


ASKED = "python eval.py --checkpoint x --split valid --lengths 512 1024 --output 'a b.jsonl'"


@pytest.mark.parametrize(
    ("command", "rows", "left"),
    [
        # Killed while it scored the second length: its first row must not hide the hole.
        (ASKED, [scored(eval_length=512, stride=512)], True),
        (ASKED, [scored(eval_length=512, stride=512), scored()], False),
        (ASKED, [scored(), make("rotary", 2, 512, None, config_sha="feed")], False),  # refused
        (
            ASKED,
            [scored(), make("rotary", 2, 512, None, config_sha="feed", status="failed")],
            True,
        ),
        # A command that names no lengths: those that other runs of the same text have.
        ("python eval.py", [scored(), make("alibi", 1, 512, 9.0)], True),
        ("python eval.py", [scored(), make("alibi", 1, 512, 9.0, train_length=128)], False),
        ("python eval.py", [scored(), make("alibi", 1, 512, 9.0, split="test")], False),
        ("python eval.py", [scored(), make("alibi", 1, 512, 9.0, dataset="code")], False),
        ("python eval.py 'a quote", [scored()], False),
    ],
)
def test_a_scoring_is_answered_by_all_of_its_lengths(command, rows, left) -> None:
    failure = replace(FAILURE, step="eval nonoverlap valid", command=command)
    assert bool(open_failures([failure], rows)) is left


ASKED_BACK = (
    "python scripts/retrieval.py --checkpoint x --tasks passkey copy --lengths 512 1024 "
    "--depths 0.0 0.25 --split valid --samples 8 --output y.jsonl"
)
# Eight cells, by hand.
BACK = [
    retrieved(task=task, eval_length=length, depth=depth)
    for task, length, depth in [
        *(("passkey", 512, 0.0), ("passkey", 512, 0.25), ("passkey", 1024, 0.0)),
        *(("passkey", 1024, 0.25), ("copy", 512, 0.0), ("copy", 512, 0.25)),
        *(("copy", 1024, 0.0), ("copy", 1024, 0.25)),
    ]
]


@pytest.mark.parametrize("gone", range(8))
def test_retrieval_is_answered_by_all_of_its_cells(gone) -> None:
    failure = replace(FAILURE, step="retrieval valid", command=ASKED_BACK)
    assert open_failures([failure], BACK) == []
    assert open_failures([failure], BACK[:gone] + BACK[gone + 1 :]) == [failure]
    # A command that leaves its cells open: those of other runs of the same text.
    loose = replace(failure, command="python scripts/retrieval.py --lengths 512 1024")
    others = [replace(row, config_sha="other", seed=1) for row in BACK]
    assert open_failures([loose], BACK[:1]) == [loose]  # of the lengths it names, one
    assert open_failures([loose], BACK) == [] == open_failures([loose], BACK + others)
    assert open_failures([loose], others + BACK[:gone] + BACK[gone + 1 :]) == [loose]


@pytest.mark.parametrize("name", ["record", "train"])
def test_a_training_that_is_there_by_now_is_no_failure(tmp_path, name) -> None:
    path = tmp_path / "failed.jsonl"
    step = replace(FAILURE, step=name)
    append_failures(path, [step])
    rows = [training("rotary", 2, config_sha=sha) for sha in ("other", "feed")]
    gone = {"status": "failed", "message": "why"}
    append_training(tmp_path / "training.jsonl", [rows[0], replace(rows[1], **gone)])
    assert read_failures([path]) == [step]
    append_training(tmp_path / "training.jsonl", rows[1:])
    assert read_failures([path]) == []


def test_the_training_table_names_a_record_that_failed(tmp_path) -> None:
    append_training(tmp_path / "rows.jsonl", [training("rotary", 1)])
    append_failures(tmp_path / "failed.jsonl", [replace(FAILURE, step="record")])
    assert named(command("tables", tmp_path, "--table", "training")) == ["record"]


def test_figures_name_what_has_no_rows(tmp_path, monkeypatch) -> None:
    """Every figure's foot, as handed to the one function that draws it."""
    feet: list[str] = []
    for module in (figures, figures_position, figures_training):
        monkeypatch.setattr(module, "footer", lambda _, lines: feet.append("\n".join(lines)))
    spec = importlib.util.spec_from_file_location("figures_script", ROOT / "scripts/figures.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "save", lambda figure, stem: [stem])
    folded = {"position_losses": [LOSS] * 8}
    rows = [make("alibi", 1, 512, 8.0, **folded), make("alibi", 1, 1024, 8.0, **folded)]
    append_rows(tmp_path / "rows.jsonl", rows)
    append_training(tmp_path / "training.jsonl", [training("alibi", 1)])
    steps = ["train", "eval nonoverlap valid", "eval last valid", "record"]
    append_failures(tmp_path / "failed.jsonl", [replace(FAILURE, step=step) for step in steps])
    words = [str(tmp_path / "rows.jsonl"), "--training", str(tmp_path / "training.jsonl")]
    monkeypatch.setattr(sys, "argv", ["figures.py", *words, "--output", str(tmp_path)])
    assert script.main() == 0
    # Training and its parameters, then perplexity and two lengths of loss by position.
    assert [named(text) for text in feet] == [["train", "record"], [], *[steps[:2]] * 3]


def test_only_the_latest_failure_of_a_step_is_named() -> None:
    again = replace(FAILURE, message="again", when="2026-01-03T00:00:00+00:00")
    assert open_failures([FAILURE, again], []) == [again]


def test_failures_are_read_strictly(tmp_path) -> None:
    path = tmp_path / "failed.jsonl"
    append_failures(path, [FAILURE, FAILURE])
    assert read_failures([path]) == [FAILURE, FAILURE]
    assert find_files(tmp_path).failed == [path]
    path.write_text(path.read_text().replace('"seed": 2', '"seed": "2"', 1))
    with pytest.raises(RowError, match=r"failed\.jsonl:1: seed: expected an integer"):
        read_failures([path])


def test_kernels_that_are_there_by_now_are_no_failure(tmp_path) -> None:
    path = tmp_path / "failed.jsonl"
    append_failures(path, [FAILURE, replace(FAILURE, step="kernels")])
    assert [item.step for item in read_failures([path])] == ["train", "kernels"]
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "rotary-books-2.jsonl").touch()
    assert read_failures([path]) == [FAILURE]


def command(script: str, folder: Path, *arguments: str) -> str:
    """What a script prints of the rows in a folder."""
    words = [sys.executable, f"scripts/{script}.py", str(folder / "rows.jsonl"), *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def named(text: str) -> list[str]:
    """The steps of the failures that a text names."""
    lines = [line for line in text.splitlines() if "failed: rotary-books-2, " in line]
    return [line.split("failed: rotary-books-2, ")[1].split(": exit code")[0] for line in lines]


def test_a_failed_scoring_is_named_however_it_read_the_weights(tmp_path) -> None:
    append_rows(tmp_path / "rows.jsonl", [make("alibi", 1, 1024, 8.0)])
    reading = ["", " window 8", ", scaling yarn, factor 8", " window 8, factor 8"]
    own = [f"eval nonoverlap valid{how}" for how in reading]
    others = ["eval nonoverlap test, factor 8", "eval last valid", "retrieval valid", "record"]
    steps = [*own, *others]
    append_failures(tmp_path / "failed.jsonl", [replace(FAILURE, step=step) for step in steps])
    assert named(command("tables", tmp_path)) == own


@pytest.mark.parametrize(
    ("condition", "left"),
    [
        *(("step=100", True), ("status=ok", True), ("protocol=nonoverlap", True)),
        *(("seed=2", True), ("train_length=512", True), ("config_sha=feed", True)),
        *(("dataset=books", True), ("method=rotary", True)),
        *(("method=alibi", False), ("seed=1", False), ("config_sha=other", False)),
    ],
)
def test_conditions_on_rows_leave_failures_alone_but_for_their_run(condition, left) -> None:
    name, _, value = condition.partition("=")
    arguments = Namespace(dataset=None, methods=None, where=[(name, value)])
    assert lets_through(FAILURE, arguments) is left
    assert lets_through(replace(FAILURE, message="ok", step="100"), arguments) is left


def test_kernels_are_chosen_by_the_size_of_their_model() -> None:
    row = kernel(model_parameters=1000)
    for size, left in ((1000, True), (2000, False)):
        arguments = Namespace(dataset=None, methods=None, where=[("parameters", str(size))])
        assert lets_through(row, arguments) is left


def test_tables_and_report_of_some_rows_name_failures(tmp_path) -> None:
    append_rows(tmp_path / "rows.jsonl", [make("alibi", 1, 1024, 8.0)])
    append_failures(tmp_path / "failed.jsonl", [FAILURE])
    assert named(command("tables", tmp_path, "--where", "step=100")) == ["train"]
    assert named(command("tables", tmp_path, "--where", "seed=1")) == []
    command("report", tmp_path, "--where", "step=100", "--output", str(tmp_path / "page.html"))
    assert "rotary-books-2" in (tmp_path / "page.html").read_text()


def test_the_early_table_names_failures_of_both_protocols(tmp_path) -> None:
    # 2048 tokens: 4 windows side by side; sliding by 256, a first one and 6 more.
    sliding = {"protocol": "sliding", "stride": 256, "windows": 7, "window_losses": [LOSS] * 7}
    rows = [make("alibi", 1, 512, 8.0), make("alibi", 1, 512, 8.0, **sliding)]
    append_rows(tmp_path / "rows.jsonl", rows)
    steps = ["eval nonoverlap valid", "eval sliding valid", "eval last valid"]
    append_failures(tmp_path / "failed.jsonl", [replace(FAILURE, step=step) for step in steps])
    assert named(command("tables", tmp_path, "--table", "early")) == steps[:2]


def test_tables_and_report_name_what_has_no_rows(tmp_path) -> None:
    rows = [make("alibi", seed, 1024, 8.0 + seed) for seed in (1, 2)]
    append_rows(tmp_path / "rows.jsonl", rows)
    elsewhere = replace(FAILURE, dataset="other", run="rotary-other-2")
    append_failures(tmp_path / "failed.jsonl", [FAILURE, elsewhere])

    def run(script: str, *arguments: str) -> str:
        command = [sys.executable, f"scripts/{script}.py", str(tmp_path / "rows.jsonl")]
        done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = "failed: rotary-books-2, train: exit code 1: error: the"
    assert said in run("tables") and "rotary-other-2" not in run("tables")
    assert said not in run("tables", "--methods", "alibi")
    run("report", "--output", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    assert "rotary-books-2" in page and "the &lt;loss&gt; is not" in page
    whole = report([Source("rows", rows)], Extras(failed=[FAILURE]))
    closed = report([Source("rows", [*rows, scored()])], Extras(failed=[FAILURE]))
    assert "failed steps" in whole and "failed steps" not in closed


def test_figures_of_kernels_name_what_has_none(tmp_path) -> None:
    (tmp_path / "kernels").mkdir()
    heads = [kernel(head, seed=seed, train_length=512) for head in (0, 1) for seed in (1, 2)]
    append_kernels(tmp_path / "kernels" / "kerple_log-books-1.jsonl", heads)
    gone = replace(FAILURE, step="kernels", run="rotary-books-1", seed=1)
    elsewhere = replace(FAILURE, run="rotary-other-2", dataset="other")
    scoring = replace(FAILURE, step="eval nonoverlap valid", run="alibi-books-2")
    append_failures(tmp_path / "failed.jsonl", [FAILURE, gone, elsewhere, scoring])
    file = tmp_path / "kernels" / "kerple_log-books-1.jsonl"
    command = [sys.executable, "scripts/figures.py", "--kernels", str(file)]
    command += ["--output", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = {path.stem: path.read_text() for path in (tmp_path / "out").glob("*.svg")}
    assert set(told) == {"kernels-books-seed1", "kernels-books-seed2", "reach-books"}
    named = {stem: re.findall(r"failed: ([\w-]+), (\w+)", text) for stem, text in told.items()}
    assert named == {
        "kernels-books-seed1": [("rotary-books-1", "kernels")],
        "kernels-books-seed2": [("rotary-books-2", "train")],
        "reach-books": [("rotary-books-2", "train"), ("rotary-books-1", "kernels")],
    }
