"""Which text a row was scored on: the fingerprint of its files and of the part of them that was read.

One home, because an evaluation writes it and a study recognises by it what was scored on another text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

# Of KERPLE's released evaluation (`ex_eval.yml`): windows at each length, whatever the length.
PAPER_WINDOWS = 320


def fixed_cut(part: str, protocol: str, max_tokens: int | None, longest: int) -> str:
    """The cut of a protocol that reads a split from its start.

    `part` names the share of the files where NeoX's `split` decides it, else it is empty. `longest`
    (tokens) is the longest length asked for that the text can fill: windows are aligned to it.
    """
    cut = part if max_tokens is None else f"{part}|first {max_tokens}"
    return cut if protocol == "sliding" else f"{cut}|aligned to {longest}"


def paper_cut(part: str, windows: int) -> str:
    """The cut of protocol `paper`: neither seed nor lengths, so that rows of several seeds meet."""
    return f"{part}|paper {windows}"


def text_fingerprint(files: Sequence[str], cut: str = "") -> str:
    """16 hex digits for `files` (the fingerprint of each) and the cut of them."""
    if len(files) == 1 and not cut:
        return files[0]
    return hashlib.sha256(" ".join([*files, cut]).encode()).hexdigest()[:16]
