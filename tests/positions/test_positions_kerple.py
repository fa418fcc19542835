"""What the KERPLE kernels keep besides: numbers within their bounds, and their two kinds of start."""

from __future__ import annotations

import pytest
import torch
from test_positions_contract import KERPLE, make, outputs

from megatron_patches.positions import build


@pytest.mark.parametrize("name", KERPLE)
@pytest.mark.parametrize("precision", ["exact", "as_published"])
def test_gradient_at_distance_zero_is_finite(name, precision):
    method = make(name, precision=precision, model_dtype="bfloat16")
    sum(values.sum() for values in outputs(method, torch.zeros(4))).backward()
    assert all(p.grad.isfinite().all() for p in method.parameters())


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
