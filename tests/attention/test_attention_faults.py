"""Rare shapes and rare ways of calling, each compared with the dense reference or with rows alone."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call

from megatron_patches.attention import attend
from megatron_patches.attention.selection import _probe_length
from megatron_patches.positions import build, names
from megatron_patches.standalone.model import GPT, ModelShape


def tensors(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3)]


def method_of(name: str, heads: int = 2, **options: object):
    return build(
        name, heads=heads, head_dim=8, hidden_size=8 * heads, max_length=2048, seed=1, **options
    )


def padding(lengths: list[int], keys: int) -> torch.Tensor:
    """Left padding: True before each row's text."""
    return torch.arange(keys) < keys - torch.tensor(lengths)[:, None]


# ---- one query, one head: the view of the table must not be written to -----------------------------


@pytest.mark.parametrize("queries", [1, 129])
def test_padded_rows_of_one_query_do_not_write_into_the_table(queries):
    """A chunk of one query of one head sees a contiguous part of the table itself."""
    q, k, v = tensors(3, 2, 1100, 8)
    method, q = method_of("kerple_log"), q[:, :, -queries:]
    mask = padding([1100, 1000, 1090], 1100)
    found, wanted = (
        attend(q, k, v, method, key_padding_mask=mask, impl=impl)
        for impl in ("chunked", "reference")
    )
    assert torch.allclose(found, wanted, atol=1e-5)


def test_the_float64_backward_of_one_query_more_than_a_chunk():
    q, k, v = tensors(2, 1, 1025, 8, dtype=torch.float64)
    grads = []
    for impl in ("chunked", "reference"):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = attend(*leaves, method_of("alibi", heads=1), impl=impl)
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    for mine, theirs in zip(*grads, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-9)


def test_one_head_under_blocks_of_one_query_more_than_a_chunk():
    q, k, v = tensors(2, 1, 300, 8)
    asked = {"window": ("blockwise", 129), "key_padding_mask": padding([300, 280], 300)}
    method = method_of("kerple_log", heads=1)
    found, wanted = (attend(q, k, v, method, impl=i, **asked) for i in ("chunked", "reference"))
    assert torch.allclose(found, wanted, atol=1e-5)


# ---- left padding shifts positions ----------------------------------------------------------------


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("window", [None, 60])
def test_fire_counts_positions_from_the_start_of_each_text(impl, window):
    """Its threshold is at 20 here, so that positions matter."""
    q, k, v = tensors(3, 2, 90, 8)
    lengths = [90, 55, 1]
    method = method_of("fire", initial_length=20.0)
    assert method.tier == "positional"
    asked = {"window": window, "impl": impl}
    found = attend(q, k, v, method, key_padding_mask=padding(lengths, 90), **asked)
    last = attend(q[:, :, -3:], k, v, method, key_padding_mask=padding(lengths, 90), **asked)
    for row, length in enumerate(lengths):
        alone = attend(*(t[row : row + 1, :, -length:] for t in (q, k, v)), method, **asked)
        assert torch.allclose(found[row, :, -length:], alone[0], atol=1e-5)
        some = min(3, length)
        assert torch.allclose(last[row, :, -some:], alone[0][:, -some:], atol=1e-5)


# ---- functional calls, second derivatives, autocast -----------------------------------------------


@pytest.mark.parametrize("name", ["kerple_log", "fire", "dape", "cope", "ggd_bam_ssmax", "fox"])
def test_gradients_reach_the_parameters_of_a_functional_call(name):
    """As in a step of MAML: other weights than the module's own."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, 50, (2, 1, 30), generator=generator)
    grads = {}
    for impl in ("reference", "chunked"):
        shape = ModelShape(
            layers=1, hidden_size=24, heads=2, vocabulary=50, max_length=40, pos_emb=name,
            init_method_std=0.3, seed=4, attention=impl,
        )  # fmt: skip
        model = GPT(shape)
        fast = {key: p * 1.1 + 0.01 for key, p in model.named_parameters()}
        loss = functional_call(model, fast, (ids, labels))
        grads[impl] = torch.autograd.grad(loss, list(fast.values()), allow_unused=True)
    for key, mine, theirs in zip(fast, grads["chunked"], grads["reference"], strict=True):
        assert (mine is None) == (theirs is None), key
        if mine is not None:
            assert torch.allclose(mine, theirs, atol=1e-5 * float(theirs.abs().max() + 1e-3)), key


@pytest.mark.parametrize("name", ["kerple_log", "cope", "fire"])
def test_second_derivatives_are_refused_where_they_would_be_missing(name):
    leaves = [t.requires_grad_() for t in tensors(1, 2, 20, 8)]
    # Linear in the output of attention: its gradient is a constant.
    loss = attend(*leaves, method_of(name), impl="chunked").sum()
    first = torch.autograd.grad(loss, leaves[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="first derivatives only"):
        first.square().sum().backward()


@pytest.mark.parametrize("name", [n for n in names() if not n.startswith("randomised")])
def test_a_backward_inside_autocast_is_the_one_outside(name):
    method = method_of(name)
    hidden = torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(2))
    asked = {"gates": method.decay(hidden)} if method.gated else {}
    grads = []
    for inside in (False, True):
        leaves = [t.requires_grad_() for t in tensors(1, 2, 40, 8)]
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            loss = attend(*leaves, method, impl="chunked", **asked).square().sum()
            loss.backward(retain_graph=True)
        grads.append([leaf.grad for leaf in leaves])
    for mine, theirs in zip(*grads, strict=True):
        assert mine is not None and theirs is not None and torch.equal(mine, theirs)


# ---- what is under the padding, and devices without numbers --------------------------------------


def test_a_gain_under_the_padding_reaches_nothing():
    method = method_of("cable", form="weighted")
    q, k, v = tensors(2, 2, 30, 8)
    mask = padding([30, 21], 30)
    gain = torch.rand(2, 2, 30, generator=torch.Generator().manual_seed(3)) + 0.5
    decay = -torch.rand(2, 2, 30, generator=torch.Generator().manual_seed(4))
    spoilt = gain.masked_fill(mask[:, None], float("nan"))
    grads = []
    for some in (gain, spoilt):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        gates = (decay, some)
        out = attend(*leaves, method, key_padding_mask=mask, gates=gates)
        out[0].sum().backward()
        out_of_text = out[1, :, -21:]
        assert out_of_text.isfinite().all()
        grads.append([leaf.grad for leaf in leaves])
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)


def test_the_meta_device_has_shapes():
    method = method_of("kerple_log").to("meta")
    q = torch.empty(1, 2, 9, 8, device="meta")
    assert attend(q, q, q, method, impl="reference").shape == q.shape


def test_a_probe_is_no_longer_than_what_can_be_read():
    from megatron_patches.attention.problem import Problem, Sight

    q = torch.zeros(1, 2, 50, 8)
    short, long = method_of("randomised_alibi", span=100), method_of("kerple_log")
    assert _probe_length(Problem(q, q, q, long, 1.0, Sight())) == 200
    assert _probe_length(Problem(q, q, q, short, 1.0, Sight())) == 50
