"""Cells that say what is missing: a refusal, a failure, fewer seeds than the rest of the table has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_patches.analysis.aggregate import Group
from megatron_patches.analysis.layout import ABSENT, Cell, Notes, number_cell
from megatron_patches.analysis.statistics import summarize


def seed_line(count: int) -> str:
    """What ``±`` means in a table of so many seeds."""
    if count > 1:
        return f"mean ± standard deviation (n - 1) over {count} seeds"
    return "one seed: no standard deviation and no test"


def reasons(group: Group | None, length: int) -> list[tuple[str, str]]:
    """Status and message of the seeds without a score, each once."""
    if group is None:
        return []
    # What a method says of each length beyond its last is one note.
    return sorted(
        (status, message.replace(f" {length} tokens", " this many tokens"))
        for status, message in set(group.problems.values())
    )


def problem_cell(group: Group | None, length: int, notes: Notes) -> Cell:
    """The cell of a group without any score: its status and why, or a dash where nothing was run."""
    found = reasons(group, length)
    if not found:
        return Cell(ABSENT)
    why = tuple(notes.mark(f"{status}: {message}") for status, message in found)
    return Cell("/".join(sorted({status for status, _ in found})), marks=why)


def short_marks(
    count: int, expected: int, causes: list[tuple[str, str]], notes: Notes
) -> tuple[str, ...]:
    """The mark of a number over ``count`` of ``expected`` seeds; none where it is over all."""
    if count >= expected:
        return ()
    told = "".join(f"; {status}: {message}" for status, message in causes)
    return (notes.mark(f"{count} of {expected} seeds{told}"),)


def remark_marks(groups: Iterable[Group | None], notes: Notes) -> tuple[str, ...]:
    """The marks of what the scored rows of groups say of their numbers, each text once."""
    texts = {text for group in groups if group is not None for text in group.remarks.values()}
    return tuple(notes.mark(text) for text in sorted(texts))


def group_cell(group: Group | None, length: int, expected: int, notes: Notes) -> Cell:
    """Mean ± std of the perplexities of one method and length, marked where seeds are missing or rows
    say something of them."""
    if group is None or not group.perplexities:
        return problem_cell(group, length, notes)
    marks = short_marks(len(group.perplexities), expected, reasons(group, length), notes)
    marks += remark_marks([group], notes)
    return replace(number_cell(summarize(group.perplexities.values())), marks=marks)
