"""Replaced attributes of foreign modules, and the way back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_ABSENT = object()


class Patches:
    """A list of replacements, undone in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`; afterwards the attribute is as before, or gone if it was not there."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)

        def undo() -> None:
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)

    def wrap(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        """Replace the function `owner.name` by `make(original)`, which keeps its name and docstring.

        For a function of a module, every module of the checkout that imported it by name follows.
        """
        original = getattr(owner, name)
        replacement = functools.wraps(original)(make(original))
        holders = [owner]
        if isinstance(owner, ModuleType):
            holders += [m for m in _modules_of_neox() if vars(m).get(name) is original]
        for holder in dict.fromkeys(holders):
            self.set(holder, name, replacement)

    def add(self, undo: Callable[[], object]) -> None:
        """Remember another way back."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Everything as it was before."""
        while self._undo:
            self._undo.pop()()


def _modules_of_neox() -> list[ModuleType]:
    """Loaded modules of the checkout: `megatron` and its scripts."""
    roots = ("megatron", "eval_tasks")
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] in roots
    ]
