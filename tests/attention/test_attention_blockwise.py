"""Blockwise windows: a query sees its own block of positions and the one before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attention_cases import (
    ANYWHERE,
    Counting,
    Slanted,
    assert_same,
    make,
    outcome,
    padding,
    tensors,
)
from safetensors import safe_open

from megatron_patches.attention import attend
from megatron_patches.attention.problem import Sight
from megatron_patches.attention.windows import Blockwise, Sliding, window_of
from megatron_patches.positions import build

GOLDEN = Path(__file__).parents[1] / "goldens" / "rivals" / "xpos.safetensors"
LENGTH = 333  # chunks of 256 and 128
SIZES = [1, 3, 50, 128, 200, 256, 1000]
METHODS = ["none", "kerple_log", "alibi", "kerple_power_weight", "rotary"]
TIERS = {"positional": Slanted, "content": Counting}
SHAPES = {
    "whole": ((LENGTH,), {}),
    "decode": ((1, 200), {}),
    "offset": ((140, LENGTH), {"query_offset": 77}),
    "pad": ((LENGTH,), {"key_padding_mask": padding(2, LENGTH, (40, -150))}),
    "pad-all": ((150, LENGTH), {"key_padding_mask": padding(2, LENGTH, (LENGTH, -200))}),
}


def by_definition(queries, keys, size, offset=None):
    first = keys - queries if offset is None else offset
    rows = [
        [j <= i and i // size - j // size <= 1 for j in range(keys)]
        for i in range(first, first + queries)
    ]
    return torch.tensor(rows)


def test_the_mask_of_the_paper():
    with safe_open(GOLDEN, "pt") as file:
        theirs = file.get_tensor("h4.base16.blockwise/mask").bool()
    assert torch.equal(Sight(0, Blockwise(8)).visible(48, 48, torch.device("cpu"))[1], theirs)
    assert torch.equal(by_definition(48, 48, 8), theirs)


@pytest.mark.parametrize("size", SIZES)
def test_chunks_share_their_first_key(size):
    for offset in (0, 5, 130):
        sight = Sight(offset, Blockwise(size))
        mask, at = by_definition(150, offset + 150, size, offset), 0
        assert torch.equal(sight.visible(150, offset + 150, torch.device("cpu"))[1], mask)
        for first, last in sight.chunks(150, 64):
            assert first == at and first < last <= first + 64
            at, start = last, sight.first_key(first)
            for query in range(first, last):
                assert mask[query].nonzero().flatten().tolist() == list(
                    range(start, offset + query + 1)
                )
        assert at == 150


@pytest.mark.parametrize("size", [1, 50, 128, 200])
@pytest.mark.parametrize("impl", ANYWHERE)
@pytest.mark.parametrize("name", METHODS)
def test_attention_by_its_definition(name, impl, size):
    """Outputs and all gradients, against scores written out under the mask."""
    method, qkv = make(name).to_float64_(), tensors(LENGTH)
    found = outcome(impl, method, qkv, window=("blockwise", size))
    leaves = [t.detach().requires_grad_() for t in qkv]
    q, k = method.transform(*leaves[:2], torch.arange(LENGTH), total_length=LENGTH)
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).clamp(min=0)
    scores = q @ k.transpose(-1, -2) / 8**0.5
    weight, bias = method.weight(distance), method.bias(distance)
    scores = scores if weight is None else scores * weight
    scores = scores if bias is None else scores + bias
    hidden = ~by_definition(LENGTH, LENGTH, size)
    out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ leaves[2]
    upstream = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64
    )
    wanted = [*leaves, *method.parameters()]
    grads = torch.autograd.grad(out, wanted, upstream, allow_unused=True)
    assert_same(found, (out.detach(), list(grads)), 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [7, 100, 128])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_weight", *TIERS])
def test_chunked_equals_the_reference(name, shape, size, dtype):
    lengths, arguments = SHAPES[shape]

    def method():
        return TIERS[name]() if name in TIERS else make(name)

    qkv = tensors(*lengths, batch=2, dtype=dtype)
    given = {**arguments, "window": ("blockwise", size)}
    expected = outcome("reference", method().to_float64_(), [t.double() for t in qkv], **given)
    exact = dtype == torch.float64
    found = outcome("chunked", method().to_float64_() if exact else method(), qkv, **given)
    assert_same(found, expected, 1e-11 if exact else 1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_a_query_alone_sees_what_it_sees_among_others(name):
    """As with a key/value cache, whose keys begin with the text."""
    method, (q, k, v) = make(name).to_float64_(), tensors(60)
    whole = attend(q, k, v, method, window=("blockwise", 16))
    for end in (1, 16, 17, 33, 60):
        part = (q[:, :, end - 1 : end], k[:, :, :end], v[:, :, :end])
        last = attend(*part, method, window=("blockwise", 16), impl="chunked")
        torch.testing.assert_close(last[:, :, 0], whole[:, :, end - 1], rtol=1e-10, atol=1e-12)


def test_keys_beyond_the_block_before_have_no_say():
    method, (q, k, v) = make("kerple_log", heads=3).to_float64_(), tensors(LENGTH)
    before = attend(q, k, v, method, window=("blockwise", 50))
    k[:, :, :150] = float("nan")
    after = attend(q, k, v, method, window=("blockwise", 50))
    assert torch.equal(
        before[:, :, 200:], after[:, :, 200:]
    )  # of 150 to 199 the block before is hit
    assert after[:, :, 199].isnan().all()


def test_eps_leaves_out_no_more_than_it_may():
    method = build("alibi", heads=3, head_dim=8, hidden_size=24)
    q, k, v = tensors(900, dtype=torch.float32)
    exact = attend(q, k, v, method, impl="chunked", window=("blockwise", 300))
    skipped = attend(q, k, v, method, impl="chunked", window=("blockwise", 300), eps=1e-3)
    assert 0 < (exact - skipped).abs().max() <= 2e-3 * v.abs().max() + 1e-5


@pytest.mark.parametrize("impl", ["flex", "triton"])
def test_others_refuse_it_by_name(impl):
    q, k, v = tensors(8, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"{impl} has sliding windows only, not blockwise"):
        attend(q, k, v, make("alibi"), impl=impl, window=("blockwise", 4))


def test_names_of_windows():
    assert window_of(("sliding", 5)) == window_of(5) == Sliding(5) and window_of(None) is None
    assert window_of(Blockwise(5)) == window_of(("blockwise", 5)) == Blockwise(5)
    q, k, v = tensors(20)
    same = (attend(q, k, v, make("none"), window=w) for w in (5, ("sliding", 5), Sliding(5)))
    assert len({float(out.sum()) for out in same}) == 1
    for wrong, told in (
        (("block", 5), "kind 'block' is none of sliding, blockwise"),
        (("blockwise", 0), "at least 1; got 0"),
        (("blockwise", 1.5), "must be an integer, or a kind"),
        ("blockwise:5", "must be an integer, or a kind"),
    ):
        with pytest.raises(ValueError, match=told):
            attend(q, k, v, make("none"), window=wrong)
