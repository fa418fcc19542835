"""This suite's configuration keys as GPT-NeoX arguments, and the checks that go with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic_core import PydanticUndefined

from megatron_patches import positions
from megatron_patches.config import ConfigError
from megatron_patches.config.keys_own import Own
from megatron_patches.neox.patches import Patches
from megatron_patches.neox.position import SLOT
from megatron_patches.neox.refusals import ATTEND, GLOBAL, kinds_of, problems

# Made by `dataclass`, which does not overwrite what is there.
_GENERATED = ("__init__", "__repr__", "__eq__", "__match_args__")
_native: frozenset[str] = frozenset()


def native() -> frozenset[str]:
    """The values of `pos_emb` that this checkout knows itself; empty before `apply`."""
    return _native


def apply(patches: Patches, fixes_off: frozenset[str] = frozenset()) -> None:
    global _native
    from megatron.neox_arguments import arguments, neox_args

    patches.add(_forget_native)
    base, top = neox_args.NeoXArgsModel, arguments.NeoXArgs
    own = base.__dataclass_fields__["pos_emb"].type
    _native = frozenset(get_args(own))
    spellings = [*positions.names(), *positions.aliases()]
    values = (*get_args(own), *(name for name in spellings if name not in _native))
    _extend(patches, base, top, {"pos_emb": Literal[values]})
    patches.wrap(top, "calculate_derived", partial(_calculate_derived, fixes_off))

    kinds = neox_args.ATTENTION_TYPE_CHOICES
    kinds.append(ATTEND)
    patches.add(lambda: kinds.remove(ATTEND))


def _forget_native() -> None:
    global _native
    _native = frozenset()


def _extend(patches: Patches, base: Any, top: Any, types: dict[str, Any]) -> None:
    """Give the dataclass `base`, and `top` which inherits it, our fields; the classes stay the same."""
    taken = [key for key in Own.model_fields if key in top.__dataclass_fields__]
    if taken:
        raise RuntimeError(f"GPT-NeoX has keys of its own named {', '.join(taken)}")
    patches.set(base, "__annotations__", dict(base.__annotations__))
    base.__annotations__.update(types)
    for key, info in Own.model_fields.items():
        base.__annotations__[key] = plain_type(info.annotation)
        default = None if info.default is PydanticUndefined else info.default
        patches.set(base, key, default)
    for cls in (base, top):
        for name in (*_GENERATED, "__dataclass_fields__", "__dataclass_params__", "__hash__"):
            if name in vars(cls):
                patches.set(cls, name, vars(cls)[name])
        for name in _GENERATED:
            if name in vars(cls):
                delattr(cls, name)
        dataclasses.dataclass(cls)


def plain_type(annotation: Any) -> Any:
    """The type that NeoX's own check understands: a class or a Literal, without None and parameters."""
    if get_origin(annotation) is Literal:
        return annotation
    inner = [part for part in get_args(annotation) if part is not NoneType]
    if isinstance(annotation, type) and not inner:
        return annotation
    origin = get_origin(annotation)
    if isinstance(origin, type) and origin in (list, dict):
        return origin
    # Annotated[X, ...] and X | None: the first part is X
    return plain_type(inner[0])


def _calculate_derived(
    fixes_off: frozenset[str], original: Callable[..., None]
) -> Callable[..., None]:
    from megatron.neox_arguments import arguments

    def calculate_derived(self: Any) -> None:
        asked = frozenset(self.neox_fixes_off or ())
        if asked and asked != fixes_off:
            raise ConfigError(
                f"neox_fixes_off {sorted(asked)}, but the launcher left out {sorted(fixes_off)}: "
                "say it to the launcher as well (--without NAME)"
            )
        # NeoX compares case-insensitively, and then no branch knows the value "ALiBi".
        known = [*native(), *positions.names(), *positions.aliases()]
        if self.pos_emb not in known:
            near = [name for name in known if name.lower() == str(self.pos_emb).lower()]
            hint = f": write {near[0]!r}" if near else f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"pos_emb {self.pos_emb!r} is no position method{hint}")
        if self.pos_emb not in native():
            self.pos_emb = positions.resolve(self.pos_emb)
        # First: NeoX stops at once where a package for such an attention is missing.
        found = problems(self, our_method(self), native())
        if found:
            raise ConfigError(
                "this configuration would lose its position method:\n  " + "\n  ".join(found)
            )
        kinds = self.attention_config
        if ATTEND in kinds_of(self):
            # NeoX's rules for its own types (grouped queries) would refuse a type they do not know.
            self.attention_config = [
                GLOBAL if kind == ATTEND else kind
                for kind in arguments.expand_attention_types(kinds, self.num_layers)
            ]
        original(self)
        if kinds is not None:
            self.attention_config = arguments.expand_attention_types(kinds, self.num_layers)

    return calculate_derived


def our_method(args: Any) -> str | None:
    """The position method that our patches put into the layers; None where NeoX has it itself.

    NeoX's own T5 bias is replaced where something is asked of it that it cannot do.
    """
    name: str = args.pos_emb
    if name not in native():
        return name
    asked = (
        ATTEND in kinds_of(args)
        or args.position_sharing == "layer"
        or bool(args.position_options)
        or args.position_precision != "exact"
    )
    return name if asked and positions.method_class(name).module_name == SLOT else None
