"""GPT-NeoX's configuration keys beside ours, read from its source; nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_patches.config.compose import DERIVED, RUNTIME
from megatron_patches.config.keys_own import Own
from megatron_patches.config.schema import Config

FILES = ("deepspeed_args.py", "neox_args.py")
# We decide these by other keys or by the machine where NeoX has a constant or nothing.
OUR_DEFAULTS = frozenset(
    {
        "intermediate_size",
        "lr_decay_iters",
        "gradient_accumulation_steps",
        "optimizer",
        "distributed_backend",
    }
)


def fields(home: Path) -> dict[str, Any]:
    """Key -> default of every argument of the checkout; ... where there is none or it is computed.

    Raises OSError or SyntaxError where a file cannot be read.
    """
    found: dict[str, Any] = {}
    for file in FILES:
        path = home / "megatron" / "neox_arguments" / file
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        found |= dict(_annotated(tree))
    return found


def _annotated(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for group in tree.body:
        for line in group.body if isinstance(group, ast.ClassDef) else []:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                try:
                    default = ... if line.value is None else ast.literal_eval(line.value)
                except ValueError:
                    default = ...
                yield line.target.id, default


def differences(home: Path) -> list[str]:
    """One line for each key that only one side knows, and for each default that differs."""
    try:
        theirs = fields(home)
    except OSError as error:
        return [f"{error.filename}: the file is gone"]
    except SyntaxError as error:
        return [f"{error.filename}: line {error.lineno} is not Python"]
    lines = []
    for key, default in theirs.items():
        if key in DERIVED or key in RUNTIME:
            continue
        ours = Config.model_fields.get(key)
        if ours is None:
            lines.append(f"{key}: a key of GPT-NeoX that this suite does not know")
        elif not ours.is_required() and key not in OUR_DEFAULTS and ours.default != default:
            shown = "computed" if default is ... else repr(default)
            lines.append(f"{key}: its default is {shown} in GPT-NeoX, {ours.default!r} here")
    gone = [key for key in Config.model_fields if key not in theirs and key not in Own.model_fields]
    return [*lines, *(f"{key}: GPT-NeoX has no such key any more" for key in gone)]
