"""Our attention under the signature by which transformers' models call theirs.

transformers looks an attention function and a mask function up under one name, `NAME`. The mask function
hands on which tokens are padding and refuses everything else than plain causal sight; causality and
distances are the business of `attend`. What neither of them is told is checked before the model's body runs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from megatron_patches.attention import attend
from megatron_patches.positions import PositionMethod
from megatron_patches.standalone.cache import check_padding

NAME = "position_method"
SLOT = "_position_method"  # of an attention module: (method, implementation), hidden from nn.Module
# Arguments that change the result in ways that `attend` does not know: refused unless None or False.
REFUSED = (
    *("sliding_window", "softcap", "s_aux", "position_bias", "head_mask", "output_attentions"),
    "cu_seq_lens_q",  # packed sequences, of transformers' collators
)


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
        query: [B, H, L, D]; `key` and `value` [B, H or a divisor of it, K, D], cached ones included. Under
            autocast they may differ in dtype: attention is then computed in that of autocast.
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
    # By identity: a tensor has no truth value.
    named = {key: others.get(key) for key in REFUSED}
    wrong = {key: value for key, value in named.items() if not (value is None or value is False)}
    if dropout:
        wrong["dropout"] = dropout
    if others.get("is_causal") is False:
        wrong["is_causal"] = False
    if scaling is not None and scaling != method.score_scale:
        wrong["scaling"] = scaling
    if wrong:
        given = ", ".join(
            key if isinstance(value, Tensor) else f"{key}={value}" for key, value in wrong.items()
        )
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
    query, key, value = _one_dtype(query, key, value)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    out = attend(query, key, value, method, impl=impl, key_padding_mask=padding)
    return out.transpose(1, 2).contiguous(), None


def _one_dtype(*tensors: Tensor) -> list[Tensor]:
    """As autocast does for torch's attention: rotation leaves float32 queries, values are not turned."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t if t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def check_call(body: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Before a model's body runs: its attention is ours, and tokens stand where `position_ids` say.

    Distances are counted in the input, so `position_ids` must count one by one along the real tokens.

    Raises RuntimeError for another attention, ValueError for other positions.
    """
    chosen = body.config._attn_implementation
    if chosen != NAME:
        raise RuntimeError(
            f"{type(body).__name__} was switched to the attention {chosen!r}, which leaves its position "
            f"method out: switch it back with set_attn_implementation({NAME!r})"
        )
    given = inspect.signature(body.forward).bind_partial(*arguments, **named).arguments
    places, mask = given.get("position_ids"), given.get("attention_mask")
    if places is None or places.shape[-1] < 2:
        return
    follows = places.diff(dim=-1) == 1
    if mask is not None and mask.dim() == 2:
        real = mask[:, -places.shape[-1] :].bool()
        follows = follows | ~(real[:, 1:] & real[:, :-1])
    if not bool(follows.all()):
        raise ValueError(
            "position_ids do not count one by one along the tokens, but a position method takes distances "
            "from the input: packed sequences, gaps and other scales are not supported; leave them out"
        )


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
