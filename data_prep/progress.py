"""What a person sees while it runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]
_EVERY = 30.0  # seconds between two lines of one stage, where there is no terminal


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def stage(name: str, total: int | None, say: Say) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told the bytes done so far (all of them, not the difference)."""
    start, done = time.monotonic(), 0
    first: int | None = None  # where a continued stage began: nothing of this run's speed
    said = start
    bar = _bar(name, total) if say is to_stderr and sys.stderr.isatty() else None

    def advance(so_far: int) -> None:
        nonlocal done, first, said
        first = so_far if first is None else first
        done = so_far
        now = time.monotonic()
        if bar:
            bar.update(bar.task_ids[0], completed=so_far)
        elif now - said >= _EVERY:
            said = now
            say(f"{name}: {_so_far(done, total, (done - first) / (now - start))}")

    try:
        yield advance
    finally:
        if bar:
            bar.stop()
    seconds = time.monotonic() - start
    own = done - (first or 0)
    rate = f", {own / seconds / 1e6:.1f} MB/s" if seconds > 0.1 else ""
    say(f"{name}: {done / 1e6:.1f} MB in {seconds:.1f} s{rate}")


def _so_far(done: int, total: int | None, rate: float) -> str:
    """``120.0 of 3000.0 MB, 10.2 MB/s, 4 min 42 s left``."""
    if not total or not rate:
        return f"{done / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s"
    minutes, seconds = divmod(round(max(0, total - done) / rate), 60)
    hours, minutes = divmod(minutes, 60)
    left = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"
    return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s, {left} left"


def _bar(name: str, total: int | None):  # type: ignore[no-untyped-def]
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(name, total=total)
    bar.start()
    return bar
