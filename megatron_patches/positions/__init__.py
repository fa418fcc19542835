"""Position methods: the maths of KERPLE, ALiBi and their rivals.

A method is one file of this folder; the file's stem is its canonical name, the value of `pos_emb`.
Being in the folder is the registration. A file may name the other spellings under which a method is
known in a module-level tuple of literal strings, `ALIASES`.

`names`, `aliases` and the import of this package work without torch; `build` and `options` load it.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_patches.positions._base import PositionMethod
    from megatron_patches.positions._geometry import Geometry

__all__ = [
    "Geometry",
    "PositionMethod",
    "aliases",
    "build",
    "method_class",
    "names",
    "options",
    "resolve",
]


def __getattr__(attribute: str) -> Any:
    homes = {"PositionMethod": "_base", "Geometry": "_geometry"}
    if attribute in homes:
        return getattr(importlib.import_module(f"{__name__}.{homes[attribute]}"), attribute)
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")


@lru_cache(maxsize=1)
def _files() -> dict[str, Path]:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return {file.stem: file for file in files if not file.stem.startswith("_")}


def _aliases_in(file: Path) -> tuple[str, ...]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == "ALIASES" for target in targets):
            assert node.value is not None
            return tuple(ast.literal_eval(node.value))
    return ()


@lru_cache(maxsize=1)
def _alias_table() -> dict[str, str]:
    table: dict[str, str] = {}
    for stem, file in _files().items():
        for alias in _aliases_in(file):
            owner = alias if alias in _files() else table.get(alias)
            if owner is not None:
                raise RuntimeError(f"{file.name}: the alias {alias!r} already belongs to {owner!r}")
            table[alias] = stem
    return table


def names() -> list[str]:
    """The canonical method names, sorted. Does not import torch."""
    return list(_files())


def aliases() -> dict[str, str]:
    """Other spellings -> canonical name (those of the KERPLE authors' code). Without torch."""
    return dict(_alias_table())


def resolve(name: str) -> str:
    """The canonical name behind a name or an alias. Without torch.

    Raises:
        ValueError: no such method; the message gives the nearest names.
    """
    if name in _files():
        return name
    if name in _alias_table():
        return _alias_table()[name]
    known = [*_files(), *_alias_table()]
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(_files())}"
    raise ValueError(f"unknown position method {name!r}; {hint}")


def method_class(name: str) -> type[PositionMethod]:
    """The class behind a canonical name, for what is known without building: `tier`, `place`, ..."""
    from megatron_patches.positions._base import PositionMethod

    module = importlib.import_module(f"{__name__}.{name}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, PositionMethod)
        and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise RuntimeError(f"{name}.py must define one PositionMethod, it defines {len(found)}")
    return found[0]


def _keyword_defaults(cls: type) -> dict[str, Any]:
    """Keyword-only parameters of `__init__`, followed upwards while `**common` passes them on."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        for parameter in parameters:
            if parameter.kind is parameter.KEYWORD_ONLY:
                found.setdefault(parameter.name, parameter.default)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return found


def options(name: str) -> dict[str, Any]:
    """Option -> default value: what `build(name, ..., **options)` accepts beside the geometry."""
    return _keyword_defaults(method_class(resolve(name)))


def build(
    name: str,
    *,
    heads: int,
    head_dim: int,
    hidden_size: int,
    max_length: int | None = None,
    seed: int = 0,
    head_range: tuple[int, int] | None = None,
    **options: Any,
) -> PositionMethod:
    """Build one position method.

    Args:
        name: canonical name or alias.
        heads: attention heads of the whole model.
        head_dim: width of one head.
        hidden_size: width of the model's embeddings.
        max_length: longest training input; only methods with a table of positions use it.
        seed: start of the method's own random generator; no other random state is read or moved.
        head_range: `(first, count)`, the heads that this tensor-parallel rank owns; None: all.
            Numbers for all heads are drawn before the cut, so ranks together equal one process.
        options: see `options(name)`; `precision` and `model_dtype` exist for every method.

    Raises:
        ValueError: unknown name, impossible geometry or option value.
        TypeError: unknown option.

    >>> method = build("kerple_log", heads=2, head_dim=8, hidden_size=16, init="alibi")
    >>> method.table(4).shape  # one value a head and distance, differentiable
    torch.Size([2, 4])
    >>> [name for name, _ in method.named_parameters()]
    ['bias_p', 'bias_a']
    """
    from megatron_patches.positions._geometry import Geometry

    canonical = resolve(name)
    cls = method_class(canonical)
    legal = _keyword_defaults(cls)
    for option in options:
        if option not in legal:
            near = difflib.get_close_matches(option, legal, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(
                f"{canonical} has no option {option!r} (it has: {', '.join(sorted(legal))}){hint}"
            )
    geometry = Geometry(
        heads=heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        max_length=max_length,
        seed=seed,
        head_range=head_range,
    )
    return cls(geometry, **options)
