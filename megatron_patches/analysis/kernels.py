"""Numbers about learned kernels: how far each head reaches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_patches.analysis.rows import KernelRow

# exp(-2) = 0.135: KERPLE's appendix A.5 takes a head to end where the bias falls below this.
THRESHOLD = -2.0


def effective_length(
    distances: Sequence[int], bias: Sequence[float], threshold: float = THRESHOLD
) -> int | None:
    """The smallest listed distance, in tokens, whose bias is below ``threshold``; None if none is.

    KERPLE (arXiv 2205.09921), appendix A.5, per head. Exact when ``distances`` (ascending) holds
    every integer up to the crossing; on a sparser list the result is the next listed distance.
    ValueError when the two differ in length or the distances do not ascend.
    """
    if len(distances) != len(bias):
        raise ValueError(f"{len(distances)} distances but {len(bias)} bias values")
    if any(a >= b for a, b in zip(distances, distances[1:], strict=False)):
        raise ValueError("distances do not ascend")
    below = (d for d, value in zip(distances, bias, strict=True) if value < threshold)
    return next(below, None)


def effective_lengths(
    rows: Iterable[KernelRow], threshold: float = THRESHOLD
) -> list[tuple[KernelRow, int | None]]:
    """Each learned kernel that has a bias, with its effective length in tokens."""
    return [
        (row, effective_length(row.distances, row.bias, threshold))
        for row in rows
        if row.bias is not None
    ]
