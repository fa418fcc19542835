"""Attention inside GPT-NeoX's layers: the score hook, and layers of type `attend`.

A layer of type `attend` keeps NeoX's projections, rotary embedding, key/value cache and tensor
parallelism; between them it calls `megatron_patches.attention.attend`, whose memory grows linearly
with the length.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_patches.attention import attend
from megatron_patches.neox import position
from megatron_patches.neox.arguments import native, our_method
from megatron_patches.neox.patches import Patches
from megatron_patches.neox.refusals import ATTEND, GLOBAL
from megatron_patches.positions import PositionMethod, method_class


def apply(patches: Patches, fixes: frozenset[str]) -> None:
    from megatron import utils
    from megatron.model import transformer

    layers = Layers(longer_rotary="evaluation_lengths" in fixes)
    patches.wrap(transformer.ParallelSelfAttention, "__init__", layers.init)
    patches.wrap(transformer.ParallelSelfAttention, "attention", _attention)
    patches.wrap(utils, "get_attn_mask", layers.get_attn_mask)


class Inside:
    """What one layer of type `attend` calls; no module, so that it adds nothing to checkpoints."""

    def __init__(self, method: PositionMethod, args: Any, *, transformed: bool) -> None:
        self.method, self.transformed = method, transformed
        self.implementation = args.attention_impl
        # NeoX's mask leaves `sliding_window_width` keys besides the query's own.
        width = args.sliding_window_width
        self.window = None if width is None else width + 1

    def __call__(self, q_QBHD: Tensor, k_KBHD: Tensor, v_KBHD: Tensor) -> Tensor:
        """[B, H, Q, D] from NeoX's [length, B, H, D]; the queries are the last ones."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q_QBHD, k_KBHD, v_KBHD))
        if not list(self.method.parameters()):
            self.method.to(q.device)  # not part of the model, so nobody else moves it
        return attend(
            q,
            k.to(q.dtype),
            v.to(q.dtype),
            self.method,
            impl=self.implementation,
            window=self.window,
            transformed=self.transformed,
        )


class Layers:
    """Wraps the construction of NeoX's attention."""

    def __init__(self, *, longer_rotary: bool) -> None:
        self.longer_rotary = longer_rotary
        # Of all layers built in this process: whether one of them reads NeoX's mask.
        self.kinds: set[str] = set()

    def init(self, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        def __init__(layer: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(layer, *args, **kwargs).arguments
            settings = bound["neox_args"]
            kind = settings.attention_config[bound["layer_number"]]
            self.kinds |= set(settings.attention_config)
            bound["neox_args"] = self._as_neox_knows(settings)
            original(**bound)
            self._equip(layer, settings, kind)

        return __init__

    def _as_neox_knows(self, settings: Any) -> Any:
        """A copy of the arguments with nothing in it that NeoX's attention does not understand."""
        known = copy.copy(settings)
        kinds = settings.attention_config
        known.attention_config = [GLOBAL if kind == ATTEND else kind for kind in kinds]
        if self.longer_rotary and settings.seq_length_val:
            # The only length in there is that of the rotary table.
            known.seq_length = max(settings.seq_length, settings.seq_length_val)
        return known

    @staticmethod
    def _equip(layer: Any, settings: Any, kind: str) -> None:
        layer.attention_type = kind
        ours = our_method(settings)
        if kind == ATTEND:
            layer.attend_inside = _inside(layer, settings, ours)
        elif ours is not None and method_class(ours).weight is not PositionMethod.weight:
            # NeoX passes the scores through this attribute where `pos_emb` says "alibi".
            layer.pos_emb, layer.alibi_embed = "alibi", position.ScoreHook(layer.rpe)

    def get_attn_mask(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def get_attn_mask(seq_length: int, device: Any, sliding_window_width: Any) -> Tensor:
            if self.kinds == {ATTEND}:
                # Nobody reads it; a [1, 1, length, length] mask takes 1 GiB at 16384 in float32.
                return torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=device)
            return original(seq_length, device, sliding_window_width)

        return get_attn_mask


def _inside(layer: Any, settings: Any, ours: str | None) -> Inside:
    if ours is not None:
        return Inside(layer.rpe, settings, transformed=False)
    name = settings.pos_emb
    if method_class(name).place == "embedding":
        name = "none"  # it has done its work before the first layer
    # What NeoX itself does to queries and keys is done when they arrive.
    return Inside(position.make(settings, name), settings, transformed=name in native())


def _attention(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attention(
        self: Any, query_layer: Any, key_layer: Any, value_layer: Any, layer_past: Any, mask: Any
    ) -> Any:
        inside = self.__dict__.get("attend_inside")
        if inside is not None:
            return inside(query_layer, key_layer, value_layer)
        if mask.shape[-1] < query_layer.shape[0]:
            # Made before this layer was built; broadcast, it would hide nothing of the future.
            raise RuntimeError("a mask of a model whose layers all attend reached another layer")
        return original(self, query_layer, key_layer, value_layer, layer_past, mask)

    return attention
