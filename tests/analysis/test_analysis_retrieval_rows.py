"""Retrieval rows: what is written comes back, and what contradicts itself is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from retrieval_row_cases import fields, make

from megatron_patches.analysis.jsonl import RowError
from megatron_patches.analysis.retrieval_rows import (
    KEY_FIELDS,
    RetrievalRow,
    append_retrieval,
    check_retrieval_comparable,
    latest_retrieval,
    read_retrieval,
    recomputed,
    retrieval_key,
)


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    rows = [
        RetrievalRow(**fields()),
        make("learned", 2, 4096, 0.25, None),
        make("alibi", 1, 512, 1, -0.5, options={"sliding_window_width": 64}),
    ]
    append_retrieval(path, rows[:1])
    append_retrieval(path, rows[1:])
    assert read_retrieval(path) == rows
    assert read_retrieval([path, path]) == rows + rows


def test_scores_follow_from_the_samples() -> None:
    row = RetrievalRow(**fields())
    assert recomputed(row) == {
        "exact": 0.5,
        "token_accuracy": 0.625,
        "control_accuracy": 0.125,
        "loss": 1.5,
        "control_loss": 3.25,
        "gain": 1.75,
    }


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"gain": 1.8}, "gain: 1.8, but the samples give 1.75"),
        ({"loss": 1.4, "gain": 1.85}, "loss: 1.4, but the samples give 1.5"),
        ({"exact": 1.0}, "exact: 1.0, but"),
        ({"token_accuracy": 0.5}, "token_accuracy: 0.5, but"),
        ({"control_accuracy": 0.0}, "control_accuracy: 0.0, but"),
        ({"losses": [1.5]}, "losses: 1 entries for 2 samples"),
        ({"correct": [4, 1, 0]}, "correct: 3 entries"),
        ({"correct": [5, 0]}, "correct: more right tokens than the 4"),
        ({"correct": [4, 1.5]}, r"correct\[1\]: expected a whole number"),
        ({"correct": [True, 1]}, r"correct\[0\]: expected a number"),
        ({"losses": [math.nan, 1.0]}, r"losses\[0\]: expected a finite"),
        ({"losses": [-1.0, 4.0]}, r"losses\[0\]: expected a finite number >= 0"),
        ({"control_losses": "33"}, "control_losses: expected a list"),
        ({"depth": 1.01}, "depth: 1.01 is more than 1"),
        ({"depth": -0.1}, "depth: expected a finite number >= 0"),
        ({"depth": "0.5"}, "depth: expected a number"),
        ({"distance": None}, 'distance: needed when status is "ok"'),
        ({"distance": 1025}, "distance: 1025 is more than the window of 1024"),
        ({"distance": 0}, "distance: expected an integer >= 1"),
        ({"gain": None}, 'gain: needed when status is "ok"'),
        ({"samples": 0}, "samples: expected an integer >= 1"),
        ({"status": "fine"}, "status: 'fine' is none of ok"),
        ({"status": "failed", "message": "why"}, "exact, token_accuracy, .*must be absent"),
        ({"task": " "}, "task: expected text"),
        ({"questions": 7}, "questions: expected text"),
        ({"options": {1: 2}}, "options: expected a mapping"),
        ({"seconds": math.inf}, "seconds: expected a finite"),
        ({"message": ""}, "message: expected text"),
    ],
)
def test_contradictions_are_refused(changes: dict, fault: str) -> None:
    with pytest.raises(RowError, match=fault):
        RetrievalRow(**fields(**changes))


def test_a_cell_without_scores_says_why() -> None:
    row = dataclasses.asdict(make("learned", 1, 1024, 0.5, None))
    with pytest.raises(RowError, match="message: needed when status is 'refused'"):
        RetrievalRow(**{**row, "message": None})
    with pytest.raises(RowError, match="losses: must be absent"):
        RetrievalRow(**{**row, "losses": [1.0]})


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("[]", "expected an object"),
        ('{"method": "alibi"}', "missing answer_tokens"),
        ("{not json}", "not strict JSON"),
        (json.dumps(fields(), allow_nan=False).replace("1.75", "NaN"), "NaN is not a JSON number"),
        (json.dumps(fields() | {"extra": 1}), "unknown extra"),
        (json.dumps(fields() | {"depth": 7}), "depth: 7.0 is more than 1"),
    ],
)
def test_files_are_untrusted(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "rows.jsonl"
    append_retrieval(path, [RetrievalRow(**fields())])
    with path.open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(RowError, match=f"rows.jsonl:2: .*{fault}"):
        read_retrieval(path)


# --- keys and reruns ------------------------------------------------------------------------------


def test_the_key_of_a_row_is_that_of_its_cell() -> None:
    row = make("alibi", 1, 512, 1.0, 0.5, options={"b": 1, "a": 2})
    cell = {name: getattr(row, name) for name in KEY_FIELDS}
    assert retrieval_key(row) == retrieval_key({**cell, "options": {"a": 2, "b": 1}, "depth": 1})
    other = {"depth": 0.5, "source": "random", "questions": "asked-2", "options": {}, "seed": 2}
    for name, value in other.items():
        assert retrieval_key(row) != retrieval_key({**cell, name: value})
    assert retrieval_key(row) == retrieval_key(dataclasses.replace(row, engine="neox", seconds=9.0))
    with pytest.raises(KeyError):
        retrieval_key({"method": "alibi"})


def test_the_latest_result_counts() -> None:
    failed = dataclasses.replace(make("a", 1, 512, 0.5, None), status="failed")
    good, again = make("a", 1, 512, 0.5, 1.0), make("a", 1, 512, 0.5, 1.0, seconds=9.0)
    assert latest_retrieval([failed, good, again, failed]) == [again]
    assert latest_retrieval([failed, make("a", 1, 512, 0.5, None)])[0].status == "refused"
    lists = {"losses": [2.1, 2.1], "control_losses": [3.0, 3.0], "loss": 2.1}
    moved = dataclasses.replace(good, **lists, control_loss=3.0, gain=0.9)
    with pytest.raises(RowError, match="two results for one cell .*copy at 512, depth 0.5"):
        latest_retrieval([good, moved])


@pytest.mark.parametrize(
    "changes",
    [
        {"task": "passkey"},
        {"source": "random"},
        {"questions": "asked-2"},
        {"data": "data-2"},
        {"tokenizer": "tok-2"},
        {"split": "test"},
        {"dataset": "code"},
        {"train_length": 128},
        {"step": 200},
        {"dtype": "bfloat16"},
        {"parameters": 2000},
    ],
)
def test_other_questions_never_meet(changes: dict) -> None:
    first = make("alibi", 1, 512, 0.5, 1.0)
    check_retrieval_comparable([first, make("rotary", 2, 1024, 1.0, 0.1, engine="neox")])
    (name,) = changes
    with pytest.raises(RowError, match=f"cannot be compared, they differ in: {name}"):
        check_retrieval_comparable([first, make("rotary", 1, 512, 0.5, 1.0, **changes)])
