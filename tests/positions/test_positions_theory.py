"""Formulas restated in plain Python, and the properties that the KERPLE paper proves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_patches.positions import PositionMethod, build

Formula = Callable[[int, dict[str, float]], float]
BIAS: dict[str, Formula] = {
    "kerple_log": lambda d, r: -r["bias_p"] * math.log(1 + r["bias_a"] * d),
    "kerple_log3": lambda d, r: -r["bias_p"] * math.log(1 + r["bias_a"] * d ** r["bias_e"]),
    "kerple_power": lambda d, r: -r["bias_a"] * d ** r["bias_p"],
    "kerple_power_weight": lambda d, r: -r["bias_a"] * d ** r["bias_p"],
    "kerple_gauss2": lambda d, r: r["bias_p"] * math.exp(-r["bias_a"] * d * d),
    "kerple_gauss3": lambda d, r: r["bias_p"] * math.exp(-r["bias_a"] * d ** r["bias_e"]),
    "alibi": lambda d, r: -r["slopes"] * d,
}
WEIGHT: dict[str, Formula] = {
    "kerple_weight": lambda d, r: math.exp(-r["wei_a"] * d ** r["wei_p"]),
    "kerple_weight1": lambda d, r: math.exp(-r["wei_a"] * d * d),
    "kerple_power_weight": lambda d, r: math.exp(-r["wei_a"] * d ** r["wei_p"]),
}
NEGATIVE = ["kerple_log", "kerple_log3", "kerple_power", "kerple_power_weight"]


def make(name: str, heads: int = 5, seed: int = 7) -> PositionMethod:
    return build(name, heads=heads, head_dim=8, hidden_size=8 * heads, max_length=64, seed=seed)


def gram(kernel: Callable[[Tensor], Tensor | None]) -> Tensor:
    points = torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:40]
    values = kernel((points[:, None] - points).abs())
    assert values is not None
    return values.double()


def least_eigenvalue(matrix: Tensor, *, zero_sum: bool) -> Tensor:
    """Smallest eigenvalue over the largest magnitude, per head; optionally on zero-sum vectors."""
    size = matrix.shape[-1]
    if zero_sum:
        centre = torch.eye(size).double() - 1 / size
        matrix = centre @ matrix @ centre
    values = torch.linalg.eigvalsh(matrix)
    return values[..., 0] / values.abs().amax(-1)


@pytest.mark.parametrize("name", sorted(BIAS.keys() | WEIGHT.keys()))
def test_formula_pair_by_pair(name):
    method = make(name)
    distance = (torch.arange(7)[:, None] - torch.arange(7)).clamp(min=0)
    for formulas, values in ((BIAS, method.bias(distance)), (WEIGHT, method.weight(distance))):
        assert (name in formulas) == (values is not None)
        if values is None:
            continue
        for head in range(5):
            r = {key: value[head].item() for key, value in method.state_dict().items()}
            for i in range(7):
                for j in range(i + 1):
                    expected = formulas[name](i - j, r)
                    assert values[head, i, j].item() == pytest.approx(expected, rel=2e-6, abs=1e-7)


@pytest.mark.parametrize("name", sorted(BIAS.keys() | WEIGHT.keys()))
def test_far_counts_less(name):
    method = make(name, 12)
    for table in (method.table(40), method.weight_table(40)):
        if table is None:
            continue
        steps = table.diff(dim=-1)
        assert (steps <= 0).all() and (steps[:, 0] < 0).all()
    if name in [*NEGATIVE, "alibi"]:
        assert (method.table(2)[:, 0] == 0).all()
        assert (method.table(16384).diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("name", NEGATIVE)
def test_biases_are_conditionally_positive_definite(name):
    kernel = gram(make(name, 12).to_float64_().bias)
    assert (least_eigenvalue(kernel, zero_sum=True) > -1e-12).all()
    assert (least_eigenvalue(kernel, zero_sum=False) < -1e-3).all()  # only conditionally


@pytest.mark.parametrize("exponent", [0.01, 0.5, 1.0, 1.5, 1.99, 2.0])
def test_powers_up_to_two_are_kernels(exponent):
    kernel = gram(lambda d: -(d.double() ** exponent))
    assert least_eigenvalue(kernel, zero_sum=True) > -1e-12


@pytest.mark.parametrize("exponent", [2.01, 2.2, 3.0])
def test_powers_above_two_are_not_and_the_bound_saves_them(exponent):
    kernel = gram(lambda d: -(d.double() ** exponent))
    assert least_eigenvalue(kernel, zero_sum=True) < -1e-5
    method = make("kerple_power").to_float64_()
    method.bias_p.data.fill_(exponent)
    assert (least_eigenvalue(gram(method.bias), zero_sum=True) > -1e-12).all()


@pytest.mark.parametrize("name", ["kerple_gauss2", "kerple_gauss3"])
def test_gaussian_biases_are_positive_definite(name):
    kernel = gram(make(name, 12).to_float64_().bias)
    assert (least_eigenvalue(kernel, zero_sum=False) > -1e-12).all()


@pytest.mark.parametrize("name", WEIGHT)
def test_weights_are_positive_definite(name):
    kernel = gram(make(name, 12).to_float64_().weight)
    assert (least_eigenvalue(kernel, zero_sum=False) > -1e-12).all()


@pytest.mark.parametrize("name", NEGATIVE)
def test_a_large_enough_constant_makes_a_bias_positive_definite(name):
    kernel = gram(make(name).to_float64_().bias)
    constant = torch.ones(5, 1, 1).double()
    for _ in range(60):
        short = least_eigenvalue(kernel + constant, zero_sum=False) < -1e-12
        constant[short] *= 2
    assert not short.any() and (constant > 1).all()
    scores = torch.randn(5, 40, 40).double()
    plain, shifted = (scores + kernel).softmax(-1), (scores + kernel + constant).softmax(-1)
    torch.testing.assert_close(plain, shifted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "kerple_power"])
def test_the_key_position_shortcut_is_for_linear_biases_only(name):
    method = make(name, 8)
    distance = torch.arange(20)[:, None] - torch.arange(20)
    future = distance < 0
    true = method.bias(distance.clamp(min=0)).masked_fill(future, -torch.inf).softmax(-1)
    row = -method.table(20)[:, None, :].expand(-1, 20, -1)  # rises with the key's position
    shortcut = row.masked_fill(future, -torch.inf).softmax(-1)
    assert torch.allclose(true, shortcut, atol=1e-5) == (name == "alibi")
