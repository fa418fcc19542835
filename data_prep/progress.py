"""What a person sees while it runs: a bar on a terminal, one plain line per stage elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def stage(name: str, total: int | None, say: Say) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told the bytes done so far (all of them, not the difference)."""
    start, done = time.monotonic(), 0
    bar = _bar(name, total) if say is to_stderr and sys.stderr.isatty() else None

    def advance(so_far: int) -> None:
        nonlocal done
        done = so_far
        if bar:
            bar.update(bar.task_ids[0], completed=so_far)

    try:
        yield advance
    finally:
        if bar:
            bar.stop()
    seconds = time.monotonic() - start
    rate = f", {done / seconds / 1e6:.1f} MB/s" if seconds > 0.1 else ""
    say(f"{name}: {done / 1e6:.1f} MB in {seconds:.1f} s{rate}")


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
