"""Gates: every implementation against the definition written down token by token in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_patches.attention import attend
from megatron_patches.attention.gates import RUN, Gates
from megatron_patches.attention.problem import Sight
from megatron_patches.attention.reach import first_keys
from megatron_patches.positions import build

KINDS = {
    "fox": ("fox", {}),
    "learned": ("fox", {"gates": "learned"}),
    "fixed": ("fox", {"gates": "fixed"}),
    "cable": ("cable", {}),
    "weighted": ("cable", {"form": "weighted"}),
    "unweighted": ("cable", {"form": "unweighted"}),
}
HEADS, DIM, WIDTH = 3, 8, 24


def method_of(kind: str, strength: float = 20.0):
    """With gates that differ from token to token."""
    name, options = KINDS[kind]
    method = build(name, heads=HEADS, head_dim=DIM, hidden_size=WIDTH, seed=3, **options)
    for key, parameter in method.named_parameters():
        if key.endswith("_weight"):
            parameter.data.mul_(strength)
    return method


def given(keys: int, batch: int = 2, seed: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, HEADS, keys, DIM, generator=generator, dtype=torch.float64)
    return q, k, v, torch.randn(batch, keys, WIDTH, generator=generator, dtype=torch.float64)


def by_definition(q, k, v, x, kind, method, padding=None, window=None) -> Tensor:
    """Loops over queries; formulas from the papers, none of the method's own code."""
    own = dict(method.named_parameters())
    batch, _, keys, _ = k.shape
    logits = torch.zeros(batch, HEADS, keys, dtype=torch.float64)
    for key in ("fgate", "decay"):
        if f"{key}_weight" in own:
            logits = torch.einsum("blc,hc->bhl", x, own[f"{key}_weight"])
        if f"{key}_bias" in own:
            logits = logits + own[f"{key}_bias"][:, None]
    if kind == "fixed":
        times = 2.0 * (128.0 / 2.0) ** (torch.arange(HEADS, dtype=torch.float64) / (HEADS - 1))
        logs = (-1 / times)[None, :, None].expand(batch, -1, keys)
    elif kind in ("fox", "learned"):
        logs = -torch.log(1 + torch.exp(-logits))
    elif kind == "cable":
        logs = -torch.log(1 + torch.exp(logits))
    else:
        logs = -logits.clamp(min=0)
    gain = torch.ones(batch, HEADS, keys, dtype=torch.float64)
    if kind == "weighted":
        gain = torch.log(1 + torch.exp(torch.einsum("blc,hc->bhl", x, own["gain_weight"])))
    seen = torch.ones(batch, keys, dtype=torch.bool) if padding is None else ~padding
    logs = logs * seen[:, None]
    scale = 1.0 if kind == "cable" else 1 / math.sqrt(DIM)
    rows = []
    for i in range(keys):
        first = 0 if window is None else max(0, i - window + 1)
        terms = [logs[:, :, j + 1 : i + 1].sum(-1) for j in range(first, i + 1)]
        scores = (q[:, :, i, None] * k[:, :, first : i + 1]).sum(-1) * scale
        scores = scores + gain[:, :, i, None] * torch.stack(terms, -1)
        visible = seen[:, None, first : i + 1]
        shares = torch.exp(scores - scores.max(-1, keepdim=True).values) * visible
        total = shares.sum(-1, keepdim=True)
        row = (shares[..., None] * v[:, :, first : i + 1]).sum(2)
        rows.append(torch.where(total > 0, row / total.clamp(min=1e-300), 0.0))
    return torch.stack(rows, 2)


def gradients(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), leaves))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["plain", "window", "padding", "both"])
def test_output_and_gradients(kind, what, impl):
    keys = 2 * RUN + 7
    method = method_of(kind).to_float64_()
    leaves = [t.requires_grad_() for t in given(keys)]
    padding = None
    if what in ("padding", "both"):
        padding = torch.zeros(2, keys, dtype=torch.bool)
        padding[0, :9] = True
        padding[1, -5:] = True
        padding[1, 20] = True  # in the middle, too
    window = 17 if what in ("window", "both") else None
    q, k, v, x = leaves
    leaves = [*leaves, *method.parameters()]
    wanted = by_definition(q, k, v, x, kind, method, padding, window)
    if padding is not None:  # what a query under padding gives is not compared
        wanted = wanted.masked_fill(padding[:, None, :, None], 0)
    out = attend(
        q, k, v, method, impl=impl, window=window, key_padding_mask=padding, gates=method.decay(x)
    )
    if padding is not None:
        out = out.masked_fill(padding[:, None, :, None], 0)
    torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
    reached = [leaf for leaf in leaves if leaf is not x or kind not in ("learned", "fixed")]
    for one, other in zip(gradients(out, reached), gradients(wanted, reached), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", ["fox", "weighted"])
@pytest.mark.parametrize("keys", [1, 31, 33, 128, 200, 257, 300, 700])
def test_lengths_about_the_chunks_in_float32(kind, keys):
    """Forward and backward cut queries differently, and yet share the log-sum-exp."""
    method = method_of(kind)
    exact = method_of(kind).to_float64_()
    found = []
    for own, dtype in ((method, torch.float32), (exact, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in given(keys, batch=1)]
        q, k, v, x = leaves
        impl = "chunked" if dtype == torch.float32 else "reference"
        out = attend(q, k, v, own, impl=impl, gates=own.decay(x))
        found.append([out.detach(), *gradients(out.double(), [*leaves, *own.parameters()])])
    for one, other in zip(*found, strict=True):
        largest = other.abs().max().clamp(min=1e-6)
        error = float((one.double() - other).abs().max() / largest)
        assert error < (2e-5 if kind == "fox" else 1e-4)  # gains multiply the rounding


@pytest.mark.parametrize("logit", [3.0, 0.0, -2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_after_sixteen_thousand_tokens(logit, dtype):
    """Sums of log decays reach -36,000; what counts is the difference between neighbours."""
    keys = 16384
    method = build("fox", heads=HEADS, head_dim=DIM, hidden_size=WIDTH, seed=3)
    method.fgate_bias.data.fill_(logit)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, HEADS, 64, DIM, generator=generator).to(dtype)
    k, v = torch.randn(2, 1, HEADS, keys, DIM, generator=generator).to(dtype)
    x = torch.randn(1, keys, WIDTH, generator=generator).to(dtype)
    log_decay, _ = method.decay(x)
    assert log_decay.dtype == torch.float32
    out = attend(q, k, v, method, impl="chunked", gates=(log_decay, None))
    wanted = attend(
        q.double(),
        k.double(),
        v.double(),
        method.to_float64_(),
        impl="reference",
        gates=(log_decay.double(), None),
    )
    error = float((out.double() - wanted).detach().abs().max())
    assert error < (1e-5 if dtype == torch.float32 else 2e-2), error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_a_part_of_the_queries(kind, impl):
    """As a cache has it: the last queries alone give what they give among all."""
    method, (q, k, v, x) = method_of(kind), (t.float() for t in given(90))
    log_decay, gain = method.decay(x)
    whole = attend(q, k, v, method, impl=impl, gates=(log_decay, gain))
    last = slice(83, 90)
    part = None if gain is None else gain[:, :, last]
    alone = attend(q[:, :, last], k, v, method, impl=impl, gates=(log_decay, part))
    torch.testing.assert_close(alone, whole[:, :, last], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["fox", "weighted"])
def test_blockwise_windows(kind):
    """Chunks that end at the borders of blocks, which are no multiples of a run of queries."""
    method = method_of(kind).to_float64_()
    leaves = [t.requires_grad_() for t in given(150)]
    q, k, v, x = leaves
    found = []
    for impl in ("reference", "chunked"):
        out = attend(q, k, v, method, impl=impl, window=("blockwise", 20), gates=method.decay(x))
        found.append([out, *gradients(out, [*leaves, *method.parameters()])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_keys_that_have_faded_away_are_left_out_and_loud_ones_are_not():
    """Nothing changes: their weights are 0 in float32. A key of huge norm keeps its weight for longer."""
    keys, method = 2000, method_of("learned")  # fades to 1/e in 2, 16 and 128 tokens
    q, k, v, x = (t.float() for t in given(keys, batch=1))
    gates = Gates.of(method.decay(x)[0], None, None)
    table = torch.zeros(HEADS, keys)
    first_key = first_keys(q, k, table, None, gates, DIM**-0.5, Sight())
    starts = [first_key(1024, 1280, slice(h, h + 1)) for h in range(HEADS)]
    assert starts == [512, 0, 0]
    assert first_key(1024, 1280, slice(0, HEADS)) == 0
    loud = k.clone()
    loud[:, :, 30] = 300 * q[:, :, 1100] / q[:, :, 1100].norm(dim=-1, keepdim=True)
    first_key = first_keys(q, loud, table, None, gates, DIM**-0.5, Sight())
    assert first_key(1024, 1280, slice(0, 1)) <= 30 + 256
    for given_k in (k, loud):
        exact = method_of("learned").to_float64_()
        wanted = attend(
            q.double(), given_k.double(), v.double(), exact, gates=exact.decay(x.double())
        )
        out = attend(q, given_k, v, method, impl="chunked", gates=method.decay(x))
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("gain", [None, 1e6])
@pytest.mark.parametrize("drop", [-1e4, -1e9])
def test_one_token_that_lets_everything_fade_spoils_no_row_before_it(drop, gain):
    """Rows of the same run differ from their point of reference by all of it."""
    method = method_of("weighted")
    q, k, v, _ = given(3 * RUN + 4)
    fall = torch.rand(q.shape[:3], generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    fall *= -0.1 / (gain or 1.0)
    fall[:, 1, RUN + 20] = drop
    gains = None if gain is None else torch.full_like(fall, gain)
    found = []
    for impl, dtype in (("reference", torch.float64), ("chunked", torch.float32)):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        gates = [None if t is None else t.clone().requires_grad_() for t in (fall, gains)]
        out = attend(*leaves, method, impl=impl, gates=tuple(gates))
        wanted = [*leaves, *(t for t in gates[:1] if gain is None)]
        found.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for exact, rounded in zip(*found, strict=True):
        torch.testing.assert_close(rounded.double(), exact, rtol=2e-5, atol=2e-5)


def test_gates_that_rise_leave_out_nothing():
    """Far keys then weigh more than near ones, which no bound on the content knows of."""
    falling, gain = torch.full((1, HEADS, 600), -3.0), torch.ones(1, HEADS, 600)
    assert Gates.of(falling, gain, None).falls and Gates.of(falling, None, None).falls
    assert not Gates.of(falling, -gain, None).falls
    rising = falling.clone()
    rising[0, 1, 300] = 0.1
    assert not Gates.of(rising, None, None).falls
    method, (q, k, v, _) = method_of("fox"), (t.float() for t in given(600, batch=1))
    method.bias = lambda distance, query_position=None: -distance.float().expand(HEADS, -1, -1)
    method.table = lambda length: -torch.arange(float(length)).expand(HEADS, -1)
    gates = (torch.full((1, HEADS, 600), 1.1), None)
    exact = attend(q, k, v, method, impl="reference", gates=gates)
    for eps in (0.0, 1e-3):
        out = attend(q, k, v, method, impl="chunked", eps=eps, gates=gates)
        torch.testing.assert_close(out, exact, rtol=1e-3, atol=1e-3)


def test_what_lies_under_the_padding_reaches_nothing():
    method, (q, k, v, x) = method_of("weighted"), (t.float() for t in given(40))
    padding = torch.zeros(2, 40, dtype=torch.bool)
    padding[:, :6] = True
    clean = attend(q, k, v, method, key_padding_mask=padding, gates=method.decay(x))
    spoilt = x.clone()
    spoilt[:, :6] = float("nan")
    spoilt.requires_grad_()
    log_decay, gain = method.decay(spoilt)
    out = attend(q, k, v, method, key_padding_mask=padding, gates=(log_decay, gain.nan_to_num(1.0)))
    torch.testing.assert_close(out[:, :, 6:], clean[:, :, 6:])


def test_released_cable_is_fox_turned_round_and_unscaled():
    fox, cable = method_of("fox").to_float64_(), method_of("cable").to_float64_()
    cable.decay_weight.data.copy_(-fox.fgate_weight.data)
    cable.decay_bias.data.copy_(-fox.fgate_bias.data)
    q, k, v, x = given(50)
    ours = attend(q, k, v, cable, gates=cable.decay(x))
    theirs = attend(q * math.sqrt(DIM), k, v, fox, gates=fox.decay(x))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_fixed_gates_are_alibi():
    """exp(-1 / time) for each token: a slope."""
    method = method_of("fixed").to_float64_()
    q, k, v, x = given(50)
    distance = (torch.arange(50)[:, None] - torch.arange(50)).clamp(min=0).double()
    slopes = 1 / torch.tensor([2.0, 16.0, 128.0], dtype=torch.float64)
    scores = q @ k.mT / math.sqrt(DIM) - slopes[:, None, None] * distance
    scores = scores.masked_fill(torch.ones(50, 50).triu(1).bool(), float("-inf"))
    ours = attend(q, k, v, method, gates=method.decay(x))
    torch.testing.assert_close(ours, scores.softmax(-1) @ v, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("gates", ["fixed", "learned"])
@pytest.mark.parametrize("shortest", [1e-3, 1e-30])
def test_gates_that_fade_within_a_token_leave_each_to_itself(shortest, gates, impl):
    """A slope of 1000 and more: e to that power leaves float64, the sum of the slopes does not."""
    sizes = {"heads": HEADS, "head_dim": DIM, "hidden_size": WIDTH}
    method = build("fox", **sizes, gates=gates, shortest=shortest, longest=shortest)
    q, k, v, x = (t.float() for t in given(70))
    slope = torch.tensor(-1 / shortest)
    decay = method.decay(x)[0]
    torch.testing.assert_close(decay, slope.expand(decay.shape))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attend(*leaves, method, gates=(decay, None), impl=impl)
    assert torch.equal(out, v)
    grads = torch.autograd.grad(out.sum(), leaves)
    for grad, wanted in zip(grads, (0.0, 0.0, 1.0), strict=True):
        torch.testing.assert_close(grad, torch.full_like(grad, wanted), rtol=1e-5, atol=1e-5)


def test_gates_that_fade_faster_than_float32_holds_are_refused():
    sizes = {"heads": HEADS, "head_dim": DIM, "hidden_size": WIDTH}
    with pytest.raises(
        ValueError, match="1e-30 <= shortest <= longest must hold, not shortest=1e-39"
    ):
        build("fox", **sizes, gates="fixed", shortest=1e-39)


def test_gates_that_are_missing_or_do_not_fit():
    method, (q, k, v, x) = method_of("weighted"), (t.float() for t in given(10))
    log_decay, gain = method.decay(x)
    with pytest.raises(ValueError, match=r"cable has gates: pass gates=method.decay\(hidden\)"):
        attend(q, k, v, method)
    with pytest.raises(ValueError, match=r"the log decay must be \(2, 3, 10\)"):
        attend(q, k, v, method, gates=(log_decay[:, :, :9], gain))
    with pytest.raises(ValueError, match=r"the gain must be \(2, 3, 4\) .* queries instead"):
        attend(q[:, :, 6:], k, v, method, gates=(log_decay, gain))
    for wrong in (log_decay, (log_decay,), (log_decay, gain, None)):
        with pytest.raises(ValueError, match="gates must be the pair that cable's decay returns"):
            attend(q, k, v, method, gates=wrong)
    with pytest.raises(ValueError, match="the log decay must be .*, got NoneType"):
        attend(q, k, v, method, gates=(None, gain))
    plain = build("alibi", heads=HEADS, head_dim=DIM, hidden_size=WIDTH)
    with pytest.raises(ValueError, match="alibi has no gates"):
        attend(q, k, v, plain, gates=(log_decay, None))
