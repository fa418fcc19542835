"""The position methods as a table, from their own files: what each one does, learns and can read.

Example: python scripts/methods.py
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_patches.positions import PositionMethod, build, names  # noqa: E402

HEADS, HEAD_DIM, LENGTH = 12, 64, 512  # the KERPLE paper's model
FAR = 1 << 20  # tokens: who reads these reads anything
HEADER = (
    "| `pos_emb` | what it does; d: query position - key position | learned | in | tier | "
    "reads tokens | paper |\n|---|---|---:|---|---|---:|---|"
)
FOOTER = (
    f"learned: numbers for {HEADS} heads of {HEAD_DIM}, trained on {LENGTH} tokens, in each layer or "
    "once for the model (`position_sharing` changes that)  \n"
    "tier: the distance alone decides (table), or the query's position as well (positional), or queries "
    "and keys, too (content)"
)


def row(name: str) -> str:
    """One line of the table. The first line of a method's file says what it is; its text, the paper."""
    told = importlib.import_module(f"megatron_patches.positions.{name}").__doc__ or ""
    width = HEADS * HEAD_DIM
    method = build(name, heads=HEADS, head_dim=HEAD_DIM, hidden_size=width, max_length=LENGTH)
    what = told.partition("\n\n")[0].replace("\n", " ").rstrip(".").replace("|", "\\|")
    paper = re.search(r"arXiv (\d{4}\.\d{5})", " ".join(told.split()))
    link = f"[{paper[1]}](https://arxiv.org/abs/{paper[1]})" if paper else ""
    learned = sum(parameter.numel() for parameter in method.parameters())
    place = method.sharing if learned else ""
    cells = (f"`{name}`", what, f"{learned:,}", place, method.tier, longest(method), link)
    return f"| {' | '.join(cells)} |"


def longest(method: PositionMethod) -> str:
    """The longest input that the method accepts."""

    def readable(length: int) -> bool:
        try:
            method.can_read(length)
        except ValueError:
            return False
        return True

    if readable(FAR):
        return "any number"
    low, high = 1, FAR
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if readable(middle) else (low, middle)
    return f"{low:,}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    print("\n".join([HEADER, *map(row, names()), "", FOOTER]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
