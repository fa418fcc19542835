"""Our attention under the signature by which transformers' models call theirs.

transformers looks an attention function and a mask function up under one name, `NAME`. The mask function
hands on which tokens are padding and refuses everything else than plain causal sight; causality and
distances are the business of `attend`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_patches.attention import attend
from megatron_patches.positions import PositionMethod
from megatron_patches.standalone.cache import check_padding

NAME = "position_method"
SLOT = "_position_method"  # of an attention module: (method, implementation), hidden from nn.Module
# Arguments that change the result in ways that `attend` does not know: refused unless None or False.
REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask", "output_attentions")


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention output [B, L, H, D] with the method in the module's slot, and None for the weights.

    Args:
        query: [B, H, L, D]; `key` and `value` [B, H or a divisor of it, K, D], cached ones included.
        attention_mask: bool [B, K], True at real tokens, or None.

    Raises:
        RuntimeError: `use_positions` was not called on this model.
        ValueError: an argument under which the result would be wrong, by its name.
    """
    slot = getattr(module, SLOT, None)
    if slot is None:
        raise RuntimeError(
            f"{type(module).__name__} has no position method: call use_positions(model, ...), or load the "
            "model with load_with_positions"
        )
    method, impl = slot
    wrong = {key: others[key] for key in REFUSED if others.get(key) not in (None, False)}
    if dropout:
        wrong["dropout"] = dropout
    if others.get("is_causal") is False:
        wrong["is_causal"] = False
    if scaling is not None and scaling != method.score_scale:
        wrong["scaling"] = scaling
    if wrong:
        given = ", ".join(f"{key}={value}" for key, value in wrong.items())
        raise ValueError(f"attention with {method.name} does not take {given}")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention with {method.name} takes an attention_mask [batch, keys], not "
            f"{list(attention_mask.shape)}: custom masks are not supported"
        )
    padding = None if attention_mask is None else ~attention_mask
    check_padding(method, padding)
    pieces = method.follows_length and query.shape[2] < key.shape[2]
    if pieces and method.planned_length is None:
        raise ValueError(
            f"with {method.name} a token's place follows the length of the whole text: before it is read "
            "piece by piece, set `planned_length` of each method that use_positions returned"
        )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out = attend(query, key, value, method, impl=impl, key_padding_mask=padding)
    return out.transpose(1, 2).contiguous(), None


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Which keys are real, bool [B, K], or None: all.

    Raises ValueError for sight that is not plainly causal over all keys so far: windows, packed
    sequences, bidirectional parts, caches of a fixed size.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function is not None and mask_function is not causal_mask_function:
        raise ValueError(
            "a position method sees causally over one text: sliding windows, packed sequences "
            "(position_ids that start anew) and bidirectional masks are not supported"
        )
    # A fixed-size cache gives its offset as a tensor, and more keys than there are tokens.
    fixed = isinstance(q_offset, Tensor) or kv_offset or kv_length != q_offset + q_length
    if fixed:
        raise ValueError(
            f"{q_length} queries from position {q_offset} on but {kv_length} keys: caches of a fixed size "
            "and sliding caches are not supported; use the dynamic cache"
        )
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch_size, kv_length):
        raise ValueError(
            f"attention_mask must be [{batch_size}, {kv_length}], cached and new tokens; it is "
            f"{list(attention_mask.shape)}"
        )
    real = attention_mask.to(torch.bool)
    return None if bool(real.all()) else real


def register() -> None:
    """Make transformers know `NAME`; again is harmless."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, attention_function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask_function)


def fill_slot(module: nn.Module, method: PositionMethod, impl: str) -> None:
    """Let `module` attend with `method`; the module that owns the parameters is another."""
    object.__setattr__(module, SLOT, (method, impl))
