"""Layers of type `attend` inside GPT-NeoX's attention: the same numbers as its dense scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from neox_tools import (
    ATTEND_ONLY,
    INSERTED,
    NATIVE,
    POSSIBLE,
    PRODUCT,
    REPLICATED,
    SLOT,
    leaf,
    make_args,
    random,
)
from torch import Tensor

from megatron_patches import positions
from megatron_patches.attention import attend
from megatron_patches.neox.model import own_methods
from megatron_patches.positions import PositionMethod

ATTEND = [[["attend"], "all"]]
GLOBAL = [[["global"], "all"]]
LENGTH = 12
# So few buckets that the logarithmic ones are reached.
T5 = {"rpe_num_buckets": 8, "rpe_max_distance": 10}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "window": {"sliding_window_width": 3},
    "narrow": {"sliding_window_width": 2},
    "chunked": {"attention_impl": "chunked"},
    "layer": {"position_sharing": "layer"},
}
# GPT-NeoX shares what is its own among all layers.
CARRIED = [name for name in POSSIBLE if name not in ATTEND_ONLY]
CASES = [(n, v) for n in CARRIED for v in VARIANTS if v != "layer" or n in INSERTED]

pytestmark = pytest.mark.usefixtures("shared")


def model(name: str, kinds: Any, *, use_cache: bool = False, **changes: Any) -> Any:
    from megatron.model.gpt2_model import GPT2ModelPipe

    torch.manual_seed(5)
    changes = {"attention_config": kinds, **T5, **changes}
    if "attend" not in str(kinds):
        changes.pop("attention_impl", None)
    return GPT2ModelPipe(make_args(pos_emb=name, **changes), use_cache=use_cache)


def pair(name: str, **changes: Any) -> tuple[Any, Any]:
    """Two models with the same weights: dense scores, and `attend`."""
    dense, attend = model(name, GLOBAL, **changes), model(name, ATTEND, **changes)
    attend.load_state_dict(dense.state_dict())  # the same names and shapes
    return dense, attend


def mask(args: Any, length: int = LENGTH) -> Tensor:
    from megatron.utils import get_attn_mask

    return get_attn_mask(length, torch.device("cpu"), args.sliding_window_width)


def outcome(made: Any, x: Tensor, hidden_mask: Tensor) -> dict[str, Tensor]:
    x = leaf(x)
    out = made((x, hidden_mask))
    (out * random(*out.shape, seed=2)).sum().backward()
    named = {key: p.grad for key, p in made.named_parameters()}
    return {"out": out, "x": x.grad, **named}


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_attend_equals_the_dense_scores(name, variant):
    dense, attend = pair(name, **VARIANTS[variant])
    x = random(2, LENGTH, 32)
    full = ~torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    width = dense.neox_args.sliding_window_width
    if width is not None:
        full |= torch.ones_like(full).tril(-width - 1)
    expected = outcome(dense, x, full)
    found = outcome(attend, x, mask(attend.neox_args))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert value is not None and torch.count_nonzero(value), key
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("name", CARRIED)
def test_with_a_cache_the_queries_are_the_last_positions(name, queries):
    dense, attend = pair(name, use_cache=True)
    x = random(LENGTH, 2, 32)
    first = LENGTH - queries
    full = ~torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    outs = []
    for made in (dense, attend):
        layer = made.sequential[0].attention
        whole, _ = layer(x, full)
        _, past = layer(x[:first], full[..., :first, :first])
        last, (keys, _) = layer(x[first:], full[..., first:, :], layer_past=past)
        assert keys.size(0) == LENGTH
        torch.testing.assert_close(last, whole[first:], rtol=1e-4, atol=1e-5)
        outs.append(last)
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ATTEND_ONLY)
def test_what_only_such_layers_carry(name):
    """NeoX's own attention is refused for these, so `attend` by itself is what to compare with."""
    q, k, v = (random(LENGTH, 2, 4, 8, seed=seed) for seed in range(3))
    made = model(name, ATTEND)
    layer, longest = made.sequential[0].attention, made.neox_args.max_position_embeddings
    full = ~torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    method = positions.build(name, heads=4, head_dim=8, hidden_size=32, max_length=longest)
    for parameter in method.parameters():  # some start as if there were no method
        parameter.data += random(*parameter.shape, seed=3).abs()
    if list(method.parameters()):
        layer.rpe.load_state_dict(method.state_dict())
    found = layer.attention(q, k, v, None, full)
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    expected = attend(q, k, v, method, impl="reference")
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found, attend(q, k, v, plain(), impl="reference"), atol=1e-3)


def plain() -> PositionMethod:
    return positions.build("none", heads=4, head_dim=8, hidden_size=32)


@pytest.mark.parametrize("kinds", [ATTEND, GLOBAL])
@pytest.mark.parametrize("name", [name for name in CARRIED if name not in REPLICATED])
def test_two_tensor_parallel_ranks_together_are_one(name, kinds):
    from megatron import mpu

    q, k, v = (random(LENGTH, 2, 4, 8, seed=seed) for seed in range(3))
    full = ~torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    whole = model(name, kinds).sequential[0].attention.attention(q, k, v, None, full)
    parts = []
    for rank in (0, 1):
        mpu.place(model=(rank, 2))
        layer = model(name, kinds, model_parallel_size=2).sequential[0].attention
        heads = slice(2 * rank, 2 * rank + 2)
        parts.append(layer.attention(q[:, :, heads], k[:, :, heads], v[:, :, heads], None, full))
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [PRODUCT[0], *sorted(NATIVE)])
def test_scores_are_not_scaled_by_the_layers_number(name):
    x = random(2, LENGTH, 32)
    plain = model(name, ATTEND, num_layers=3)
    scaled = model(name, ATTEND, num_layers=3, apply_query_key_layer_scaling=True)
    scaled.load_state_dict(plain.state_dict())
    found = [made((x, mask(made.neox_args))) for made in (plain, scaled)]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", [PRODUCT[0], *sorted(NATIVE)])
def test_layers_of_both_types_in_one_model(name):
    dense, attend = pair(name)
    mixed = model(name, [[["attend", "global"], 1]])
    mixed.load_state_dict(dense.state_dict())
    kinds = [layer.attention.attention_type for layer in mixed.sequential[:2]]
    assert kinds == ["attend", "global"]
    x, full = random(2, LENGTH, 32), mask(mixed.neox_args)
    assert full.shape[-2:] == (LENGTH, LENGTH)
    torch.testing.assert_close(mixed((x, full)), dense((x, full)), rtol=1e-4, atol=1e-5)
    inside = [hasattr(layer.attention, "attend_inside") for layer in mixed.sequential[:2]]
    assert inside == [True, False]


def test_a_named_implementation_runs_or_raises():
    made = model(INSERTED[0], ATTEND, attention_impl="triton")
    with pytest.raises((ValueError, RuntimeError), match="triton"):
        made((random(2, LENGTH, 32), mask(made.neox_args)))


@pytest.mark.parametrize("name", CARRIED)
def test_the_arguments_are_left_as_they_were(name):
    made = model(name, ATTEND, seq_length_val=24)
    args = made.neox_args
    assert (args.attention_config, args.seq_length) == (["attend", "attend"], LENGTH)


# ---- which layer gets which method ---------------------------------------------------------------


@pytest.mark.parametrize("name", INSERTED)
@pytest.mark.parametrize("sharing", ["model", "layer"])
def test_sharing(name, sharing):
    made = model(name, ATTEND, position_sharing=sharing, num_layers=3)
    methods = [layer.attention.rpe for layer in made.sequential[:3]]
    assert all(isinstance(m, PositionMethod) and m.name == name for m in methods)
    distinct = {id(m) for m in methods}
    assert len(distinct) == len(own_methods(made)) == {"model": 1, "layer": 3}[sharing]
    assert [m.layer for m in methods] == {"model": [None] * 3, "layer": [0, 1, 2]}[sharing]
    keys = [key for key in made.state_dict() if f".{SLOT}." in key]
    assert len(keys) == 3 * len(list(methods[0].parameters()))


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_neoxs_own_methods_stay_neoxs(name):
    made = model(name, GLOBAL)
    assert own_methods(made) == []


def test_a_model_in_which_a_layer_cannot_carry_the_method_is_refused(monkeypatch):
    from megatron.model import gpt2_model

    monkeypatch.setattr(gpt2_model, "ParallelTransformerLayerPipe", gpt2_model.RelayLayer)
    with pytest.raises(RuntimeError, match=f"0 of 2 layers can carry {INSERTED[0]}"):
        model(INSERTED[0], GLOBAL)
