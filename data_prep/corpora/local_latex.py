"""TeX sources of manuals (not articles, and not The Pile's ArXiv, which is pandoc's Markdown)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path
from typing import Any

from data_prep.corpora._base import SMALL, Fetched, LocalCorpus
from data_prep.corpora._packages import debian, found, texts
from data_prep.errors import DataError
from data_prep.reading import Document

_OTHERS = "--source latex-recommended (Debian) or --source sympy"


def science(scratch: Path) -> Fetched:
    return _manuals("texlive-science-doc", 200, scratch, _OTHERS)


def recommended(scratch: Path) -> Fetched:
    return _manuals("texlive-latex-recommended-doc", 100, scratch, "--source sympy")


def _manuals(package: str, at_least: int, scratch: Path, alternative: str) -> Fetched:
    root, packages = debian(["pari-doc", package], scratch, alternative)
    counts: dict[str, Any] = {"packages": packages}
    files = found(root, "usr/share/pari/doc/*.tex", 10)
    # Debian compresses the larger ones only.
    files += found(root, "usr/share/doc/texlive-doc/**/*.tex*", at_least)
    return Fetched(texts(files, root, counts), counts)


def sympy(scratch: Path) -> Fetched:
    """Docstrings of the installed sympy, one document per module: prose with LaTeX formulas."""
    spec = util.find_spec("sympy")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("sympy is not installed (it comes with torch); choose --source science")
    root = Path(spec.submodule_search_locations[0])
    files = [p for p in found(root, "**/*.py", 500) if "tests" not in p.relative_to(root).parts]
    return Fetched(_docstrings(files, root), {"packages": {"sympy": metadata.version("sympy")}})


def _docstrings(files: list[Path], root: Path) -> Iterator[Document]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in files:
        nodes = ast.walk(ast.parse(path.read_bytes()))
        parts = [ast.get_docstring(node) for node in nodes if isinstance(node, kinds)]
        yield Document("\n\n".join(filter(None, parts)), path.relative_to(root).as_posix())


CORPUS = LocalCorpus(
    about="TeX and LaTeX sources of mathematical manuals",
    licence="pari-doc: GPL-2 or later; texlive: mixed free (LPPL, GPL, ...); sympy: BSD",
    sources={"science": science, "latex-recommended": recommended, "sympy": sympy},
    options=SMALL,
)
