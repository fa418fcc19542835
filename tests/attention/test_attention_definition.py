"""The oracle itself: against loops over pairs, torch's own attention, and the authors' numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attention_cases import ANYWHERE, attend, make, padding, tensors
from safetensors.torch import load_file

from megatron_patches.positions import names

GOLDENS = Path(__file__).parents[1] / "goldens" / "kernels"


def number(method, key, head):
    return method.get_parameter(key)[head].item()


# score of one (query, key) pair from the scaled product x, the distance d and head h: typed by hand.
FORMULAS = {
    "none": lambda m, h, x, d: x,
    "kerple_log": lambda m, h, x, d: (
        x - number(m, "bias_p", h) * math.log(1.0 + number(m, "bias_a", h) * d)
    ),
    "kerple_power": lambda m, h, x, d: x - number(m, "bias_a", h) * d ** number(m, "bias_p", h),
    # Three heads: the two slopes of two heads, then the first of four.
    "alibi": lambda m, h, x, d: x - (2.0**-4, 2.0**-8, 2.0**-2)[h] * d,
    "kerple_weight": lambda m, h, x, d: (
        x * math.exp(-number(m, "wei_a", h) * d ** number(m, "wei_p", h))
    ),
    "kerple_power_weight": lambda m, h, x, d: (
        x * math.exp(-number(m, "wei_a", h) * d ** number(m, "wei_p", h))
        - number(m, "bias_a", h) * d ** number(m, "bias_p", h)
    ),
}


def by_pairs(formula, method, q, k, v, offset=0, window=None, hidden=None):
    """Attention one (query, key) pair at a time, in Python's numbers."""
    batch, heads, queries, dim = q.shape
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                weights = {}
                for j in range(offset + i + 1):
                    d = offset + i - j
                    seen = (window is None or d < window) and not (
                        hidden is not None and bool(hidden[b, j])
                    )
                    if seen:
                        x = float(q[b, h, i] @ k[b, h, j]) / math.sqrt(dim)
                        weights[j] = math.exp(formula(method, h, x, d))
                total = sum(weights.values())
                for j, weight in weights.items():
                    out[b, h, i] += weight / total * v[b, h, j]
    return out


@pytest.mark.parametrize("impl", ANYWHERE)
@pytest.mark.parametrize("name", FORMULAS)
def test_against_a_loop_over_pairs(name, impl):
    method = make(name).to_float64_()
    qkv = tensors(12)
    expected = by_pairs(FORMULAS[name], method, *qkv)
    torch.testing.assert_close(attend(*qkv, method, impl=impl), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("impl", ANYWHERE)
def test_masks_and_offsets_against_a_loop_over_pairs(impl):
    method, qkv = make("kerple_log").to_float64_(), tensors(6, 14, batch=2)
    hidden = padding(2, 14, (3, -5))
    # A padded query counts as zeros, as the docstring of `attend` says.
    q = qkv[0].masked_fill(hidden[:, None, 4:10, None], 0.0)
    expected = by_pairs(FORMULAS["kerple_log"], method, q, *qkv[1:], 4, 5, hidden)
    found = attend(*qkv, method, impl=impl, query_offset=4, window=5, key_padding_mask=hidden)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert not found[1, :, 0].any(), "this query sees no key"


@pytest.mark.parametrize("impl", ANYWHERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_none_is_torchs_causal_attention(impl, dtype):
    qkv = tensors(300, batch=2, dtype=dtype)
    expected = F.scaled_dot_product_attention(*qkv, is_causal=True)
    found = attend(*qkv, make("none"), impl=impl)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ANYWHERE)
@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_ap_"])
def test_rows_of_the_authors_code(name, impl):
    """Softmax of the released bias rows, read off as outputs: queries are zero, values one-hot."""
    stored = load_file(GOLDENS / "fork_rows.safetensors")
    heads, length = 12, 64
    method = make(name, heads, 64)
    prefix = next(k for k in stored if k.startswith(f"{name}.attention.")).rpartition(".")[0]
    method.load_state_dict({key: stored[f"{prefix}.{key}"] for key in method.state_dict()})
    row_HL = stored[f"{name}.bias_last_row_{length}"]
    zeros = torch.zeros(1, heads, length, length)
    one_hot = torch.eye(length).expand(1, heads, length, length)
    method.head_dim = length  # the values are as wide as the sequence is long
    found = attend(zeros[:, :, -1:], zeros, one_hot, method, impl=impl)[0, :, 0]
    torch.testing.assert_close(found, torch.softmax(row_HL.float(), -1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "kerple_power"])
def test_alibis_shortcut_by_key_position_holds_for_alibi_alone(name):
    """A row of key positions in place of distances: equal where the bias is linear, only there."""
    qkv, method = tensors(40), make(name).to_float64_()
    table_HL = method.table(40)
    by_key_HK = table_HL.flip(-1)  # the last query's row, used for every query
    future = torch.ones(40, 40, dtype=torch.bool).triu(1)
    mask = by_key_HK[:, None, :].expand(-1, 40, -1).masked_fill(future, float("-inf"))
    shortcut = F.scaled_dot_product_attention(*qkv, attn_mask=mask[None])
    difference = float((attend(*qkv, method) - shortcut).detach().abs().max())
    assert difference < 1e-12 if name == "alibi" else difference > 0.1


@pytest.mark.parametrize("name", names())
def test_prefill_and_blocks_equal_one_pass(name):
    """A key/value cache as the model keeps it: transformed keys, blocks of 7, 1, 2 and 4."""
    method, (q, k, v) = make(name).to_float64_(), tensors(14, batch=2)
    method.planned_length = 14
    whole = attend(q, k, v, method, impl="reference")
    cached = method.cache == "transformed"
    keys, values, outs, length = [], [], [], 0
    for block in (7, 1, 2, 4):
        part = slice(length, length + block)
        length += block
        new_q, new_k = q[:, :, part], k[:, :, part]
        if cached:
            positions = torch.arange(part.start, part.stop)
            new_q, new_k = method.transform(new_q, new_k, positions, total_length=length)
        keys.append(new_k)
        values.append(v[:, :, part])
        out = attend(new_q, torch.cat(keys, 2), torch.cat(values, 2), method, transformed=cached)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, 2), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", names())
def test_the_transform_is_applied_at_true_positions(name):
    """Without a cache of transformed keys: any block of queries equals its rows of the whole."""
    method, (q, k, v) = make(name).to_float64_(), tensors(150)
    whole = attend(q, k, v, method, impl="reference")
    for impl in ANYWHERE:
        part = attend(q[:, :, 40:90], k, v, method, impl=impl, query_offset=40)
        torch.testing.assert_close(part, whole[:, :, 40:90], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", names())
def test_lengths_in_any_order_equal_fresh_objects(name):
    used = make(name)
    for length in (512, 4096, 512, 1000):
        qkv = tensors(3, length, dtype=torch.float32)
        if used.max_length is not None and length > used.max_length:
            with pytest.raises(ValueError, match=f"cannot read {length} tokens"):
                attend(*qkv, used)
        else:
            assert torch.equal(attend(*qkv, used), attend(*qkv, make(name)))
