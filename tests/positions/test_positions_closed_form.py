"""A method's `closed_form` and its `bias` are the same function, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_patches.positions import PositionMethod, build, names


def make(name: str, **options: object) -> PositionMethod:
    return build(name, heads=5, head_dim=8, hidden_size=40, max_length=64, seed=3, **options)


WITH_FORM = [name for name in names() if make(name).closed_form() is not None]

FORMULAS = {
    "log": lambda distance, rate: torch.log(1 + rate * distance),
    "power": lambda distance, rate: torch.where(distance > 0, distance.clamp(min=1) ** rate, 0.0),
    "linear": lambda distance, rate: distance,
}


def evaluate(method: PositionMethod, distance: Tensor) -> Tensor:
    """The formula of the docstring of `ClosedForm`, written down a second time."""
    kind, scale, rate = method.closed_form()
    rate = None if rate is None else rate[:, None]
    return -scale[:, None] * FORMULAS[kind](distance.to(scale.dtype)[None], rate)


def test_the_three_kinds_are_in_use():
    assert {make(name).closed_form().kind for name in WITH_FORM} == set(FORMULAS)


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("name", WITH_FORM)
def test_values_and_gradients_agree_with_bias(name, double):
    method = make(name)
    with torch.no_grad():  # one number outside its bounds: both must clamp it and pass its gradient
        for parameter in method.parameters():
            parameter[0] = -0.3
    method = method.to_float64_() if double else method
    rtol = 1e-12 if double else 1e-5
    distance = torch.tensor([0, 1, 2, 7, 63, 512, 16383])
    ours, bias = evaluate(method, distance), method.bias(distance)
    assert ours.dtype == bias.dtype
    torch.testing.assert_close(ours, bias, rtol=rtol, atol=0.0)
    upstream = torch.linspace(-1, 1, bias.numel(), dtype=bias.dtype).view_as(bias)
    parameters = [p for p in method.parameters() if p.requires_grad]
    if not parameters:
        assert not ours.requires_grad
        return
    found = torch.autograd.grad(ours, parameters, upstream, allow_unused=True)
    expected = torch.autograd.grad(bias, parameters, upstream, allow_unused=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=0.0)


@pytest.mark.parametrize("name", WITH_FORM)
def test_shape_head_range_and_published_rounding(name):
    whole, part = make(name).closed_form(), make(name, head_range=(1, 3)).closed_form()
    for mine, theirs in ((whole.scale, part.scale), (whole.rate, part.rate)):
        if mine is not None:
            assert mine.shape == (5,)
            assert torch.equal(mine[1:4], theirs)
    rounded = make(name, precision="as_published", model_dtype="bfloat16")
    assert rounded.closed_form() is None
