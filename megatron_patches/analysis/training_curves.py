"""What figures and tables of training show: curves over seeds and one line a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_patches.analysis.aggregate import listed, series_label, shorten
from megatron_patches.analysis.layout import ABSENT, Cell, Notes, Table
from megatron_patches.analysis.training_rows import (
    END_SHARE,
    Statistics,
    TrainingRow,
    comparable_training,
)

COLUMNS = (
    *("training loss", "validation loss", "end slope", "validation drop"),
    *("tokens/s", "seconds"),
)


@dataclass(frozen=True)
class Curve:
    """Mean over seeds at each of ``tokens`` read, between the lowest and the highest."""

    label: str
    method: str
    tokens: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int


def loss_curves(rows: Iterable[TrainingRow]) -> list[Curve]:
    """Training loss of each label; where seeds were logged at different steps, at the common ones."""
    return _curves(rows, lambda row: row.iterations, lambda row: (row.lm_loss,) * 3)


def validation_curves(rows: Iterable[TrainingRow]) -> list[Curve]:
    """Validation loss of each label that has one."""
    return _curves(
        rows, lambda row: row.validation_iterations, lambda row: (row.validation_loss,) * 3
    )


def parameter_curves(rows: Iterable[TrainingRow]) -> dict[str, list[Curve]]:
    """Parameter -> the labels that have it: mean over heads, from the lowest to the highest head.

    Over seeds the mean of the means, the lowest and the highest of all. Layers with kernels of their
    own count as more heads.
    """
    rows = [row for row in comparable_training(rows) if row.status == "ok"]
    names = sorted({_plain(name) for row in rows for name in row.position})
    return {
        name: _curves(
            [row for row in rows if any(_plain(key) == name for key in row.position)],
            lambda row: row.iterations,
            lambda row, name=name: _over_layers(  # type: ignore[misc]
                [kinds for key, kinds in row.position.items() if _plain(key) == name]
            ),
        )
        for name in names
    }


def _plain(name: str) -> str:
    """``bias_p`` for ``layer0/bias_p``."""
    return name.rpartition("/")[2]


def _over_layers(found: list[Statistics]) -> tuple[list[float], list[float], list[float]]:
    steps = range(len(found[0]["mean"]))
    mean = [math.fsum(kinds["mean"][i] for kinds in found) / len(found) for i in steps]
    low = [min(kinds["min"][i] for kinds in found) for i in steps]
    return mean, low, [max(kinds["max"][i] for kinds in found) for i in steps]


def _curves(
    rows: Iterable[TrainingRow],
    at: Callable[[TrainingRow], Sequence[int]],
    values: Callable[[TrainingRow], tuple[Sequence[float], Sequence[float], Sequence[float]]],
) -> list[Curve]:
    by_label: dict[str, list[TrainingRow]] = {}
    for row in comparable_training(rows):
        if row.status == "ok" and at(row):
            by_label.setdefault(series_label(row), []).append(row)
    found = []
    for label, seeds in by_label.items():
        common = sorted(set.intersection(*(set(at(row)) for row in seeds)))
        if not common:
            continue
        places = [{step: i for i, step in enumerate(at(row))} for row in seeds]
        picked = [
            [[kind[place[step]] for step in common] for kind in values(row)]
            for row, place in zip(seeds, places, strict=True)
        ]
        each = range(len(common))
        found.append(
            Curve(
                label=label,
                method=seeds[0].method,
                tokens=seeds[0].tokens_at(common),
                mean=[math.fsum(p[0][i] for p in picked) / len(picked) for i in each],
                low=[min(p[1][i] for p in picked) for i in each],
                high=[max(p[2][i] for p in picked) for i in each],
                seeds=len(seeds),
            )
        )
    return found


def training_header(rows: Sequence[TrainingRow]) -> list[str]:
    """Lines that say what was trained, on what, and where the numbers come from."""
    first = rows[0]
    sizes = sorted({row.parameters for row in rows})
    size = f"{sizes[0]:,}" + (f" to {sizes[-1]:,}" if len(sizes) > 1 else "")
    return [
        f"dataset {first.dataset}, {size} parameters, trained on {first.train_length} tokens for "
        f"{first.train_iters} steps ({_tokens(first)} tokens), seeds {listed(rows, 'seed')}",
        f"engine {listed(rows, 'engine')}",
        f"machine: {' / '.join(sorted({row.machine for row in rows}))}",
        f"data {shorten(first.data)}, tokenizer {shorten(first.tokenizer)}, commit "
        f"{listed(rows, 'git_sha')}",
    ]


def _tokens(row: TrainingRow) -> str:
    return f"{row.tokens_at([row.train_iters])[0]:,}"


def training_table(rows: Iterable[TrainingRow]) -> Table:
    """One line a run: losses at the end, how fast they still fell there, speed.

    RowError when the runs may not meet (see ``comparable_training``).
    """
    rows = comparable_training(rows)
    notes = Notes()
    lines = [(f"{series_label(row)}, seed {row.seed}", _cells(row, notes)) for row in rows]
    return Table(
        title=f"Training runs, {rows[0].dataset}, trained on {rows[0].train_length} tokens",
        corner="run",
        columns=COLUMNS,
        rows=tuple(lines),
        header=(
            *training_header(rows),
            "losses in nats per token: the last ones logged, training as the mean over the steps "
            "since the log before",
            f"end slope ± standard error: least squares over the last {100 * END_SHARE:g}% of the "
            "steps, nats per 1,000 steps; its points are those logged, taken as independent",
            "validation drop: validation loss at the last but one validation minus the last, nats per "
            "1,000 steps between them",
            "tokens/s: median over the log; seconds: of the steps, without validation and saving",
        ),
        notes=notes.lines(),
    )


def _cells(row: TrainingRow, notes: Notes) -> tuple[Cell, ...]:
    marks: tuple[str, ...] = ()
    if row.status != "ok":
        marks = (notes.mark(f"{row.status} after {row.step} steps: {row.message}"),)
    slope = Cell(ABSENT)
    if row.end_slope is not None and row.end_slope_error is not None:
        slope = Cell(
            f"{row.end_slope:+.3f}",
            f"{row.end_slope_error:.3f}",
            mean=row.end_slope,
            std=row.end_slope_error,
        )
    last = row.lm_loss[-1] if row.lm_loss else None
    valid = row.validation_loss[-1] if row.validation_loss else None
    training = _number(last, ".4f")
    return (
        Cell(training.text, marks=marks, mean=training.mean),
        _number(valid, ".4f"),
        slope,
        _number(validation_drop(row), "+.3f"),
        _number(row.tokens_per_second, ",.0f"),
        _number(row.seconds, ",.0f"),
    )


def validation_drop(row: TrainingRow) -> float | None:
    """How far validation loss fell from the last but one validation to the last, per 1,000 steps.

    Nats per token; positive where it fell. None with fewer than two validations. The whole held-out
    text is behind either, so a slow fall shows here that the slope of noisy batches hides.
    """
    if len(row.validation_loss) < 2:
        return None
    steps = row.validation_iterations[-1] - row.validation_iterations[-2]
    return 1000 * (row.validation_loss[-2] - row.validation_loss[-1]) / steps


def _number(value: float | None, form: str) -> Cell:
    return Cell(ABSENT) if value is None else Cell(format(value, form), mean=value)
