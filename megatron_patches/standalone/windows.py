"""Which tokens a protocol feeds and which it scores: pure arithmetic, no model.

A text of T tokens has T - 1 targets; target t is token t + 1, predicted from token t and before. The
protocols of `Plan` score the same targets at every length, so that lengths differ in context alone;
`paper` draws its windows anew at each (`texts.DrawnText`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

PROTOCOLS = ("nonoverlap", "last", "sliding", "position", "paper")
# What a protocol needs besides lengths and split, and what else it may be given.
NEEDS = {"sliding": "stride", "last": "last_k"}
TAKES = {
    "stride": ("sliding", "last"),
    "last_k": ("last",),
    "max_tokens": ("nonoverlap", "last", "sliding", "position"),
    "paper_windows": ("paper",),
}


def check_settings(protocol: str, given: Mapping[str, int | None]) -> None:
    """ValueError, with the option's name, for one that the protocol lacks or does not have."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol {protocol!r} is none of {', '.join(PROTOCOLS)}")
    needed = NEEDS.get(protocol)
    if needed is not None and given.get(needed) is None:
        raise ValueError(f"protocol {protocol} needs {_option(needed)}")
    for name, value in given.items():
        if value is not None and protocol not in TAKES[name]:
            owners = ", ".join(TAKES[name])
            raise ValueError(f"{_option(name)} belongs to protocol {owners}, not to {protocol}")
    stride, last_k = given.get("stride"), given.get("last_k")
    if protocol == "last" and stride is not None and last_k is not None and stride < last_k:
        raise ValueError(
            f"--stride {stride} is less than --last-k {last_k}: protocol last would score targets "
            "more than once; ask for a larger stride"
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Window:
    """Feed tokens `[start, start + length)`, score the targets from position `score_from` on."""

    start: int
    length: int
    score_from: int

    @property
    def scored(self) -> int:
        return self.length - self.score_from


@dataclass(frozen=True)
class Plan:
    """A protocol on a text; `windows(length)` lists what to do at one length.

    `nonoverlap` and `position`: windows side by side over the longest stretch that all lengths fill
    (a length that does not divide it scores a little less of it, as its number of tokens says).
    `last`: the last `last_k` targets of blocks as long as the longest length, `stride` apart; a shorter
    length sees the same targets with less context.
    `sliding`: every target once; windows move by `stride`, only the targets that are new are scored.
    """

    protocol: str
    tokens: int
    lengths: tuple[int, ...]
    stride: int | None = None
    last_k: int | None = None

    def __post_init__(self) -> None:
        check_settings(self.protocol, {"stride": self.stride, "last_k": self.last_k})
        if self.protocol == "paper":
            raise ValueError(
                "protocol paper draws its windows: there is no plan of one text for it"
            )
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be positive, got {list(self.lengths)}")

    @property
    def targets(self) -> int:
        return self.tokens - 1

    @property
    def longest(self) -> int:
        """The longest length that the text can fill; the others are aligned to it."""
        fitting = [length for length in self.lengths if length <= self.targets]
        return max(fitting, default=0)

    def stride_at(self, length: int) -> int:
        """Tokens between the starts of windows."""
        if self.protocol == "last":
            return self.stride or self.longest
        return self.stride or length

    def windows(self, length: int) -> list[Window]:
        """Raises ValueError, with the numbers, when the text is shorter than a window."""
        if length > self.targets:
            raise ValueError(
                f"the text has {self.tokens} tokens, a window of {length} needs {length + 1}: "
                "prepare more held-out text or ask for shorter lengths"
            )
        if self.protocol == "sliding":
            return list(self._sliding(length))
        if self.protocol == "last":
            return list(self._last(length))
        # Whole multiples of the longest length: shorter ones that divide it score the same targets.
        usable = self.targets // self.longest * self.longest
        usable -= usable % length
        return [Window(start, length, 0) for start in range(0, usable, length)]

    def _last(self, length: int) -> Iterator[Window]:
        assert self.last_k is not None
        if self.last_k > length:
            raise ValueError(f"--last-k {self.last_k} is more than the window of {length}")
        for end in range(self.longest, self.targets + 1, self.stride or self.longest):
            yield Window(end - length, length, length - self.last_k)

    def _sliding(self, length: int) -> Iterator[Window]:
        assert self.stride is not None
        if self.stride > length:
            raise ValueError(f"--stride {self.stride} would skip targets of windows of {length}")
        yield Window(0, length, 0)
        end = length
        while end < self.targets:
            new = min(end + self.stride, self.targets)
            yield Window(new - length, length, length - (new - end))
            end = new


def batches(windows: Sequence[Window], size: int) -> Iterator[list[Window]]:
    """Groups of at most `size` neighbours that score the same positions."""
    group: list[Window] = []
    for window in windows:
        if group and (len(group) == size or window.score_from != group[0].score_from):
            yield group
            group = []
        group.append(window)
    if group:
        yield group
