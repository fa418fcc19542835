"""Which gradients flow, and from which kinds of tensors."""

from __future__ import annotations

import pytest
import torch
from attention_cases import (
    ANYWHERE,
    HEAD_DIM,
    HEADS,
    assert_same,
    attend,
    make,
    outcome,
    padding,
    tensors,
)
from torch.utils.checkpoint import checkpoint

from megatron_patches.positions import names

LEARNED = [
    name for name in names() if make(name).place == "attention" and list(make(name).parameters())
]


@pytest.mark.parametrize("name", LEARNED)
def test_only_the_parameters_are_trained(name):
    qkv, method = tensors(150), make(name).to_float64_()
    _, grads = outcome("reference", method, qkv)
    out = attend(*qkv, method, impl="chunked")
    upstream = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64
    )
    out.backward(upstream)
    for parameter, expected in zip(method.parameters(), grads[3:], strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("which", range(3), ids="qkv")
@pytest.mark.parametrize("name", [*LEARNED, "alibi"])
def test_only_one_input_is_trained(name, which):
    qkv, method = tensors(150), make(name).to_float64_().requires_grad_(False)
    _, grads = outcome("reference", method, qkv)
    qkv[which].requires_grad_()
    out = attend(*qkv, method, impl="chunked")
    upstream = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64
    )
    out.backward(upstream)
    torch.testing.assert_close(qkv[which].grad, grads[which], rtol=1e-10, atol=1e-12)
    assert all(t.grad is None for i, t in enumerate(qkv) if i != which)


@pytest.mark.parametrize("name", LEARNED)
def test_some_parameters_frozen(name):
    method = make(name).to_float64_()
    next(method.parameters()).requires_grad_(False)
    qkv = tensors(150)
    assert_same(outcome("chunked", method, qkv), outcome("reference", method, qkv), 1e-12)


@pytest.mark.parametrize("pad", [False, True], ids=["fused", "plain"])
def test_backward_twice_gives_the_same(pad):
    method = make("kerple_power_weight" if pad else "kerple_log")
    qkv = [t.requires_grad_() for t in tensors(200, dtype=torch.float32)]
    out = attend(*qkv, method, key_padding_mask=padding(1, 200, (5,)) if pad else None)
    leaves = [*qkv, *method.parameters()]
    first = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(out.square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nothing_is_recorded_without_gradients():
    with torch.no_grad():
        assert attend(*tensors(20), make("kerple_log")).grad_fn is None
    frozen = make("kerple_log").requires_grad_(False)
    assert not attend(*tensors(20), frozen).requires_grad


def packed(batch, length, dtype=torch.float64):
    """Views of one packed projection, as the model makes them: strides of 3 * D between heads."""
    generator = torch.Generator().manual_seed(1)
    size = (batch, length, HEADS, 3, HEAD_DIM)
    return torch.randn(size, generator=generator, dtype=dtype).permute(3, 0, 2, 1, 4).unbind(0)


LAYOUTS = {
    "packed": lambda: packed(2, 150),
    "length-innermost": lambda: [
        t.transpose(2, 3).contiguous().transpose(2, 3) for t in tensors(150)
    ],
    "every-other": lambda: [
        torch.stack([t, -t], dim=-1).flatten(-2)[..., ::2] for t in tensors(150)
    ],
    "heads-last": lambda: [
        t.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1) for t in tensors(150)
    ],
    "expanded-batch": lambda: [t.expand(2, -1, -1, -1) for t in tensors(150)],
    "shared-heads": lambda: [
        q if i == 0 else q[:, :1].expand(-1, HEADS, -1, -1) for i, q in enumerate(tensors(150))
    ],
}


@pytest.mark.parametrize("pad", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_in_memory(layout, dtype, pad):
    views = [t if t.dtype == dtype else t.to(dtype) for t in LAYOUTS[layout]()]
    mask = padding(views[0].shape[0], 150, (9,) * views[0].shape[0]) if pad else None
    method = make("kerple_log").to_float64_()
    copies = [t.double().contiguous() for t in views]
    expected = outcome("reference", method, copies, key_padding_mask=mask)
    method = method if dtype == torch.float64 else make("kerple_log")
    found = outcome("chunked", method, views, key_padding_mask=mask)
    assert_same(found, expected, 1e-12 if dtype == torch.float64 else 1e-5)


def test_a_noncontiguous_upstream_gradient():
    method, grads = make("kerple_log"), []
    for impl in ANYWHERE:
        qkv = [t.requires_grad_() for t in tensors(150)]
        out = attend(*qkv, method, impl=impl)
        weights = torch.arange(out.numel(), dtype=torch.float64).sin().view(out.shape[::-1])
        # sum() of a transposed product: strides of the gradient are reversed, or zero.
        ((out.permute(3, 2, 1, 0) * weights).sum() + out.sum()).backward()
        grads.append([t.grad for t in qkv])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("impl", ANYWHERE)
def test_zero_queries_or_an_empty_batch(impl):
    for shape in ({"queries": 0, "keys": 5}, {"queries": 4, "batch": 0}):
        qkv = [t.requires_grad_() for t in tensors(**shape)]
        out = attend(*qkv, make("kerple_log"), impl=impl)
        assert out.shape == qkv[0].shape
        out.sum().backward()
        assert qkv[0].grad.shape == qkv[0].shape


@pytest.mark.parametrize("name", ["kerple_log", "rotary", "kerple_weight"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_around_it(name, reentrant):
    method, results = make(name), []
    for wrapped in (False, True):
        qkv = [t.requires_grad_() for t in tensors(150, dtype=torch.float32)]
        method.zero_grad()
        if wrapped:
            out = checkpoint(attend, *qkv, method, use_reentrant=reentrant)
        else:
            out = attend(*qkv, method)
        out.square().sum().backward()
        results.append([t.grad.clone() for t in (*qkv, *method.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_without_the_private_kernel_the_gradients_are_the_same(monkeypatch):
    """The log-sum-exp comes from an operator that torch may take away."""
    from megatron_patches.attention import chunked

    found = []
    for kernel in (chunked._WITH_LSE, None):
        monkeypatch.setattr(chunked, "_WITH_LSE", kernel)
        method = make("kerple_log")
        q, k, v = (t.requires_grad_() for t in tensors(200, 200, dtype=torch.float32))
        out = attend(q, k, v, method, impl="chunked")
        found.append([out, *torch.autograd.grad(out.sum(), [q, k, v, *method.parameters()])])
    assert chunked._WITH_LSE is None and len(found) == 2
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
