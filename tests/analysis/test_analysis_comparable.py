"""What makes two rows the same cell, and what keeps them out of one table."""

from __future__ import annotations

from itertools import combinations

import pytest
from analysis_rows import fields, make, study

from megatron_patches.analysis.aggregate import collect, configurations, provenance
from megatron_patches.analysis.differences import differences
from megatron_patches.analysis.differences_table import differences_table
from megatron_patches.analysis.figures import perplexity_figure
from megatron_patches.analysis.figures_position import position_figure
from megatron_patches.analysis.positions import position_lines
from megatron_patches.analysis.rows import (
    Row,
    RowError,
    cell_key,
    check_comparable,
    latest_rows,
)
from megatron_patches.analysis.sections import Source, cut
from megatron_patches.analysis.tables import extrapolation_table, relative_table
from megatron_patches.analysis.validate import PROTOCOLS

CELL_CHANGES = {
    **{"method": "rotary", "dataset": "code", "seed": 2, "train_length": 256, "split": "test"},
    **{"config_sha": "f00d", "step": 200, "data": "data-2", "options": {"window": 512}},
    **{"documents_isolated": True},
}


@pytest.mark.parametrize("name", CELL_CHANGES)
def test_cell_key_tells_cells_apart(name: str) -> None:
    assert cell_key(Row(**fields())) != cell_key(Row(**fields(**{name: CELL_CHANGES[name]})))


def test_cell_key_ignores_how_the_cell_ran_and_takes_a_plan() -> None:
    row = Row(**fields(options={"a": 1, "b": 2}))
    again = {"seconds": 9.0, "git_sha": "later", "attention": "flex", "options": {"b": 2, "a": 1}}
    assert cell_key(row) == cell_key(Row(**fields(**again)))
    assert cell_key(fields()) == cell_key(Row(**fields()))
    plan = {k: v for k, v in fields().items() if k not in ("options", "documents_isolated")}
    assert cell_key(plan) == cell_key(Row(**fields()))
    assert len({cell_key(row), cell_key(row)}) == 1
    with pytest.raises(KeyError):
        cell_key({"method": "alibi"})


def test_latest_rows_prefers_a_later_success() -> None:
    failed, done = make("alibi", 1, 512, None), make("alibi", 1, 512, 20.0)
    rerun = make("alibi", 1, 512, 20.0 * (1 + 1e-5))
    assert latest_rows([failed, done]) == [done]
    assert latest_rows([done, failed]) == [done]
    assert latest_rows([done, rerun]) == [rerun]
    with pytest.raises(RowError, match="two results for one cell .*alibi.*seed 1, length 512"):
        latest_rows([done, make("alibi", 1, 512, 20.1)])


COMPARED = {
    **{"dataset": "code", "data": "data-2", "split": "test", "tokenizer": "tok-2"},
    **{"documents_isolated": True, "train_length": 256, "step": 200, "dtype": "bfloat16"},
    **{"protocol": "paper", "parameters": 1501},
}


@pytest.mark.parametrize("name", COMPARED)
def test_unlike_rows_never_meet(name: str) -> None:
    first, second = Row(**fields()), Row(**fields(seed=2, **{name: COMPARED[name]}))
    check_comparable([first])
    check_comparable([second])
    with pytest.raises(RowError, match=rf"differ in: {name} \(.*{COMPARED[name]}") as refusal:
        check_comparable([first, second])
    assert str(fields()[name]) in str(refusal.value)


def test_models_of_other_training_texts_never_meet() -> None:
    silent, first, second = (
        Row(**fields(seed=seed, trained_on=text))
        for seed, text in ((1, None), (2, "text-1"), (3, "text-2"))
    )
    check_comparable([silent, first])
    with pytest.raises(RowError, match=r"differ in: trained_on \(text-1, text-2\)"):
        check_comparable([silent, first, second])


def test_windows_scored_differently_never_meet() -> None:
    def last(k: int, stride: int) -> Row:
        return Row(**fields(protocol="last", last_k=k, stride=stride, tokens=2 * k))

    with pytest.raises(RowError, match=r"last_k \(128, 256\)"):
        check_comparable([last(256, 64), last(128, 64)])
    with pytest.raises(RowError, match=r"stride \(128, 64\)"):
        check_comparable([last(256, 64), last(256, 128)])
    # Windows of 512 and 1024 that end at the same places, 1024 apart; then at others.
    check_comparable(
        [last(256, 1024), Row(**fields(**vars(last(256, 1024)) | {"eval_length": 512}))]
    )
    other = Row(**fields(**vars(last(256, 512)) | {"eval_length": 512}))
    with pytest.raises(RowError, match=r"stride \(1024, 512\)"):
        check_comparable([last(256, 1024), other])
    with pytest.raises(RowError, match=r"tokens at length 1024 \(2046, 2048\)"):
        check_comparable([Row(**fields()), Row(**fields(seed=2, tokens=2046))])
    more = Row(**fields(windows=3, tokens=3072, window_losses=[2.0] * 3))
    with pytest.raises(RowError, match=r"windows at length 1024 \(2, 3\)"):
        check_comparable([Row(**fields()), more])


def test_like_rows_meet_across_lengths_engines_and_refusals() -> None:
    other = Row(**fields(engine="neox", attention="flex", git_sha="def", parameters=1500))
    check_comparable([*study(), other])
    check_comparable([])


def scored(protocol: str, method: str, **changes: object) -> Row:
    """A row of 1024 tokens that is valid under this protocol."""
    own = {
        "last": {"last_k": 1024},
        "position": {"position_losses": [2.5, 1.5]},
        "paper": {"position_losses": [2.5, 1.5]},
    }.get(protocol, {})
    return Row(**fields(protocol=protocol, method=method, **{**own, **changes}))


BUILDERS = {
    **{"extrapolation": extrapolation_table, "relative": relative_table, "collect": collect},
    **{"differences table": differences_table, "differences": differences},
    **{"perplexity figure": perplexity_figure, "position figure": position_figure},
    **{"position lines": position_lines, "provenance": provenance, "configs": configurations},
}


@pytest.mark.parametrize("name", BUILDERS)
def test_protocols_never_meet(name: str) -> None:
    """Every pair of protocols, in everything that shows rows; a window makes no exception."""
    for first, second in combinations(PROTOCOLS, 2):
        for options in ({}, {"sliding_window_width": 512}):
            rows = [scored(first, "kerple_log"), scored(second, "alibi", options=options)]
            with pytest.raises(RowError, match=r"differ in: .*protocol \("):
                BUILDERS[name](rows)
            assert len(cut([Source("rows", rows)])) == 2


def test_other_texts_and_windows_never_meet() -> None:
    for change in ({"data": "other"}, {"tokens": 2046}, {"step": 50}):
        rows = [scored("nonoverlap", "kerple_log"), scored("nonoverlap", "alibi", **change)]
        for build in (extrapolation_table, relative_table, differences_table, perplexity_figure):
            with pytest.raises(RowError, match="differ in"):
                build(rows)
