"""The piecewise linear form of a ReLU network against the network itself."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.positions._piecewise import relu_network


def network(u, weight, bias, outer):
    return torch.einsum("hw,...w->h...", outer, torch.relu(u[..., None] * weight + bias))


def drawn(seed: int, width: int = 32, heads: int = 5):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((width,), (width,), (heads, width))
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shape", [(), (7,), (11, 13), (3, 4, 5)])
def test_values_and_gradients(seed, shape):
    """Inputs of either sign, beyond all kinks, and in any order."""
    generator = torch.Generator().manual_seed(100 + seed)
    u = torch.randn(shape, generator=generator, dtype=torch.float64) * 5
    leaves = [t.requires_grad_() for t in (u, *drawn(seed))]
    ours, theirs = relu_network(*leaves), network(*leaves)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(
        torch.autograd.grad(ours, leaves, upstream),
        torch.autograd.grad(theirs, leaves, upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_hidden_values_without_a_kink():
    """Weights of 0 leave a constant or nothing; two kinks may fall together."""
    _, _, outer = drawn(3, width=4)
    weight = torch.tensor([0.0, 0.0, 2.0, -1.0], dtype=torch.float64)
    bias = torch.tensor([0.7, -0.7, -1.0, 0.5], dtype=torch.float64)
    u = torch.linspace(-2, 2, 41, dtype=torch.float64)
    torch.testing.assert_close(
        relu_network(u, weight, bias, outer), network(u, weight, bias, outer)
    )
    flat = torch.zeros(4, dtype=torch.float64)
    torch.testing.assert_close(relu_network(u, flat, bias, outer), network(u, flat, bias, outer))


def test_float32_is_as_exact_as_the_network():
    u = torch.linspace(0, 1, 1001)
    parts = drawn(7)
    exact = network(u.double(), *parts)
    error = (relu_network(u, *(t.float() for t in parts)).double() - exact).abs().max()
    assert float(error) < 2e-6 * float(exact.abs().max())
