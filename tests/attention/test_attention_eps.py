"""The window skip: its bound holds against hostile inputs, and it does skip where a bias falls fast."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import attend

from megatron_patches.attention.problem import Sight
from megatron_patches.attention.reach import Reach
from megatron_patches.attention.windows import window_of
from megatron_patches.positions import build, names

HEADS, DIM, LENGTH = 4, 16, 700


def table_methods():
    made = {
        n: build(n, heads=HEADS, head_dim=DIM, hidden_size=64, max_length=LENGTH) for n in names()
    }
    return sorted(n for n, m in made.items() if m.tier == "table" and m.place == "attention")


def method_of(name):
    return build(name, heads=HEADS, head_dim=DIM, hidden_size=64, seed=3, max_length=LENGTH)


def hostile(kind):
    """Queries and keys for which a careless window would lose weight: far keys shout."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, HEADS, LENGTH, DIM, generator=generator) for _ in range(3))
    if kind == "loud first key":  # one far key of huge norm, aligned with every query
        q = q.abs()
        k[:, :, 0] = 40 * q.mean(2)
    elif kind == "silent own key":  # the query's own key points away, so its own score is low
        k = -q * 3
    elif kind == "loud queries":
        q = q * 8
    elif kind == "growing keys":
        k = k * torch.linspace(12, 0.1, LENGTH)[:, None]
    return q, k, v


@pytest.mark.parametrize(
    "kind", ["plain", "loud first key", "silent own key", "loud queries", "growing keys"]
)
@pytest.mark.parametrize("eps", [1e-2, 1e-5])
@pytest.mark.parametrize("name", table_methods())
def test_error_stays_within_the_bound(name, eps, kind):
    method = method_of(name)
    q, k, v = hostile(kind)
    with torch.no_grad():
        exact = attend(q, k, v, method, impl="chunked")
        skipped = attend(q, k, v, method, impl="chunked", eps=eps)
    assert float((exact - skipped).abs().max()) <= 2 * eps * float(v.abs().max()) + 1e-5


@pytest.mark.parametrize("queries, window", [(700, None), (300, None), (300, 200), (1, None)])
@torch.no_grad()
def test_weight_left_out_is_below_eps(queries, window):
    """The claim itself, in float64: the mass of the skipped keys of every query of a chunk."""
    method = method_of("kerple_power").to_float64_()
    q, k, _ = (t.double() for t in hostile("growing keys"))
    q = q[:, :, -queries:]
    sight, eps = Sight(LENGTH - queries, window_of(window), None, 1e-4), 1e-4
    scale = 1 / math.sqrt(DIM)
    reach = Reach(q, k, method.table(LENGTH), None, scale, sight)
    position_Q = torch.arange(LENGTH - queries, LENGTH)
    distance_QK = position_Q[:, None] - torch.arange(LENGTH)
    visible = (distance_QK >= 0) & (distance_QK < (window or LENGTH))
    scores = q @ k.transpose(-1, -2) * scale + method.bias(distance_QK.clamp(min=0))
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    for head in range(HEADS):
        for first in range(0, queries, 100):
            last = min(first + 100, queries)
            start = reach.first_key(first, last, slice(head, head + 1))
            left_out = weights[:, head, first:last, :start].sum(-1)
            assert float(left_out.max()) <= eps


def test_it_skips_where_the_bias_is_steep_and_not_where_it_is_flat():
    q, k, v = (t * 0.3 for t in hostile("plain"))
    scale, sight = 1 / math.sqrt(DIM), Sight(0, None, None, 1e-6)

    def first_keys(name):
        reach = Reach(q, k, method_of(name).table(LENGTH), None, scale, sight)
        return [reach.first_key(600, 700, slice(h, h + 1)) for h in range(HEADS)]

    steep, gentle, *_ = first_keys("alibi")
    # exp(-slope d) falls below 1e-6 at 55 and 221 keys for slopes 1/4 and 1/16; the bound costs some
    assert steep > 500 and gentle > 300
    method = method_of("none")
    flat = torch.zeros(HEADS, LENGTH)
    assert method.table(LENGTH) is None
    assert Reach(q, k, flat, None, scale, sight).first_key(600, 700, slice(0, HEADS)) == 0


def test_gradients_stay_within_the_bound():
    method, eps = method_of("alibi"), 1e-6
    q, k, v = (t.requires_grad_() for t in hostile("plain"))
    grad = torch.ones_like(q)
    exact = torch.autograd.grad(attend(q, k, v, method, impl="chunked"), (q, k, v), grad)
    skipped = torch.autograd.grad(attend(q, k, v, method, impl="chunked", eps=eps), (q, k, v), grad)
    for a, b in zip(exact, skipped, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_off_by_default_and_refused_where_it_means_nothing():
    method = method_of("alibi")
    q, k, v = hostile("plain")
    assert torch.equal(attend(q, k, v, method), attend(q, k, v, method, eps=0.0))
    for bad in (-1e-3, 1.0, float("nan")):
        with pytest.raises(ValueError, match="eps"):
            attend(q, k, v, method, eps=bad)


def test_padding_is_never_skipped_over():
    """A padded own key bounds nothing, so with padding every key is read."""
    method = method_of("alibi")
    q, k, v = hostile("loud queries")
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[:, 300:] = True
    exact = attend(q, k, v, method, impl="chunked", key_padding_mask=padding)
    assert torch.equal(
        exact, attend(q, k, v, method, impl="chunked", key_padding_mask=padding, eps=1e-3)
    )
