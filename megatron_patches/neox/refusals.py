"""Settings of GPT-NeoX under which a position method would be dropped or distorted without a word."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any

from megatron_patches import positions
from megatron_patches.config.keys_model import attention_types
from megatron_patches.neox import position
from megatron_patches.positions import PositionMethod

GLOBAL = "global"
# Layers of this type attend with `megatron_patches.attention.attend`: linear memory, and methods that
# turn queries and keys or rewrite scores. Gates and places by the length of the text remain refused.
ATTEND = "attend"
HINT = "write attention_config: [[[attend], all]]"
# What NeoX's flash branch hands to the kernel: this method's slopes, and rotated queries and keys.
FLASH_CARRIES = frozenset({"alibi"})


def kinds_of(args: Any) -> set[str]:
    """The attention types of the layers, before and after NeoX has written the list out."""
    return attention_types(args.attention_config) or {GLOBAL}


def problems(args: Any, ours: str | None, native: frozenset[str]) -> list[str]:
    """One line for each setting that ignores or distorts the configured method; the next step in it."""
    method = positions.method_class(args.pos_emb)
    found = [*_own_attention(args), *_own_keys(args, ours)]
    if position.acts_on_scores(method) or args.pos_emb not in native:
        found += _attention_types(args, method, ours)
        found += _score_scaling(args)
        for key in ("te_mha", "te_fp8_mha"):
            if getattr(args, key):
                found.append(
                    f"{key}: Transformer Engine's attention ignores {args.pos_emb}; {HINT}"
                )
    return found


def _attention_types(args: Any, method: type[PositionMethod], ours: str | None) -> Iterator[str]:
    if method.decay is not PositionMethod.decay:
        yield (
            f"{ours} has gates from the layer's input, which no attention of GPT-NeoX is given; train it "
            "with `--engine standalone`"
        )
        return
    if method.follows_length:
        yield (
            f"{ours} places tokens by the length of the whole text, which GPT-NeoX's cache does not know; "
            "train it with `--engine standalone`"
        )
        return
    for kind in sorted(kinds_of(args)):
        if kind == ATTEND:
            continue
        if kind == GLOBAL:
            if ours is not None and method.tier == "content":
                yield f"attention_config global: {ours} rewrites whole rows of scores; {HINT}"
            elif ours is not None and _transforms(method):
                yield f"attention_config global: NeoX would not apply {ours} to queries and keys; {HINT}"
        elif kind != "flash" or args.pos_emb not in FLASH_CARRIES or ours is not None:
            yield f"attention_config {kind}: its layers ignore {args.pos_emb}; {HINT}"


def _transforms(method: type[PositionMethod]) -> bool:
    return method.transform is not PositionMethod.transform or method.place == "embedding"


def _score_scaling(args: Any) -> Iterator[str]:
    if args.apply_query_key_layer_scaling and GLOBAL in kinds_of(args):
        yield (
            "apply_query_key_layer_scaling: it multiplies the bias of each layer by the layer's number;"
            f" set it to false, or {HINT}"
        )


def _own_attention(args: Any) -> Iterator[str]:
    """What layers of type `attend` cannot do."""
    if ATTEND not in kinds_of(args):
        if args.attention_impl != "auto":
            yield (
                f"attention_impl {args.attention_impl}: only layers of type `attend` read it; "
                "write attention_config: [[[attend], all]]"
            )
        return
    if args.attention_dropout:
        yield (
            f"attention_dropout {args.attention_dropout}: layers of type `attend` have none; set it to 0"
        )
    if args.use_mup:
        yield "use_mup: layers of type `attend` scale by 1/sqrt(head_dim); use attention_config global"
    for key in ("te_mha", "te_fp8_mha"):
        if getattr(args, key):
            yield f"{key}: Transformer Engine replaces the layers of type `attend`; set it to false"


def _built(args: Any, ours: str) -> Iterator[str]:
    heads = args.num_attention_heads
    try:
        method = positions.build(
            ours,
            heads=heads,
            head_dim=args.hidden_size // heads,
            hidden_size=args.hidden_size,
            max_length=args.max_position_embeddings,
            **position.options_of(args, ours),
        )
    except (TypeError, ValueError) as error:
        yield str(error)
        return
    if method.mixes_heads and args.model_parallel_size > 1:
        yield (
            f"model_parallel_size {args.model_parallel_size}: {ours} mixes the scores of all heads, "
            "and each rank has some of them; set it to 1"
        )
        return
    alike = [key for key, _ in method.named_parameters() if method.head_dim_of[key] is None]
    if alike and args.model_parallel_size > 1:
        yield (
            f"model_parallel_size {args.model_parallel_size}: each rank would learn {', '.join(alike)} "
            f"of {ours} from its own heads alone; set it to 1"
        )


def _own_keys(args: Any, ours: str | None) -> Iterator[str]:
    for key, default in (("position_init", "published"), ("position_precision", "exact")):
        if ours is None and getattr(args, key) != default:
            yield f"{key} {getattr(args, key)}: GPT-NeoX's own {args.pos_emb} has no such choice"
    if ours is None and args.position_options:
        yield f"position_options: GPT-NeoX's own {args.pos_emb} takes none"
    # NeoX checks types after this; what is of another type is its to refuse.
    if ours is not None and isinstance(args.position_options, dict | NoneType):
        yield from _built(args, ours)
    if args.seq_length_val is not None and args.dataset_impl != "gpt2":
        yield f"seq_length_val: GPT-NeoX's dataset_impl {args.dataset_impl} has no length for validation"
    if isinstance(args.seq_length_val, int):
        tiny = positions.build(
            args.pos_emb,
            heads=1,
            head_dim=2,
            hidden_size=2,
            max_length=args.max_position_embeddings,
        )
        try:
            tiny.can_read(args.seq_length_val)
        except ValueError as error:
            yield f"seq_length_val {args.seq_length_val}: {error}"
