"""The shape of a model, and what it starts from: position methods and first weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from megatron_patches.positions import PositionMethod, build, method_class
from megatron_patches.training.position_options import LAYER_SEED_STEP


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides the parameters and the function of a `GPT`."""

    layers: int
    hidden_size: int
    heads: int
    vocabulary: int  # padded: rows of the embedding and of the output
    pos_emb: str
    max_length: int  # rows of a learned position table (NeoX's max_position_embeddings)
    intermediate_size: int | None = None  # None = 4 x hidden_size
    layernorm_epsilon: float = 1e-5
    parallel_residual: bool = False  # NeoX's gpt_j_residual
    tied_output: bool = False
    init_method: str = "normal"
    output_layer_init_method: str = "scaled_normal"
    init_method_std: float = 0.02
    seed: int = 1234
    position_sharing: str | None = None  # "model", "layer" or None = what the method prescribes
    position_options: dict[str, Any] = field(default_factory=dict)
    attention: str = "auto"
    attention_eps: float = 0.0  # far keys may be left out below this share of the weight
    window: int | tuple[str, int] | None = (
        None  # of `attend`: visible keys a query, or ("blockwise", b)
    )
    checkpoint_activations: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads


def position_method(shape: ModelShape, layer: int = 0) -> PositionMethod:
    """The method of one layer. ConfigError for a value that it refuses, TypeError for other options."""
    try:
        return build(
            shape.pos_emb,
            heads=shape.heads,
            head_dim=shape.head_dim,
            hidden_size=shape.hidden_size,
            max_length=shape.max_length,
            seed=shape.seed + LAYER_SEED_STEP * layer,
            **shape.position_options,
        )
    except ValueError as error:
        try:
            from megatron_patches.config import ConfigError
        except ImportError:  # a bare machine, whose options `prepare` has tried
            raise error from None
        raise ConfigError(str(error)) from error


def position_methods(shape: ModelShape) -> list[PositionMethod]:
    """One a layer: the same one, or each its own."""
    method = position_method(shape)
    sharing = shape.position_sharing or method.sharing
    if sharing == "model" or method.place == "embedding":
        return [method] * shape.layers
    return [method, *(position_method(shape, layer) for layer in range(1, shape.layers))]


def read_with(shape: ModelShape, options: Mapping[str, Any]) -> ModelShape:
    """`shape` with other `options` of its position method, as an evaluation may set them.

    Raises ValueError for options that the method does not let be set (with those that it does), for
    values that it refuses, and where they would need other parameters.
    """
    possible = method_class(shape.pos_emb).evaluation_options
    wrong = ", ".join(key for key in options if key not in possible)
    if wrong:
        listed = ", ".join(possible) or "none"
        raise ValueError(
            f"a trained {shape.pos_emb} is not read with another {wrong}; what may be set: {listed}"
        )
    changed = replace(shape, position_options={**shape.position_options, **options})
    trained, ours = (
        {key: tensor.shape for key, tensor in position_method(one).state_dict().items()}
        for one in (shape, changed)
    )
    if trained != ours:
        keys = ", ".join(sorted(trained.keys() ^ ours.keys()) or sorted(ours))
        raise ValueError(
            f"{shape.pos_emb} with these options has other parameters than it was trained with ({keys})"
        )
    return changed


# Standard deviations as GPT-NeoX names them; `small_init` is Nguyen and Salazar (arXiv 1910.05895),
# `wang_init` is 2 / (layers * sqrt(width)).
_DEVIATIONS: dict[str, Callable[[ModelShape], float]] = {
    "normal": lambda s: s.init_method_std,
    "scaled_normal": lambda s: s.init_method_std / math.sqrt(2.0 * s.layers),
    "small_init": lambda s: math.sqrt(2.0 / (5.0 * s.hidden_size)),
    "wang_init": lambda s: 2.0 / (s.layers * math.sqrt(s.hidden_size)),
}


def initialise(model: nn.Module, shape: ModelShape) -> None:
    """Weights from a generator of their own, in layer order: the seed alone decides them."""
    for name in (shape.init_method, shape.output_layer_init_method):
        if name not in _DEVIATIONS:
            raise ValueError(
                f"init method {name!r} is not known here; known: {', '.join(_DEVIATIONS)}"
            )
    inner = _DEVIATIONS[shape.init_method](shape)
    outer = _DEVIATIONS[shape.output_layer_init_method](shape)
    generator = torch.Generator().manual_seed(shape.seed)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            deviation = outer if name.endswith(("attention.dense", "mlp.linear2")) else inner
            module.weight.data.normal_(0.0, deviation, generator=generator)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, inner, generator=generator)
