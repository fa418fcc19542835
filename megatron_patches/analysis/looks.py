"""One look a label: colours, markers and dashes numbered once for all figures of a command or page."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_patches.analysis.aggregate import Labelled, series_label

Looks = dict[str, int]  # label -> number of its look


def numbered(*kinds: Iterable[Labelled]) -> Looks:
    """A number for each label of rows of any kinds, with and without its attention window.

    Labels with a window come last: one more of them changes the look of no other line.
    """
    labels = {
        (window, series_label(row, window=window))
        for rows in kinds
        for row in rows
        for window in (False, True)
    }
    ordered = dict.fromkeys(label for _, label in sorted(labels))
    return {label: index for index, label in enumerate(ordered)}
