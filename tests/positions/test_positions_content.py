"""Methods that rewrite scores: against loops over single rows in float64, and where they could break."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from content_rows import row_by_row
from torch import Tensor

from megatron_patches.attention import attend
from megatron_patches.positions import PositionMethod, build
from megatron_patches.positions._slopes import alibi_slopes
from megatron_patches.positions._sums import sum_to_the_end

HEADS, DIM, LENGTH = 3, 4, 40
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stick_breaking": ("stick_breaking", {}),
    "stick_breaking-current": ("stick_breaking", {"current": True}),
    "cope": ("cope", {"positions": 50}),
    "cope-divided-cut": ("cope", {"positions": 6, "divide": True}),
    "dape-kerple": ("dape", {}),
    "dape-alibi": ("dape", {"base": "alibi", "width": 7}),
    "ggd_bam_ssmax": ("ggd_bam_ssmax", {}),
    "ggd_bam_ssmax-content": ("ggd_bam_ssmax", {"scale_prior": False, "learn_loc": True}),
}


def make(case: str, **changes: Any) -> PositionMethod:
    """With random numbers in every parameter, in float32."""
    name, options = CASES[case]
    sizes = {"heads": HEADS, "head_dim": DIM, "hidden_size": HEADS * DIM}
    method = build(name, **sizes, seed=2, **{**options, **changes})
    generator = torch.Generator().manual_seed(8)
    for parameter in method.parameters():
        parameter.data.copy_(torch.rand(parameter.shape, generator=generator) * 1.5 + 0.02)
    return method


def inputs(
    queries: int, keys: int | None = None, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    keys = queries if keys is None else keys
    sizes = [(2, HEADS, length, DIM) for length in (queries, keys, keys)]
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def holes() -> Tensor:
    """The first sample is padded on the left, the second has holes and a padded end."""
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0, :9] = True
    padding[1, [0, 3, 4, 11, 20, 21, 22, 38, 39]] = True
    return padding


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("case", CASES)
def test_hidden_keys_do_not_exist(case, window, padded, impl):
    method, qkv = make(case).to_float64_(), inputs(LENGTH)
    padding = holes() if padded else None
    with torch.no_grad():
        expected = row_by_row(method, qkv, window, padding)
    leaves = [t.requires_grad_() for t in qkv]
    out = attend(*leaves, method, impl=impl, window=window, key_padding_mask=padding)
    known = ~expected.isnan()
    assert known.sum() == (2 * LENGTH - (0 if padding is None else padding.sum())) * HEADS * DIM
    torch.testing.assert_close(out[known], expected[known], rtol=1e-9, atol=1e-11)
    out.square().sum().backward()
    grads = [t.grad for t in (*leaves, *method.parameters())]
    assert out.isfinite().all() and all(g is not None and g.isfinite().all() for g in grads)
    if padding is not None:
        assert not leaves[1].grad.movedim(1, -1)[padding].any()


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("case", CASES)
def test_a_row_without_any_key_is_zero(case, impl):
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0] = True
    method, qkv = make(case), [t.requires_grad_() for t in inputs(LENGTH, dtype=torch.float32)]
    out = attend(*qkv, method, impl=impl, key_padding_mask=padding)
    out.square().sum().backward()
    assert not out[0].any() and out[1].all()
    assert all(t.grad.isfinite().all() for t in (*qkv, *method.parameters()))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("case", CASES)
def test_decoding_step_by_step(case, impl):
    method, (q, k, v) = make(case).to_float64_(), inputs(LENGTH)
    whole = attend(q, k, v, method, impl=impl)
    for i in (0, 1, 17, LENGTH - 1):
        step = (q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1])
        for found in (
            attend(*step, method, impl=impl),
            attend(step[0], k, v, method, impl=impl, query_offset=i),
        ):
            torch.testing.assert_close(found, whole[:, :, i : i + 1], rtol=1e-10, atol=1e-12)


# ---- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_inputs_are_computed_in_float32(case):
    method, qkv = make(case), inputs(300, dtype=torch.bfloat16)
    found = attend(*qkv, method, impl="chunked")
    expected = attend(*[t.float() for t in qkv], method, impl="chunked")
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize("case", CASES)
def test_long_rows_in_float32(case):
    changes = {"positions": 4097} if case == "cope" else {}  # no count is cut
    method, qkv = make(case, **changes), inputs(6, 4096, dtype=torch.float32)
    if case == "cope":  # a learned table has no jumps of its own size from one count to the next
        method.pos_emb.data.copy_(method.pos_emb[..., :1] * torch.linspace(0, 3, 4097))
    found = attend(*qkv, method, impl="chunked").double()
    exact = attend(*[t.double() for t in qkv], method.to_float64_(), impl="chunked")
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


def test_small_weights_at_the_end_of_a_long_row_are_not_lost():
    """The total less the sum before would be wrong by one unit of the total's last place."""
    values = torch.full((4096,), -0.7)
    values[-3:] = torch.tensor([-1e-6, -2e-6, -4e-6])
    exact = torch.tensor([-7e-6, -6e-6, -4e-6])
    torch.testing.assert_close(sum_to_the_end(values)[-3:], exact, rtol=1e-6, atol=0)
    naive = values.sum() - values.cumsum(0)[-4:-1]
    assert not torch.allclose(naive, exact, rtol=0.1, atol=0)
    assert sum_to_the_end(values.bfloat16()).dtype == torch.float32
    weights = torch.randn(2, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(sum_to_the_end, weights)
    assert torch.autograd.gradgradcheck(sum_to_the_end, weights)


@pytest.mark.parametrize("current", [False, True])
def test_stick_breaking_survives_any_score(current):
    """Rows of weights sum to 1 before the softmax does anything."""
    method = build("stick_breaking", heads=1, head_dim=4, hidden_size=4, current=current)
    rows = torch.arange(200)
    distance = rows[:, None] - rows
    for size in (0.0, 3.0, 40.0, 1e4):
        scores = torch.randn(1, 1, 200, 200, generator=torch.Generator().manual_seed(0)) * size
        new = method.score(
            scores,
            distance.clamp(min=0),
            rows,
            query_BHQD=torch.zeros(1, 1, 200, 4),
            visible_QK=distance >= 0,
        )
        assert new.isfinite().all()
        total = new.double().exp().masked_fill(distance < 0, 0.0).sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-4 + 1e-6 * size, atol=0)


# ---- numbers, options ----------------------------------------------------------------------------


@pytest.mark.parametrize("divide", [False, True])
def test_a_fresh_cope_model_has_no_positions(divide):
    sizes = {"heads": HEADS, "head_dim": DIM, "hidden_size": HEADS * DIM, "max_length": 16}
    method, qkv = build("cope", **sizes, divide=divide).to_float64_(), inputs(LENGTH)
    assert method.pos_emb.shape == (1, DIM, 17) and not method.pos_emb.any()
    out = attend(*qkv, method)
    torch.testing.assert_close(out, attend(*qkv, build("none", **sizes)), rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    assert method.pos_emb.grad.any()  # it can leave


def test_where_a_count_is_cut_its_gates_learn_nothing():
    method = build("cope", heads=1, head_dim=1, hidden_size=1, positions=3).to_float64_()
    method.pos_emb.data.copy_(torch.tensor([[[0.0, 1.0, 5.0]]]))
    scores = torch.zeros(1, 1, 1, 7, dtype=torch.float64).requires_grad_()  # every gate is 1 / 2
    new = method.score(
        scores,
        torch.arange(6, -1, -1)[None],
        torch.tensor([6]),
        query_BHQD=torch.ones(1, 1, 1, 1, dtype=torch.float64),
        visible_QK=torch.ones(1, 7, dtype=torch.bool),
    )
    # counts 3.5, 3, 2.5, 2, 1.5, 1, 0.5
    assert new.flatten().tolist() == pytest.approx([5.0, 5.0, 5.0, 5.0, 3.0, 1.0, 0.5])
    far, near = (
        torch.autograd.grad(new[..., j].sum(), scores, retain_graph=True)[0] for j in (2, 4)
    )
    assert far.flatten().tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert near.flatten().tolist() == [0, 0, 0, 0, 1 + 4 * 0.25, 4 * 0.25, 4 * 0.25]


def test_dape_starts_as_its_base_and_pytorchs_layers_do():
    sizes = {"heads": 12, "head_dim": 4, "hidden_size": 48, "seed": 6}
    method, base = build("dape", **sizes), build("kerple_log", **sizes)
    for key, value in base.state_dict().items():
        assert torch.equal(method.state_dict()[key], value)
    assert method.bounds == base.bounds
    shapes = {"mlp2.0.weight": (32, 24), "mlp2.0.bias": (32,), "mlp2.2.weight": (12, 32)}
    for key, shape in shapes.items():
        values, limit = method.get_parameter(key), (24 if ".0." in key else 32) ** -0.5
        assert values.shape == shape and 0.85 * limit < values.abs().max() <= limit
        assert abs(values.mean()) < 0.3 * limit
    assert not torch.equal(
        method.get_parameter("mlp2.0.weight")[0, :12] > 0, base.bias_p.flatten() > 1
    )
    assert sum(p.numel() for p in method.parameters()) == 24 + 1196 - 12
    alibi = build("dape", **sizes, base="alibi")
    assert torch.equal(alibi.slopes, torch.tensor(alibi_slopes(12))) and not alibi.bounds
    assert set(alibi.state_dict()) == {"slopes", *shapes}


@pytest.mark.parametrize("case", ["dape-kerple", "dape-alibi"])
def test_dape_has_no_dead_parameter(case):
    """Of the last bias of its network softmax sees nothing; all that is left has a gradient."""
    method, qkv = make(case).to_float64_(), inputs(LENGTH)
    assert "mlp2.2.bias" not in method.state_dict()
    attend(*qkv, method).square().sum().backward()
    assert all(p.grad.abs().max() > 1e-6 for p in method.parameters())


@pytest.mark.parametrize("case", CASES)
def test_which_methods_mix_heads(case):
    method, (q, k, v) = make(case).to_float64_(), inputs(LENGTH)
    other = q.clone()
    other[:, 0] += 1
    before, after = attend(q, k, v, method), attend(other, k, v, method)
    assert (torch.equal(before[:, 1:], after[:, 1:])) != method.mixes_heads


def test_options_that_make_no_sense():
    sizes = {"heads": 4, "head_dim": 4, "hidden_size": 16}
    for name, options, message in (
        ("cope", {}, "cope needs positions, the size of its table, or max_length"),
        ("cope", {"positions": 1}, "positions=1 must be at least 2"),
        ("dape", {"base": "rpe"}, "base='rpe' is neither 'kerple_log' nor 'alibi'"),
        ("dape", {"width": 0}, "width=0 must be positive"),
        ("dape", {"base": "alibi", "init": "alibi"}, "init='alibi' needs base='kerple_log'"),
        ("dape", {"precision": "as_published"}, "dape has no precision='as_published'"),
        ("dape", {"head_range": (2, 2)}, "dape mixes the scores of all 4 heads"),
    ):
        with pytest.raises(ValueError, match=message):
            build(name, **sizes, **options)
