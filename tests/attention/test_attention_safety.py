"""What must be refused, and what must not leak: the future, the padding, NaN, huge biases."""

from __future__ import annotations

import pytest
import torch
from attention_cases import ANYWHERE, Counting, Slanted, attend, make, outcome, padding, tensors

from megatron_patches import attention
from megatron_patches.attention import IMPLEMENTATIONS
from megatron_patches.attention.windows import Blockwise, Sliding
from megatron_patches.positions import Geometry, PositionMethod, build, names

ATTENTION = [name for name in names() if make(name).place == "attention"]
HAND_MADE = {"positional": Slanted, "content": Counting}


def call(q=None, k=None, v=None, method=None, **arguments):
    given = tensors(5, 7, batch=2, dtype=torch.float32)
    q, k, v = (t if new is None else new for t, new in zip(given, (q, k, v), strict=True))
    return attend(q, k, v, method or make("kerple_log"), **arguments)


def test_a_name_is_no_method():
    with pytest.raises(
        TypeError, match=r"not str: pass megatron_patches.positions.build\('alibi', "
    ):
        attention.attend(*tensors(5, 7, batch=2, dtype=torch.float32), "alibi")


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


REFUSALS = {
    "q without heads": ({"q": zeros(2, 5, 8)}, r"q must be \[batch, heads, length, head_dim\]"),
    "v without heads": ({"v": zeros(2, 7, 8)}, r"v must be \[batch, heads, length, head_dim\]"),
    "dtypes": ({"k": zeros(2, 3, 7, 8).double()}, "k is torch.float64 .*they must agree"),
    "devices": ({"v": zeros(2, 3, 7, 8, device="meta")}, "v is .* on meta.*they must agree"),
    "integers": (
        {
            "q": zeros(2, 3, 5, 8).long(),
            "k": zeros(2, 3, 7, 8).long(),
            "v": zeros(2, 3, 7, 8).long(),
        },
        "q must be float16, bfloat16, float32 or float64, got torch.int64",
    ),
    "values": ({"v": zeros(2, 3, 6, 8)}, "must have the same shape"),
    "batches": ({"q": zeros(1, 3, 5, 8)}, "differ in batch or head dimension"),
    "head dims": ({"q": zeros(2, 3, 5, 4)}, "differ in batch or head dimension"),
    "grouped": (
        {"k": zeros(2, 1, 7, 8), "v": zeros(2, 1, 7, 8)},
        "q has 3 heads, k has 1: repeat the key",
    ),
    "no keys": ({"k": zeros(2, 3, 0, 8), "v": zeros(2, 3, 0, 8)}, "no keys"),
    "more queries": ({"q": zeros(2, 3, 8, 8)}, "8 queries but 7 keys"),
    "offset": ({"query_offset": 3}, r"query_offset 3 .* \[0, 2\]"),
    "negative offset": ({"query_offset": -1}, "query_offset -1"),
    "window": ({"window": 0}, "window .* at least 1; got 0"),
    "mask dtype": (
        {"key_padding_mask": zeros(2, 7)},
        r"key_padding_mask must be boolean .*\[2, 7\]",
    ),
    "mask shape": (
        {"key_padding_mask": zeros(2, 5).bool()},
        r"key_padding_mask must be boolean .*\[2, 7\]",
    ),
    "method heads": ({"method": make("alibi", 4)}, "q has 3 heads, .* built for 4"),
    "method dims": ({"method": make("alibi", 3, 16)}, "head_dim is 8, .* built for 16"),
    "learned table": (
        {"method": build("learned", heads=3, head_dim=8, hidden_size=24, max_length=6)},
        "learned cannot read 7 tokens.*max_length=6",
    ),
    "implementation": ({"impl": "flash"}, "'flash' does not exist; available: auto, reference"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_thing(case):
    arguments, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        call(**arguments)


@pytest.mark.parametrize("impl", ANYWHERE)
@pytest.mark.parametrize("method", [*ATTENTION, *HAND_MADE])
def test_a_named_implementation_runs(method, impl):
    made = HAND_MADE[method]() if method in HAND_MADE else make(method)
    assert call(method=made, impl=impl).isfinite().all()


def test_the_named_implementation_is_the_one_that_runs(monkeypatch):
    from megatron_patches.attention import chunked, reference

    for module in (chunked, reference):
        monkeypatch.setattr(module, "run", lambda problem, m=module: m.__name__)
    assert call(impl="reference").endswith("reference")
    assert call(impl="chunked").endswith("chunked")
    assert set(ANYWHERE) <= set(IMPLEMENTATIONS)


@pytest.mark.parametrize("impl", ANYWHERE)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("method", ["kerple_log", "kerple_power_weight", "rotary", *HAND_MADE])
def test_nothing_under_the_padding_reaches_outputs_or_gradients(method, poison, impl):
    made = HAND_MADE[method]() if method in HAND_MADE else make(method)
    clean = tensors(140, batch=2, dtype=torch.float32)
    mask = padding(2, 140, (20, -30))
    dirty = [t.masked_fill(mask[:, None, :, None], poison) for t in clean]
    expected = outcome(impl, made, clean, key_padding_mask=mask)
    found = outcome(impl, made, dirty, key_padding_mask=mask)
    assert torch.equal(found[0], expected[0])
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)


@pytest.mark.parametrize("impl", ANYWHERE)
@pytest.mark.parametrize("name", ATTENTION)
def test_the_future_has_exactly_no_weight(name, impl):
    """At every place in a chunk: what comes after a query changes nothing, bit for bit."""
    method, (q, k, v) = make(name), tensors(300, dtype=torch.float32)
    whole = attend(q, k, v, method, impl=impl)
    for place in (1, 100, 255, 256, 257, 299):
        later_k, later_v = k.clone(), v.clone()
        later_k[:, :, place:] = 1e4
        later_v[:, :, place:] = -1e30
        changed = attend(q, later_k, later_v, method, impl=impl)
        assert torch.equal(changed[:, :, :place], whole[:, :, :place])


@pytest.mark.parametrize("name", [name for name in ATTENTION if make(name).gated])
def test_later_keys_do_not_show_where_faded_ones_are_left_out(name):
    """A loud later key makes earlier queries of its chunk look further back: at weights of exactly 0."""
    method, (q, k, v) = make(name), tensors(3000, dtype=torch.float32)
    whole = attend(q, k, v, method, impl="chunked")
    later_k = k.clone()
    later_k[:, :, 2900:] = 1e4
    changed = attend(q, later_k, v, method, impl="chunked")
    assert torch.equal(changed[:, :, :2900], whole[:, :, :2900])


@pytest.mark.parametrize("impl", ANYWHERE)
def test_keys_outside_the_window_have_exactly_no_weight(impl):
    method, (q, k, v) = make("kerple_log"), tensors(300, dtype=torch.float32)
    before = attend(q, k, v, method, impl=impl, window=50)
    k[:, :, :200], v[:, :, :200] = 1e4, -1e30
    after = attend(q, k, v, method, impl=impl, window=50)
    assert torch.equal(after[:, :, 249:], before[:, :, 249:])
    assert not torch.equal(after[:, :, 248], before[:, :, 248])


@pytest.mark.parametrize("pad", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_largest_bias_at_16384(dtype, pad):
    """Exponent 2 and a scale of 1 put the first key at -2.7e8: finite, and its weight is zero."""
    method = make("kerple_power", 1, 8)
    with torch.no_grad():
        method.bias_p.fill_(2.0)
        method.bias_a.fill_(1.0)
    keys, first = 16384, 16384 - 20
    qkv = tensors(20, keys, heads=1, dtype=dtype)
    mask = padding(1, keys, (-5,)) if pad else None
    out, grads = outcome("chunked", method, qkv, query_offset=first, key_padding_mask=mask)
    assert out.isfinite().all() and all(g.isfinite().all() for g in grads)
    expected = attend(*[t.double() for t in qkv], method, impl="reference")
    error = float((out.double() - expected).detach().abs().max())
    assert error < {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}[dtype]


@pytest.mark.parametrize("impl", ANYWHERE)
@pytest.mark.parametrize("name", names())
def test_order_of_the_keys_matters_where_the_method_says_so(name, impl):
    """Swapping tokens below the last query changes its output, unless the method acts elsewhere."""
    method, (q, k, v) = make(name).to_float64_(), tensors(60)
    order = torch.randperm(59, generator=torch.Generator().manual_seed(0)).tolist() + [59]
    before = attend(q, k, v, method, impl=impl)[:, :, -1]
    after = attend(q, k[:, :, order], v[:, :, order], method, impl=impl)[:, :, -1]
    difference = (after - before).detach().abs().amax(-1)  # of each head
    positions = torch.arange(4)
    acts = (
        method.tier == "content"
        or method.bias(positions) is not None
        or method.weight(positions) is not None
        or method.transforms
        and not torch.equal(method.transform(q, k, torch.arange(60), total_length=60)[1], k)
    )
    assert (difference > 1e-4).all() if acts else (difference < 1e-12).all()


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("training", [False, True])
def test_autocast_changes_nothing(impl, training):
    """Its rounding inside an implementation would differ between training and evaluation."""
    method = build("kerple_log", heads=2, head_dim=16, hidden_size=32)
    q, k, v = (torch.randn(1, 2, 70, 16).bfloat16() * 4 for _ in range(3))
    with torch.set_grad_enabled(training):
        plain = attend(q, k, v, method, impl=impl)
        with torch.autocast("cpu", torch.bfloat16):
            inside = attend(q, k, v, method, impl=impl)
    assert torch.equal(plain, inside)


def test_the_default_dtype_does_not_matter():
    method = build("kerple_log", heads=2, head_dim=16, hidden_size=32)
    q, k, v = (torch.randn(1, 2, 70, 16, requires_grad=True) for _ in range(3))
    plain = torch.autograd.grad(attend(q, k, v, method).sum(), (q, k, v))
    torch.set_default_dtype(torch.bfloat16)
    try:
        other = torch.autograd.grad(attend(q, k, v, method).sum(), (q, k, v))
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(plain, other, strict=True):
        assert torch.equal(a, b)


def test_a_method_with_gates_is_not_run_without_them():
    class Gated(PositionMethod):
        name = "gated"
        tier = "content"

        def decay(self, hidden):
            raise AssertionError("attention is given what it returns")

    method = Gated(Geometry(heads=2, head_dim=16, hidden_size=32))
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(ValueError, match="gated has gates"):
        attention.attend(q, q, q, method)
    Gated.tier = "table"
    with pytest.raises(ValueError, match="gates go with tier content"):
        attention.attend(q, q, q, method)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"window": 2.5}, "window must be an integer"),
        ({"window": True}, "window must be an integer"),
        ({"window": Sliding(0)}, "window .* at least 1; got 0"),
        ({"window": Blockwise(0)}, "window .* at least 1; got 0"),
        ({"window": (["sliding"], 3)}, r"window kind \['sliding'\] is none of"),
        ({"eps": "1e-6"}, r"eps is a share .*; got '1e-6'"),
        ({"query_offset": 1.0}, "query_offset must be an integer"),
        ({"key_padding_mask": [True]}, "got list"),
    ],
)
def test_wrong_types_are_named(option, message):
    method = build("alibi", heads=2, head_dim=16, hidden_size=32)
    q = torch.randn(1, 2, 5, 16)
    with pytest.raises(ValueError, match=message):
        attend(q, q, q, method, **option)
    with pytest.raises(ValueError, match=r"k must be \[batch, .*got ndarray"):
        attend(q, q.numpy(), q, method)
    with pytest.raises(ValueError, match="heads must be an integer"):
        build("alibi", heads=2.0, head_dim=16, hidden_size=32)
