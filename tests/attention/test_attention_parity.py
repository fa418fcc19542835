"""`chunked` against the float64 oracle: outputs and gradients, every method, every kind of shape."""

from __future__ import annotations

import pytest
import torch
from attention_cases import assert_same, attend, make, outcome, padding, tensors

from megatron_patches.positions import names

METHODS = [name for name in names() if make(name).place == "attention"]
PRODUCTS = [name for name in METHODS if make(name).weight(torch.arange(2)) is not None]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

# queries, keys, batch, and the optional arguments; `pad` is read by attention_cases.padding.
SHAPES = {
    "1": {"queries": 1},
    "17": {"queries": 17, "batch": 2},
    "127": {"queries": 127},
    "128": {"queries": 128},
    "129": {"queries": 129, "batch": 3},
    "255": {"queries": 255},
    "257": {"queries": 257, "batch": 2},
    "333": {"queries": 333},
    "decode": {"queries": 1, "keys": 300},
    "fewer-queries": {"queries": 130, "keys": 333, "batch": 2},
    "offset-0": {"queries": 20, "keys": 50, "query_offset": 0},
    "offset-middle": {"queries": 140, "keys": 333, "query_offset": 77},
    "window-1": {"queries": 257, "window": 1},
    "window-50": {"queries": 333, "window": 50, "batch": 2},
    "window-128": {"queries": 300, "window": 128},
    "window-too-long": {"queries": 129, "window": 500},
    "window-offset": {"queries": 140, "keys": 333, "query_offset": 100, "window": 50},
    "pad-right": {"queries": 257, "batch": 3, "pad": (0, 1, 200)},
    "pad-left": {"queries": 129, "batch": 3, "pad": (-1, -128, 0)},
    "pad-all": {"queries": 130, "batch": 2, "pad": (130, -7)},
    "pad-window": {"queries": 300, "batch": 2, "pad": (60, -140), "window": 50},
    "pad-window-offset": {
        "queries": 140,
        "keys": 333,
        "batch": 3,
        "pad": (100, -150, 333),
        "window": 50,
        "query_offset": 90,
    },
}


def case(shape: dict, dtype: torch.dtype) -> tuple[list, dict]:
    shape = {"batch": 1, "keys": shape["queries"], **shape}
    qkv = tensors(shape["queries"], shape["keys"], batch=shape["batch"], dtype=dtype)
    arguments = {key: shape[key] for key in ("window", "query_offset") if key in shape}
    if "pad" in shape:
        arguments["key_padding_mask"] = padding(shape["batch"], shape["keys"], shape["pad"])
    return qkv, arguments


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_float32_outputs_and_gradients(name, shape):
    qkv, arguments = case(SHAPES[shape], torch.float32)
    expected = outcome(
        "reference", make(name).to_float64_(), [t.double() for t in qkv], **arguments
    )
    found = outcome("chunked", make(name), qkv, **arguments)
    assert found[0].dtype == torch.float32
    budget = outcome("reference", make(name), qkv, **arguments)
    assert_same(found, expected, TOLERANCE[torch.float32], budget)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", METHODS)
def test_float64_outputs_and_gradients(name, shape):
    qkv, arguments = case(SHAPES[shape], torch.float64)
    method = make(name).to_float64_()
    expected = outcome("reference", method, qkv, **arguments)
    assert_same(outcome("chunked", method, qkv, **arguments), expected, TOLERANCE[torch.float64])


@pytest.mark.parametrize("name", sorted(set(names()) - set(METHODS)))
def test_embedding_methods_add_nothing_here(name):
    qkv = tensors(140, dtype=torch.float32)
    plain = attend(*qkv, make("none"))
    assert torch.equal(attend(*qkv, make(name)), plain)
    assert_same(outcome("chunked", make(name), qkv), outcome("reference", make(name), qkv), 1e-5)


@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 128])
@pytest.mark.parametrize("name", ["kerple_log", "rotary", PRODUCTS[0]])
def test_head_dimensions(name, head_dim):
    qkv = tensors(150, heads=2, head_dim=head_dim, dtype=torch.float32)
    exact = make(name, 2, head_dim).to_float64_()
    expected = outcome("reference", exact, [t.double() for t in qkv])
    assert_same(outcome("chunked", make(name, 2, head_dim), qkv), expected, 1e-5)


@pytest.mark.parametrize("heads", [1, 5, 12])
def test_groups_of_heads(heads):
    """Lengths at which heads are cut into several groups, the last one ragged."""
    qkv = tensors(700, heads=heads, batch=2, dtype=torch.float32)
    expected = outcome("reference", make("kerple_log", heads), [t.double() for t in qkv])
    assert_same(outcome("chunked", make("kerple_log", heads), qkv), expected, 1e-5)


def plain_half(method, q, k, v):
    """Dense attention that stays in the dtype of its inputs throughout."""
    length = q.shape[2]
    distance = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
    q, k = method.transform(q, k, torch.arange(length), total_length=length)
    scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    weight, bias = method.weight(distance), method.bias(distance)
    scores = scores if weight is None else scores * weight.to(scores.dtype)
    scores = scores if bias is None else scores + bias.to(scores.dtype)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1) @ v


@pytest.mark.parametrize("pad", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", METHODS)
def test_low_precision_inputs_have_float32_scores(name, dtype, pad):
    qkv = tensors(200, head_dim=32, dtype=dtype)
    qkv[0] = qkv[0] * 3  # scores large enough for their rounding to count
    # An empty padding mask takes the path without the fused kernel.
    arguments = {"key_padding_mask": padding(1, 200, (0,))} if pad else {}
    method = make(name, head_dim=32)
    expected = outcome("reference", method, [t.double() for t in qkv])
    found = outcome("chunked", method, qkv, **arguments)
    assert found[0].dtype == dtype

    def error(out):
        return float((out.detach().double() - expected[0]).norm())

    # Nobody gets below the rounding of the exact output to this dtype.
    assert error(found[0]) <= max(
        0.5 * error(plain_half(method, *qkv)), 1.01 * error(expected[0].to(dtype))
    )
    assert_same(found, expected, 0.03 if dtype == torch.bfloat16 else 0.004)


@pytest.mark.parametrize("name", METHODS)
def test_gradients_against_finite_differences(name):
    method = make(name, 2, 4).to_float64_()
    parameters = list(method.parameters())
    qkv = [t.requires_grad_() for t in tensors(9, 11, batch=2, heads=2, head_dim=4)]
    mask = padding(2, 11, (3, -2))

    def call(q, k, v, *_):
        return attend(q, k, v, method, impl="chunked", window=6, key_padding_mask=mask)

    def call_fused(q, k, v, *_):
        return attend(q, k, v, method, impl="chunked")

    for work in (call, call_fused):
        assert torch.autograd.gradcheck(work, (*qkv, *parameters), fast_mode=True)
