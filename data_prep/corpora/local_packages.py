"""Source code of the installed Python packages, and the TeX manuals: tens of megabytes without an archive."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from data_prep.corpora import local_code
from data_prep.corpora._base import SMALL, Fetched, LocalCorpus
from data_prep.corpora._packages import found, texts
from data_prep.corpora.local_latex import recommended, science
from data_prep.errors import DataError
from data_prep.reading import Document

# Tests repeat the code that they test; vendored copies repeat other packages.
LEFT_OUT = {"test", "tests", "testing", "_vendor", "vendor", "_vendored_packages", "__pycache__"}
GENERATED = ("_pb2.py", "_pb2_grpc.py")
# In bytes. A few packages are half of all code, and much of theirs is nearly the same file again.
OF_ONE_PACKAGE = 8_000_000
OF_ALL_PACKAGES = 86_000_000


def python(scratch: Path) -> Fetched:
    """The standard library as in `local_code`, and the installed packages up to a size."""
    root = Path(sysconfig.get_paths()["purelib"])
    counts: dict[str, Any] = {"packages": {"installed": installed()}}
    packages = Fetched(texts(_share(found(root, "**/*.py", 300), root), root, counts), counts)
    return _joined([local_code.standard_library(scratch), packages])


def python_latex(scratch: Path) -> Fetched:
    """The same, and all manuals that `local_latex` knows."""
    parts = [python(scratch)]
    for number, source in enumerate((science, recommended)):
        folder = scratch / str(number)
        folder.mkdir()
        try:
            parts.append(source(folder))
        except DataError as error:
            raise DataError(f"{error}; without manuals: --source python") from error
    return _joined(parts)


def _joined(parts: list[Fetched]) -> Fetched:
    about: dict[str, Any] = {"packages": {}}
    for part in parts:
        about |= {k: v for k, v in part.provenance.items() if k not in ("packages", "not_utf8")}
        about["packages"] |= part.provenance.get("packages", {})

    def documents() -> Iterator[Document]:
        for part in parts:
            yield from part.documents
            # Known only now: texts are decoded as they are read.
            about["not_utf8"] = about.get("not_utf8", 0) + part.provenance.get("not_utf8", 0)

    return Fetched(documents(), about)


def installed() -> str:
    """16 hex digits over names and versions of the installed packages."""
    names = sorted(f"{d.metadata['Name']}=={d.version}" for d in metadata.distributions())
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _share(files: list[Path], root: Path) -> list[Path]:
    """Files in an order by hash of their path, so that every package keeps an even sample."""
    ranked = sorted((hashlib.sha256(str(p.relative_to(root)).encode()).digest(), p) for p in files)
    of_one: defaultdict[str, int] = defaultdict(int)
    taken: list[Path] = []
    total = 0
    for _, path in ranked:
        parts, size = path.relative_to(root).parts, path.stat().st_size
        if LEFT_OUT & {*parts} or path.name.endswith(GENERATED):
            continue
        if of_one[parts[0]] + size > OF_ONE_PACKAGE or total + size > OF_ALL_PACKAGES:
            continue
        of_one[parts[0]] += size
        total += size
        taken.append(path)
    return taken


CORPUS = LocalCorpus(
    about="source code of the installed Python packages and TeX manuals",
    licence="each package's own; the text stays on the machine",
    sources={"python-latex": python_latex, "python": python},
    # 8192 entries: about 3.5 bytes a token, so that 2 bytes on disk hold as much text as they can.
    # Each held-out part: 8 windows of 131,072 tokens and one more token.
    options={
        **SMALL,
        **{"vocab_size": 8192, "split": "90,5,5", "min_split_tokens": 8 * 131_072 + 1},
        "keep_documents": False,
    },
    identity={"python": platform.python_version(), "packages": installed()},
)
