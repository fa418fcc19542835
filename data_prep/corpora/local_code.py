"""Python's own standard library without its tests: code that every machine has."""

from __future__ import annotations

import platform
import sysconfig
from pathlib import Path
from typing import Any

from data_prep.corpora._base import SMALL, Fetched, LocalCorpus
from data_prep.corpora._packages import found, texts

# Tests are not on every install; encodings and pydoc_data are tables and generated text.
LEFT_OUT = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test"),
    *("encodings", "pydoc_data"),
}


def standard_library(scratch: Path) -> Fetched:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in found(root, "**/*.py", 300) if not LEFT_OUT & {*p.relative_to(root).parts}]
    counts: dict[str, Any] = {"python": platform.python_version()}
    return Fetched(texts(files, root, counts), counts)


CORPUS = LocalCorpus(
    about="Python's standard library without tests, as installed here",
    licence="PSF licence",
    sources={"stdlib": standard_library},
    options=SMALL,
    identity={"python": platform.python_version()},
)
