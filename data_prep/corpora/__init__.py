"""The corpora by name: a file in this folder with a ``CORPUS`` is one, with no other list."""

from __future__ import annotations

import difflib
import pkgutil
from importlib import import_module

from data_prep.corpora._base import LocalCorpus, PublishedCorpus
from data_prep.errors import UsageError

__all__ = ["LocalCorpus", "PublishedCorpus", "get", "known", "names"]


def names() -> list[str]:
    """Names of all corpora, without importing them."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def get(name: str) -> LocalCorpus | PublishedCorpus:
    """The corpus called ``name``; UsageError with the nearest name for any other."""
    if name not in names():
        near = difflib.get_close_matches(name, [*names(), "jsonl"], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"no corpus {name!r}{hint} (there are {', '.join(names())}, and jsonl)")
    corpus: LocalCorpus | PublishedCorpus = import_module(f"{__name__}.{name}").CORPUS
    return corpus


def known(name: str) -> LocalCorpus | PublishedCorpus | None:
    """As `get`, and None for ``jsonl``, which is files of no particular corpus."""
    return None if name == "jsonl" else get(name)
