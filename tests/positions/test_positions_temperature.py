"""Temperature of attention without positions: scores times a number, of all heads or learned for each."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_patches.attention import attend
from megatron_patches.positions import build

SIZES = {"heads": 3, "head_dim": 8, "hidden_size": 24}


def tensors(dtype=torch.float64, length=20):
    generator = torch.Generator().manual_seed(0)
    shape = (3, 2, 3, length, 8)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).unbind(0)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("temperature", [0.5, 1.8, 2])
def test_a_uniform_temperature_is_a_scale_of_the_scores(temperature, impl):
    q, k, v = tensors()
    found = attend(q, k, v, build("none", **SIZES, temperature=temperature), impl=impl)
    scale = temperature / math.sqrt(8)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_every_head_has_its_own(impl):
    method = build("none", **SIZES, temperature="heads").to_float64_()
    values = (0.5, 1.0, 3.0)
    method.scale.data.copy_(torch.tensor(values))
    q, k, v = tensors()
    found = attend(q, k, v, method, impl=impl)
    for head, value in enumerate(values):
        part = (t[:, head : head + 1] for t in (q, k, v))
        one = attend(*part, build("none", **{**SIZES, "heads": 1}, temperature=value), impl=impl)
        torch.testing.assert_close(found[:, head : head + 1], one, rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(
        lambda scale: method.transform(q, k, torch.arange(20))[0], method.scale
    )


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_nothing_under_the_padding_reaches_the_temperature(impl, poison):
    method = build("none", **SIZES, temperature="heads").to_float64_()
    method.scale.data.copy_(torch.tensor([0.5, 1.0, 3.0]))
    padding = torch.tensor([[True] * 7 + [False] * 13, [False] * 16 + [True] * 4])
    found = []
    for value in (0.0, poison):
        q, k, v = (t.masked_fill(padding[:, None, :, None], value) for t in tensors())
        out = attend(q, k, v, method, key_padding_mask=padding, impl=impl)
        found.append((out, *torch.autograd.grad(out.square().sum(), method.scale)))
    for wanted, other in zip(*found, strict=True):
        assert wanted.abs().max() > 0 and torch.equal(wanted, other)


def test_heads_are_shared_out_and_start_where_they_are_told():
    sizes = {**SIZES, "heads": 5, "hidden_size": 40}
    whole = build("none", **sizes, temperature="heads", initial_temperature=1.6)
    assert whole.scale.tolist() == pytest.approx([1.6] * 5) and whole.sharing == "layer"
    assert whole.head_dim_of == {"scale": 0}
    part = build("none", **sizes, head_range=(3, 2), temperature="heads")
    assert part.scale.tolist() == [1.0, 1.0]
    assert part.statistics()["scale_mean"] == 1.0
    assert whole.bfloat16().scale.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_product_is_rounded_once(dtype):
    q, k, _ = tensors(dtype)
    for method, exact in (
        (build("none", **SIZES, temperature=1.1), 1.1),
        (build("none", **SIZES, temperature="heads", initial_temperature=1.1), 1.1),
    ):
        found, same = method.transform(q, k, torch.arange(20))
        assert same is k
        assert torch.equal(found, (q.float() * torch.tensor(exact)).to(dtype))


@pytest.mark.parametrize("precision", ["exact", "as_published"])
def test_plain_none_does_nothing_in_both_precisions(precision):
    method = build("none", **SIZES, precision=precision, model_dtype="bfloat16")
    q, k, _ = tensors(torch.bfloat16)
    assert all(a is b for a, b in zip(method.transform(q, k, None), (q, k), strict=True))
    assert not method.transforms and method.sharing == "model" and not list(method.parameters())
    options = method.settings()["options"]
    assert options == {
        "precision": precision,
        "model_dtype": "bfloat16" if precision == "as_published" else None,
    }


def test_settings_say_what_was_chosen():
    uniform, learned = (
        build("none", **SIZES, temperature=value).settings()["options"] for value in (1.2, "heads")
    )
    assert uniform["temperature"] == 1.2 and "initial_temperature" not in uniform
    assert (learned["temperature"], learned["initial_temperature"]) == ("heads", 1.0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": 0}, "temperature=0 must be a number above 0 or 'heads'"),
        ({"temperature": True}, "temperature=True must be"),
        ({"temperature": "head"}, "temperature='head' must be a number above 0 or 'heads'"),
        ({"temperature": math.nan}, "temperature=nan must be"),
        ({"temperature": 1e39}, r"temperature=1e\+39 must be a finite number below"),
        ({"temperature": 10**40}, "must be a finite number below"),
        (
            {"temperature": "heads", "initial_temperature": 1e39},
            r"initial_temperature=1e\+39 must be a finite number below",
        ),
        ({"temperature": "heads", "initial_temperature": -1}, "initial_temperature=-1 must be"),
        ({"initial_temperature": 1.6}, "initial_temperature=1.6 belongs to temperature=heads"),
        (
            {"temperature": 1.2, "precision": "as_published", "model_dtype": "bfloat16"},
            "temperature=1.2 has no precision='as_published'",
        ),
    ],
    ids=str,
)
def test_options_that_cannot_be(options, told):
    with pytest.raises(ValueError, match=told):
        build("none", **SIZES, **options)
