"""What the KERPLE kernels keep besides: numbers within their bounds, and their two kinds of start."""

from __future__ import annotations

import pytest
import torch
from test_positions_contract import KERPLE, make, outputs

from megatron_patches.attention import attend
from megatron_patches.positions import build, method_class

PUBLISHED = [name for name in KERPLE if "as_published" in method_class(name).precisions]


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "exact") for name in KERPLE), *((name, "as_published") for name in PUBLISHED)],
)
def test_gradient_at_distance_zero_is_finite(name, precision):
    method = make(name, precision=precision, model_dtype="bfloat16")
    sum(values.sum() for values in outputs(method, torch.zeros(4))).backward()
    assert all(p.grad.isfinite().all() for p in method.parameters())


def test_kernels_that_were_never_released_have_no_published_rounding():
    assert set(PUBLISHED) == {
        *("kerple_log", "kerple_power", "kerple_power_weight", "kerple_weight"),
    }
    for name in set(KERPLE) - set(PUBLISHED):
        with pytest.raises(ValueError, match=f"{name} has no precision='as_published'"):
            make(name, precision="as_published", model_dtype="float16")


@pytest.mark.parametrize("inner", [1.0, 1.9, 40.0])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_float16_beyond_its_range(name, inner):
    """Finite gradients where d^1.9 > 65,504, that is from d = 343 on; below it the numbers of float16."""
    method = make(name, 2, precision="as_published", model_dtype="float16")
    for key, parameter in method.named_parameters():
        exponent = method.bounds[key][1] == 2.0
        parameter.data.fill_(min(inner, 1.9) if exponent or name == "kerple_log" else 0.5)
    if name == "kerple_log":
        method.bias_a.data.fill_(inner)
    q, k, v = (torch.randn(1, 2, 4096, 8).half().requires_grad_() for _ in range(3))
    attend(q, k, v, method).float().square().sum().backward()
    for tensor in (q, k, v, *method.parameters()):
        assert tensor.grad.isfinite().all()
    table = method.table(343)
    if table is not None:
        d = torch.arange(343).half()
        a, p = (method.get_parameter(key)[0, 0].half() for key in ("bias_a", "bias_p"))
        plain = -p * torch.log(1 + a * d) if name == "kerple_log" else -a * d.pow(p)
        assert torch.equal(table[0], plain.detach().float())
    weights = method.weight_table(4096)
    if weights is not None:
        a, p = (method.get_parameter(key)[0, 0].half() for key in ("wei_a", "wei_p"))
        plain = torch.exp(-a * torch.arange(4096).half().pow(p))
        assert torch.equal(weights[0], plain.detach().float())


@pytest.mark.parametrize("name", KERPLE)
def test_bounds_hold_whatever_the_optimiser_does(name):
    method = make(name)
    assert set(method.bounds) == dict(method.named_parameters()).keys()
    pointers = [p.data_ptr() for p in method.parameters()]
    optimiser = torch.optim.SGD(method.parameters(), lr=1e3)
    target = torch.randn(12, 1)
    for _ in range(3):
        optimiser.zero_grad()
        sum((values * target).sum() for values in outputs(method, torch.arange(1, 4))).backward()
        optimiser.step()
        stored = [p.clone() for p in method.parameters()]
        beyond = outputs(method, torch.tensor([0, 1, 16383]))
        method.project_()
        assert any(not torch.equal(p, s) for p, s in zip(method.parameters(), stored, strict=True))
        for a, b in zip(beyond, outputs(method, torch.tensor([0, 1, 16383])), strict=True):
            assert torch.equal(a, b)  # the forward pass had used the legal values already
        for key, parameter in method.named_parameters():
            low, high = method.bounds[key]
            assert low == 0.01
            assert (parameter >= torch.tensor(low)).all() and (parameter <= high).all()
    assert [p.data_ptr() for p in method.parameters()] == pointers


@pytest.mark.parametrize("name", KERPLE)
def test_a_number_outside_its_bounds_can_come_back(name):
    method = make(name)
    for parameter in method.parameters():
        parameter.data.fill_(-3.0)
    sum(values.sum() for values in outputs(method, torch.arange(1, 5))).backward()
    assert all((p.grad != 0).all() for p in method.parameters())


@pytest.mark.parametrize("name", KERPLE)
def test_exponents_stop_at_two_and_stay_finite(name):
    method = make(name)
    for parameter in method.parameters():
        parameter.data.fill_(9.0)
    exponents = {key for key, (_, high) in method.bounds.items() if high == 2.0}
    method.project_()
    for key, parameter in method.named_parameters():
        assert parameter.unique().tolist() == [2.0 if key in exponents else 9.0]
    expected = {"bias_e", "wei_p"} | ({"bias_p"} if "power" in name else set())
    assert exponents == expected & dict(method.named_parameters()).keys()
    for values in outputs(method, torch.arange(16384)):
        assert values.isfinite().all()


@pytest.mark.parametrize("name", KERPLE)
def test_published_start_values(name):
    method = build(name, heads=4000, head_dim=1, hidden_size=4000, seed=1)
    doubled = {"bias_e", "wei_p", "bias_p"}
    for key, parameter in method.named_parameters():
        top = 2.0 if key in doubled else 1.0
        assert 0.98 * top < parameter.max() <= top
        assert abs(parameter.mean() - top / 2) < 0.05 * top
        assert parameter.min() == torch.tensor(0.01)  # drawn lower, lifted


@pytest.mark.parametrize("name", KERPLE)
def test_alibi_start_values(name):
    first, second = make(name, init="alibi", seed=1), make(name, init="alibi", seed=2)
    slopes = make("alibi").slopes.clamp(min=0.01)
    state = first.state_dict()
    scales = {"bias_a", "wei_a"} if "power" in name or "weight" in name else {"bias_p"}
    for key, value in state.items():
        assert torch.equal(value, second.state_dict()[key])
        expected = slopes if key in scales else torch.ones(12)
        assert torch.equal(value.flatten(), expected)


def test_power_started_as_alibi_is_alibi_where_the_bound_allows():
    ours, alibi = make("kerple_power", init="alibi").table(300), make("alibi").table(300)
    steep = make("alibi").slopes >= 0.01
    assert steep.sum() == 10
    torch.testing.assert_close(ours[steep], alibi[steep])
    assert not torch.allclose(ours[~steep], alibi[~steep])
