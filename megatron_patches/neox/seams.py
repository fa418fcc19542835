"""The places of GPT-NeoX that the patches touch, and what must be true of them.

Everything is read from the checkout's source files; nothing of it is imported or run. `check` is
what `install` and `scripts/check_neox.py` call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from megatron_patches.config import ConfigError
from megatron_patches.neox.checkout import KNOWN_COMMITS, Checkout
from megatron_patches.neox.seam_table import SEAMS, Seam

__all__ = ["SEAMS", "MovedSeam", "Seam", "check", "compare", "moved"]


class MovedSeam(ConfigError):
    """The checkout differs from what the patches expect."""


def check(checkout: Checkout) -> None:
    """Raises MovedSeam that names every seam that has moved, and the commits known to fit."""
    problems = moved(checkout.home)
    if problems:
        known = ", ".join(commit[:8] for commit in KNOWN_COMMITS)
        raise MovedSeam(
            f"{checkout.home} (commit {checkout.commit[:8]}) does not fit the patches:\n  "
            + "\n  ".join(problems)
            + f"\nthey are known to fit {known}: check that commit out, or report the difference"
        )


def moved(home: Path) -> list[str]:
    """One line for each seam of which `home` no longer has what is needed."""
    return [f"{s.place} ({s.why}): {reason}" for s, reason in compare(home) if reason]


def compare(home: Path) -> Iterator[tuple[Seam, str | None]]:
    """Every seam, and in what `home` differs from it; None: it fits."""
    trees: dict[str, ast.Module | str] = {}
    for seam in SEAMS:
        if seam.module not in trees:
            trees[seam.module] = _parse(home / seam.module)
        tree = trees[seam.module]
        yield seam, tree if isinstance(tree, str) else _differs(tree, seam)


def _parse(path: Path) -> ast.Module | str:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except OSError:
        return "the file is gone"
    except SyntaxError as error:
        return f"line {error.lineno} is not Python"


def _differs(tree: ast.Module, seam: Seam) -> str | None:
    node = _find(tree.body, seam.name.split("."))
    if node is None:
        return "is gone"
    if seam.parameters is not None:
        if not isinstance(node, ast.FunctionDef):
            return "is no longer a function"
        found = [a.arg for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
        if tuple(found[: len(seam.parameters)]) != seam.parameters:
            return f"takes ({', '.join(found)}), expected ({', '.join(seam.parameters)}, ...)"
    text = ast.unparse(node)
    absent = [piece for piece in seam.contains if piece not in text]
    return f"no longer contains `{absent[0]}`" if absent else None


def _find(body: list[ast.stmt], path: list[str]) -> ast.stmt | None:
    for node in _statements(body):
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        if path[0] in names:
            if len(path) == 1:
                return node
            inner = node.body if isinstance(node, ast.ClassDef) else []
            return _find(inner, path[1:])
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a block, those under `if` and `try` included."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, inner, []))
