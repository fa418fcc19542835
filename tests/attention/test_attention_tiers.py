"""Methods beyond a table of distances: they run chunk by chunk, recomputed in the backward."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import Counting, Slanted, assert_same, make, outcome, padding, tensors

from megatron_patches.attention import attend, blocks, chunked

TIERS = {"positional": Slanted, "content": Counting}
SHAPES = {
    "short": ((5,), {}),
    "chunks": ((333,), {}),
    "decode": ((1, 200), {}),
    "offset": ((140, 333), {"query_offset": 77}),
    "window": ((333,), {"window": 50}),
    "window-offset": ((140, 333), {"query_offset": 100, "window": 130}),
    "pad": ((300,), {"key_padding_mask": padding(2, 300, (40, -150))}),
    "pad-all-window": ((300,), {"key_padding_mask": padding(2, 300, (300, -150)), "window": 60}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tier", TIERS)
def test_chunked_equals_the_reference(tier, shape, dtype):
    lengths, arguments = SHAPES[shape]
    qkv = tensors(*lengths, batch=2, dtype=dtype)
    exact = TIERS[tier]().to_float64_()
    expected = outcome("reference", exact, [t.double() for t in qkv], **arguments)
    method = exact if dtype == torch.float64 else TIERS[tier]()
    found = outcome("chunked", method, qkv, **arguments)
    assert_same(found, expected, 1e-11 if dtype == torch.float64 else 1e-5)
    assert all(grad is not None and grad.any() for grad in found[1]) or lengths == (1, 200)


@pytest.mark.parametrize(
    ("keys", "budget", "expected"),
    # 4 samples of 3 heads. More rows than the longest piece; all samples, fewer rows; then some samples,
    # with at least 16 rows; one sample with fewer rows; one row that is more than the budget.
    [
        (40, 3 * 40 * 4 * 200, (4, 64)),
        (300, 3 * 300 * 4 * 20, (4, 20)),
        (300, 3 * 300 * 16 * 3, (3, 16)),
        (300, 3 * 300 * 5, (1, 5)),
        (300, 3 * 200, (1, 1)),
    ],
)
@pytest.mark.parametrize("tier", TIERS)
def test_pieces_of_samples_and_rows(monkeypatch, tier, keys, budget, expected):
    monkeypatch.setattr(blocks, "WHOLE_ROWS", budget)
    # A quarter of the piece's rows, or one row.
    monkeypatch.setattr(blocks, "WORKED_ON", 2 * budget)
    assert blocks.whole_rows(4, 3, keys) == expected
    method, qkv = TIERS[tier]().to_float64_(), tensors(min(keys, 60), keys, batch=4)
    arguments = {"key_padding_mask": padding(4, keys, (3, -5, 0, keys)), "window": 25}
    whole = outcome("reference", method, qkv, **arguments)
    assert_same(outcome("chunked", method, qkv, **arguments), whole, 1e-11)


@pytest.mark.parametrize("tier", TIERS)
def test_the_position_of_the_query_counts(tier):
    """Otherwise these methods would prove nothing about the offsets that chunks hand on."""
    q, k, v = tensors(20)
    method = TIERS[tier]().to_float64_()
    early = outcome("reference", method, (q[:, :, :4], k, v), query_offset=0)[0]
    whole = outcome("reference", method, (q, k, v))[0]
    torch.testing.assert_close(whole[:, :, :4], early)
    shifted = outcome("chunked", method, (q[:, :, :4], k[:, :, 6:], v[:, :, 6:]), query_offset=8)[0]
    true = outcome("chunked", method, (q[:, :, :4], k, v), query_offset=14, window=9)[0]
    assert (shifted - true).abs().max() > 1e-3


class Recording(Slanted):
    """Keeps what its transform is told of the length."""

    def transform(self, q, k, positions, *, hidden=None, total_length=None):
        self.told = total_length
        return q, k


def test_the_transform_is_told_the_length_of_each_row():
    method, qkv = Recording(), tensors(3, 12, batch=2, dtype=torch.float32)
    attend(*qkv, method)
    assert method.told == 12 and method.transforms and not Slanted().transforms
    attend(*qkv, method, key_padding_mask=padding(2, 12, (4, -5)))
    assert method.told.tolist() == [8, 7]


@pytest.mark.parametrize(
    ("floats", "rows", "expected"), [(8, 64, 16), (16, 64, 8), (2, 20, 20), (2048, 64, 1)]
)
def test_rows_that_a_method_goes_through_at_a_time(floats, rows, expected):
    """16 heads of 512 keys: what is kept of them fits into 2^20 floats, or it is one row."""
    assert blocks.rows_worked_on(16 * 512, floats, rows) == expected
    assert blocks.rows_worked_on(16 * 512, floats, rows, "cuda") == rows


class Blind(Slanted):
    """Reads the queries, and not their products with the keys."""

    tier = "content"

    def score(self, scores, distance, query_position, *, query_BHQD, visible_QK):
        return query_BHQD.sum(-1, keepdim=True) * distance / 50


def test_weights_that_do_not_depend_on_the_products():
    """No gradient reaches the keys, and the queries have that of the method alone."""
    method, qkv = Blind().to_float64_(), tensors(70, 70)
    whole = outcome("reference", method, qkv)
    found = outcome("chunked", method, qkv)
    assert_same(found, whole, 1e-11)
    assert not found[1][1].any() and found[1][0].any()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threshold", [0.5, 1.0, 100.0, -100.5, 1000.0])
def test_rows_by_distance_and_rows_beyond(monkeypatch, threshold, shape):
    """FIRE: queries below the threshold have a table's bias, and only the others are whole rows."""
    lengths, arguments = SHAPES[shape]
    qkv = tensors(*lengths, batch=2)
    method = make("fire", initial_length=1.0).to_float64_()
    method.L_multiplier.data.fill_(threshold)  # training may carry it below 0
    whole = []
    recomputed = chunked.recomputed
    monkeypatch.setattr(
        chunked, "recomputed", lambda problem: whole.append(problem.queries) or recomputed(problem)
    )
    found = outcome("chunked", method, qkv, **arguments)
    assert_same(found, outcome("reference", method, qkv, **arguments), 1e-11)
    queries, keys = lengths[0], lengths[-1]
    last = arguments.get("query_offset", keys - queries) + queries
    beyond = min(queries, max(0, last - math.ceil(abs(threshold))))
    assert whole == [beyond] * (beyond > 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_threshold_that_is_no_number_is_for_the_whole_rows(value):
    method = make("fire")
    method.L_multiplier.data.fill_(value)
    assert method.rows_by_distance == 0
