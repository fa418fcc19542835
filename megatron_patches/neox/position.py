"""A position method as part of GPT-NeoX's attention.

Shape suffixes: B batch, H heads of this rank, Q queries, K keys, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_patches.attention.spread import spread
from megatron_patches.config.schema import DTYPES
from megatron_patches.positions import PositionMethod, build
from megatron_patches.training.position_options import LAYER_SEED_STEP, position_options

# The argument, attribute and state-dict name with which NeoX hands a module to its attention.
SLOT = "rpe"


class _InAttention:
    """Mixed into a method's class: NeoX calls `rpe(queries, keys)` and saves it under its own names."""

    def forward(self: Any, queries: int, keys: int) -> Tensor:
        """What NeoX adds to scores [B, H, queries, keys] before the mask: [1, H, queries, keys].

        The queries are the last ones of all keys, as with a key/value cache. A product kernel adds 0
        here: `ScoreHook` does all of its work.
        """
        if type(self).weight is not PositionMethod.weight:
            nothing: Tensor = next(self.parameters()).new_zeros(1)
            return nothing
        return dense_bias(self, queries, keys)[None]

    def set_deepspeed_parallelism(self: Any, *_: object, **__: object) -> None:
        """DeepSpeed calls this between casting a model and making its optimizer.

        Its cast goes past nn.Module, so parameters that stay float32 are put back.
        """
        for parameter, exact in self.__dict__.pop("_exact", ()):
            parameter.data = exact.to(parameter.device)


def dense_bias(method: PositionMethod, queries: int, keys: int) -> Tensor:
    """The method's bias fp32 [H, queries, keys] for the last `queries` of `keys` positions.

    0 for keys after their query. Raises ValueError for more keys than the method can read.
    """
    method.can_read(keys)
    if method.tier == "table":
        table = method.table(keys)
        if table is None:
            raise ValueError(f"{method.name} has no bias")
        return spread(table, queries)
    device = next((t.device for t in [*method.parameters(), *method.buffers()]), None)
    query_Q = torch.arange(keys - queries, keys, device=device)
    distance_QK = query_Q[:, None] - torch.arange(keys, device=device)
    bias = method.bias(distance_QK.clamp(min=0), query_Q)
    if bias is None:
        raise ValueError(f"{method.name} has no bias")
    return bias.masked_fill(distance_QK < 0, 0.0)


class ScoreHook:
    """Stands where NeoX keeps its ALiBi and rewrites the scaled scores: `scores * weight + bias`.

    Not a module: the method's parameters are saved under `rpe` alone.
    """

    def __init__(self, method: PositionMethod) -> None:
        self.method = method

    def __call__(self, scores_BHQK: Tensor) -> Tensor:
        queries, keys = scores_BHQK.shape[-2:]
        weight = self.method.weight_table(keys)
        assert weight is not None
        # The factor of a later key is 0 here; the mask hides such keys whatever they score.
        rewritten = scores_BHQK * spread(weight, queries)
        if type(self.method).bias is not PositionMethod.bias:
            rewritten = rewritten + dense_bias(self.method, queries, keys)
        return rewritten.to(scores_BHQK.dtype)


def acts_on_scores(method: type[PositionMethod]) -> bool:
    """Whether a method of this class does its work in the attention scores."""
    hooks = ("bias", "weight", "score", "decay")
    return any(getattr(method, hook) is not getattr(PositionMethod, hook) for hook in hooks)


def make(args: Any, name: str, layer: int = 0) -> PositionMethod:
    """The method `name` for this tensor-parallel rank's heads, from NeoX's arguments.

    Raises ValueError or TypeError for options that the method does not have.
    """
    from megatron import mpu

    rank, ranks = mpu.get_model_parallel_rank(), mpu.get_model_parallel_world_size()
    heads = args.num_attention_heads
    return build(
        name,
        heads=heads,
        head_dim=args.hidden_size // heads,
        hidden_size=args.hidden_size,
        max_length=args.max_position_embeddings,
        seed=args.seed + LAYER_SEED_STEP * layer,
        head_range=(rank * (heads // ranks), heads // ranks),
        **options_of(args, name),
    )


def options_of(args: Any, name: str) -> dict[str, Any]:
    """Options for `build` from NeoX's arguments; a key counts as written where it is no default."""
    fields = type(args).__dataclass_fields__
    values = {key: getattr(args, key) for key in fields}
    written = {key for key, field in fields.items() if values[key] != field.default}
    precision = DTYPES[args.precision or "fp32"]
    return position_options({**values, "pos_emb": name}, written, precision)


def in_attention(method: PositionMethod, args: Any, layer: int | None = None) -> PositionMethod:
    """Make `method` callable as NeoX's `rpe`, and mark its parameters as NeoX marks its own.

    `layer` is the number of the layer that has it alone; None: all layers share it.
    """
    kind = type(method)
    method.__class__ = type(kind.__name__, (_InAttention, kind), {"name": kind.name})
    method.__dict__["layer"] = layer
    for key, parameter in method.named_parameters():
        dimension = method.head_dim_of[key]
        # What every tensor-parallel rank holds alike must not be counted once for each of them.
        parameter.model_parallel = dimension is not None  # type: ignore[attr-defined]
        parameter.partition_dim = dimension or 0  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]
    if args.precision != "fp32":
        if args.zero_stage == 3:
            # It packs all weights of a rank into one buffer of one dtype.
            for parameter in method.parameters():
                parameter.data = parameter.data.to(args.params_dtype)
        else:
            method.__dict__["_exact"] = [(p, p.detach().clone()) for p in method.parameters()]
    return method


def layer_of(method: PositionMethod) -> int | None:
    """The number of the layer that has `method` alone, as `in_attention` was told; None: shared."""
    layer: int | None = method.__dict__["layer"]
    return layer
