"""A finding made small: files as they were in the sound input, then less and less of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fuzz_target import Files

ROUNDS = 12

# Index of the first input that still shows the finding, None: none does.
First = Callable[[list[Files]], "int | None"]


def smaller(files: Files, bases: Sequence[Files], first: First) -> Files:
    """`files` with less in them, for as long as `first` finds the same in it."""
    base = max(bases, key=lambda sound: sum(files.get(name) == sound[name] for name in sound))
    for _ in range(ROUNDS):
        tries = [*_as_before(files, base), *_shorter(files, base)]
        at = first(tries) if tries else None
        if at is None:
            return files
        files = tries[at]
    return files


def _as_before(files: Files, base: Files) -> Iterator[Files]:
    """One file less that differs from the base."""
    for name in sorted(set(files) - set(base)):
        yield {n: data for n, data in files.items() if n != name}
    for name in sorted(base):
        if files.get(name) != base[name]:
            yield {**files, name: base[name]}


def _shorter(files: Files, base: Files) -> Iterator[Files]:
    """One part less of a file that differs: halves first, then smaller pieces, whole lines."""
    for name, data in sorted(files.items()):
        if data == base.get(name):
            continue
        pieces = data.split(b"\n") if data.count(b"\n") > 3 else None
        for parts in (2, 4, 8, 16):
            units = pieces if pieces is not None else [data[i : i + 1] for i in range(len(data))]
            if len(units) > 200_000 or len(units) < parts:
                break
            size = len(units) // parts
            for at in range(0, len(units), size):
                left = units[:at] + units[at + size :]
                yield {**files, name: (b"\n" if pieces is not None else b"").join(left)}
