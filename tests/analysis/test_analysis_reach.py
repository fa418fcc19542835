"""How far heads reach: the stored exact length, against closed forms; curves and quantiles."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from analysis_rows import kernel

from megatron_patches.analysis.figures_reach import reach_figure, steps_of
from megatron_patches.analysis.kernels import (
    UNEVEN,
    cumulative,
    kernel_sets,
    last_kernels,
    quantile,
    reach,
    reach_table,
    reaches,
)
from megatron_patches.analysis.rows import KernelRow, RowError, append_kernels, read_kernels
from megatron_patches.positions import build
from megatron_patches.standalone.kernels import effective_lengths, kernel_rows

ALIBI_12 = [3, 5, 6, 9, 12, 17, 23, 33, 65, 129, 257, 513]


def ended(*lengths: int | None, seed: int = 1, **changes: object) -> list[KernelRow]:
    """A head for each effective length, searched to 1000."""
    return [
        kernel(head, seed=seed, searched_to=1000, effective_length=length, **changes)
        for head, length in enumerate(lengths)
    ]


def written(name: str, heads: int = 12, **numbers: list[float]) -> list[KernelRow]:
    """The rows that a model with this method writes, with these parameters."""
    method = build(name, heads=heads, head_dim=64, hidden_size=64 * heads)
    with torch.no_grad():
        for key, values in numbers.items():
            method.get_parameter(key).copy_(torch.tensor(values)[:, None, None])
    config = SimpleNamespace(pos_emb=name, dataset="books", seed=1, seq_length=512)
    return kernel_rows(SimpleNamespace(methods=[method]), config, 10, options={"a": 1})


def test_alibi_is_pinned() -> None:
    rows = written("alibi")
    assert sorted(reach(row) for row in rows) == ALIBI_12
    assert {(row.train_length, row.searched_to) for row in rows} == {(512, 16384)}
    assert rows[0].options == {"a": 1}
    # Distances are sampled at 8 an octave: from the samples alone, 513 would be 558.
    plain = [dataclasses.replace(row, searched_to=None, effective_length=None) for row in rows]
    assert max(reach(row) for row in plain) == 558


def test_the_writer_equals_the_closed_forms() -> None:
    generator = torch.Generator().manual_seed(3)
    scale = (0.3 + 1.7 * torch.rand(40, generator=generator, dtype=torch.float64)).tolist()
    rate = (0.2 + 0.8 * torch.rand(40, generator=generator, dtype=torch.float64)).tolist()
    log = written("kerple_log", 40, bias_p=scale, bias_a=rate)
    power = written("kerple_power", 40, bias_a=scale, bias_p=rate)
    checked = 0
    for rows, formula in (
        (log, lambda r1, r2: (math.exp(2 / r1) - 1) / r2),
        (power, lambda r1, r2: (2 / r1) ** (1 / r2)),
    ):
        for row, r1, r2 in zip(rows, scale, rate, strict=True):
            exact = formula(r1, r2)
            if exact > 16384:
                assert reach(row) is None
            elif abs(exact - round(exact)) > 1e-3 * exact:  # else float32 may round either way
                assert reach(row) == math.floor(exact) + 1
                checked += 1
    assert checked > 50


def test_a_bias_that_returns_counts_its_first_crossing() -> None:
    table = torch.tensor([[0.0, -2.0, -2.1, 1.0, -9.0], [-3.0] * 5, [5.0] * 5])
    assert effective_lengths(table) == [2, 0, None]


def test_methods_without_a_bias_have_no_length() -> None:
    rows = written("kerple_weight", 4)
    assert [reach(row) for row in rows] == [None] * 4 and rows[0].searched_to is None
    assert written("rotary", 4) == []
    assert reaches(rows) == {}
    with pytest.raises(RowError, match="nothing has an effective length"):
        reach_figure(rows)
    with pytest.raises(RowError, match="nothing has an effective length"):
        reach_table(rows)


def test_old_rows_still_read(tmp_path: Path) -> None:
    record = dataclasses.asdict(kernel(0))
    for name in KernelRow.ADDED:
        del record[name]
    (tmp_path / "old.jsonl").write_text(json.dumps(record) + "\n")
    (row,) = read_kernels(tmp_path / "old.jsonl")
    assert row == kernel(0) and reach(row) == 13
    append_kernels(tmp_path / "new.jsonl", ended(7))
    assert [reach(row) for row in read_kernels(tmp_path / "new.jsonl")] == [7]
    del record["bias"]
    (tmp_path / "old.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(RowError, match=":1: missing bias"):
        read_kernels(tmp_path / "old.jsonl")
    for changes in ({"effective_length": 5}, {"effective_length": 5, "searched_to": 4}):
        with pytest.raises(RowError, match="effective_length: 5, but searched to"):
            kernel(0, **changes)
    assert kernel(0, effective_length=0, searched_to=0).effective_length == 0


def test_one_kernel_a_head_and_run() -> None:
    first, later = kernel(0), kernel(0, step=200)
    assert last_kernels([first, later, later]) == [later]
    exact = kernel(0, searched_to=63, effective_length=13)
    assert last_kernels([exact, first]) == [exact] == last_kernels([first, exact])
    two = [kernel(0, train_length=128), kernel(0, train_length=512, bias=[0.0] * 64)]
    assert set(kernel_sets(two)) == {("books", 128), ("books", 512)}
    with pytest.raises(RowError, match="head 0: two different kernels"):
        last_kernels([kernel(0), kernel(0, bias=[0.0] * 64)])


def test_cumulative_and_quantiles_by_hand() -> None:
    heads = [3, 5, 9, None]
    assert [cumulative(heads, d) for d in (2, 3, 4, 5, 9, 10_000)] == [0, 1, 1, 2, 3, 3]
    assert [quantile(heads, q) for q in (0, 0.25, 0.26, 0.5, 0.75, 0.76)] == [3, 3, 5, 5, 9, None]
    at, counts, mean = steps_of([[3, 5], [0, None]], 100)
    assert at == [1, 3, 5, 100]
    assert counts == [[0, 1, 2, 2], [1, 1, 1, 1]] and mean == [0.5, 1.0, 1.5, 1.5]


def test_table_of_quantiles() -> None:
    rows = ended(3, 5, train_length=512) + ended(9, None, seed=2, train_length=512)
    other = written("alibi")
    table = reach_table([*rows, *other, kernel(0, dataset="code")])
    lines = {label: [cell.text for cell in cells] for label, cells in table.rows}
    assert lines["kerple_log, books, trained on 512"] == ["2", "4", "1", "3", "3", "5", "9", "–"]
    alibi = lines["alibi (a=1), books, trained on 512"]
    assert alibi == ["1", "12", "0", "3", "6", "17", "65", "513"]
    assert lines["kerple_log, code"][:4] == ["1", "1", "0", "13"]
    assert table.notes == (UNEVEN,) and reach_table(rows).notes == ()


def test_figure_counts_heads() -> None:
    rows = ended(3, 5) + ended(9, None, seed=2)
    (axes,) = reach_figure([*rows, *ended(2, 2, method="alibi", parameters={})]).axes
    assert axes.get_xscale() == "log" and axes.get_xlim() == (1, 1000)
    alibi, *single, mean = axes.get_lines()
    assert list(alibi.get_xdata()) == [1, 2, 1000] and list(alibi.get_ydata()) == [0, 2, 2]
    assert [list(line.get_ydata()) for line in single] == [[0, 1, 2, 2, 2], [0, 0, 0, 1, 1]]
    # The curve ends below the two heads: one of them never ends.
    assert list(mean.get_ydata()) == [0, 0.5, 1, 1.5, 1.5]
    with pytest.raises(RowError, match="several data sets or training lengths"):
        reach_figure([*rows, kernel(0, dataset="code")])
