"""The checks that hold one evaluated cell together: protocol, scores, windows, positions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from megatron_patches.analysis.jsonl import RowError

if TYPE_CHECKING:
    from megatron_patches.analysis.rows import Row

PROTOCOLS = ("nonoverlap", "last", "sliding", "position", "paper")
STATUSES = ("ok", "refused", "failed")
# Under these protocols windows do not overlap and every position of a window is scored.
WHOLE_WINDOW = ("nonoverlap", "position", "paper")
# Under these the seed of a run decides its windows: windows pair within a seed, not across seeds.
SEEDED_WINDOWS = ("paper",)


def check_cell(row: Row) -> None:
    """Raise RowError, naming the fields, when the values of ``row`` contradict one another."""
    _check_protocol(row)
    if row.status == "ok":
        _check_scores(row)
    else:
        _check_no_scores(row)


def _check_protocol(row: Row) -> None:
    if row.protocol not in PROTOCOLS:
        raise RowError(f"protocol: {row.protocol!r} is none of {', '.join(PROTOCOLS)}")
    if row.status not in STATUSES:
        raise RowError(f"status: {row.status!r} is none of {', '.join(STATUSES)}")
    if (row.last_k is not None) != (row.protocol == "last"):
        raise RowError(f"last_k: {row.last_k} does not go with protocol {row.protocol!r}")
    if row.protocol in WHOLE_WINDOW and row.stride != row.eval_length:
        raise RowError(
            f"stride: {row.stride}, but protocol {row.protocol!r} has windows side by side, "
            f"so it must be eval_length = {row.eval_length}"
        )


def _check_scores(row: Row) -> None:
    if row.loss is None or row.perplexity is None:
        raise RowError('loss, perplexity: both are needed when status is "ok"')
    if row.tokens == 0 or row.windows == 0:
        raise RowError(f"tokens, windows: {row.tokens}, {row.windows}, yet status is ok")
    # Compared as logarithms: exp of an absurd loss would overflow.
    if row.perplexity <= 0 or abs(math.log(row.perplexity) - row.loss) > 1e-6:
        raise RowError(f"perplexity: {row.perplexity!r} is not exp(loss) of loss {row.loss!r}")
    # Under "last" all lengths end at the same places, so the stride may exceed short windows.
    if row.protocol == "sliding" and row.stride > row.eval_length:
        raise RowError(f"stride: {row.stride} skips tokens of windows of {row.eval_length}")
    if row.last_k is not None and row.last_k > row.eval_length:
        raise RowError(f"last_k: {row.last_k} is more than the window of {row.eval_length}")
    if len(row.window_losses) != row.windows:
        raise RowError(f"window_losses: {len(row.window_losses)} for {row.windows} windows")
    slack = 1e-5 * max(1.0, row.loss)
    if not min(row.window_losses) - slack <= row.loss <= max(row.window_losses) + slack:
        raise RowError(f"loss: {row.loss!r} lies outside the losses of its windows")
    size = _equal_window_size(row)
    mean = math.fsum(row.window_losses) / row.windows
    if size is not None and abs(mean - row.loss) > slack:
        raise RowError(f"loss: {row.loss!r}, but the mean of window_losses is {mean!r}")
    _check_positions(row, row.loss, size, slack)


def _equal_window_size(row: Row) -> int | None:
    """Tokens scored per window where all windows have the same number, else None."""
    sizes = [row.last_k] if row.last_k else [row.eval_length, row.eval_length - 1]
    if row.protocol == "sliding":
        return None
    return next((size for size in sizes if size and row.tokens == size * row.windows), None)


def _check_positions(row: Row, loss: float, size: int | None, slack: float) -> None:
    losses = row.position_losses
    if losses is None:
        if row.protocol == "position":
            raise RowError('position_losses: needed by protocol "position"')
        return
    if row.protocol not in WHOLE_WINDOW:
        raise RowError(f"position_losses: protocol {row.protocol!r} does not score whole windows")
    if not 1 <= len(losses) <= row.eval_length:
        raise RowError(f"position_losses: {len(losses)} bins for {row.eval_length} positions")
    mean = math.fsum(losses) / len(losses)
    if size is not None and size % len(losses) == 0 and abs(mean - loss) > slack:
        raise RowError(f"loss: {loss!r}, but the mean of position_losses is {mean!r}")


def _check_no_scores(row: Row) -> None:
    if row.message is None:
        raise RowError(f"message: needed when status is {row.status!r}")
    scores = (row.loss, row.perplexity, row.bits_per_byte, row.position_losses)
    if any(score is not None for score in scores) or row.window_losses:
        raise RowError(f"loss, perplexity, ...: must be absent when status is {row.status!r}")
