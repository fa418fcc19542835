"""`flex` against the float64 oracle; what it refuses; how often it compiles; its block lists.

Most tests share kernels, since each takes seconds to compile: three heads of eight, two samples.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from attention_cases import (
    Counting,
    Slanted,
    assert_same,
    make,
    outcome,
    padding,
    tensors,
)
from torch._dynamo.utils import counters

from megatron_patches.attention import attend, flex
from megatron_patches.attention.problem import Problem, Sight
from megatron_patches.positions import names

METHODS = [n for n in names() if make(n).place == "attention" and make(n).tier == "table"]
compiles = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))),
    reason="no C++ compiler",
)

# torch reads .grad of the table when it compiles, and hides the warning unless warnings are errors.
hidden = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not:UserWarning"
)

# The first call of a kernel is "general", 5 x 7 blocks. Sizes that agree there, with each other or with
# the number of heads, would be compiled as one size, and the next shape compiled again.
SHAPES = {
    "general": {"queries": 600, "keys": 850},
    "17": {"queries": 17},
    "128": {"queries": 128},
    "129": {"queries": 129},
    "257": {"queries": 257},
    "offset-0": {"queries": 20, "keys": 50, "query_offset": 0},
    "offset-middle": {"queries": 140, "keys": 333, "query_offset": 77},
    "window-1": {"queries": 257, "window": 1},
    "window-50": {"queries": 333, "window": 50},
    "window-128": {"queries": 300, "window": 128},
    "window-300": {"queries": 512, "window": 300},
    "window-too-long": {"queries": 129, "window": 500},
    "window-offset": {"queries": 140, "keys": 333, "query_offset": 100, "window": 50},
}
PADDED = {
    "general": {"queries": 600, "keys": 850, "pad": (100, -150)},
    "right": {"queries": 257, "pad": (1, 200)},
    "left": {"queries": 129, "pad": (-1, -128)},
    "all": {"queries": 130, "pad": (130, -7)},
    "window-offset": {
        "queries": 140,
        "keys": 333,
        "pad": (333, -150),
        "window": 50,
        "query_offset": 90,
    },
}


def check(
    name: str,
    shape: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    *,
    tolerance: float = 1e-5,
    batch: int = 2,
    head_dim: int = 8,
) -> None:
    keys = shape.get("keys", shape["queries"])
    qkv = tensors(shape["queries"], keys, batch=batch, head_dim=head_dim, dtype=dtype)
    arguments = {key: shape[key] for key in ("window", "query_offset") if key in shape}
    if "pad" in shape:
        arguments["key_padding_mask"] = padding(batch, keys, shape["pad"])
    exact = make(name, head_dim=head_dim).to_float64_()
    with torch.no_grad():
        expected = attend(*(t.double() for t in qkv), exact, impl="reference", **arguments)
        found = attend(*qkv, make(name, head_dim=head_dim), impl="flex", **arguments)
    assert found.dtype == dtype
    assert_same((found, []), (expected, []), tolerance)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_table_method(name):
    check(name, SHAPES["general"])


@compiles
@pytest.mark.slow
def test_shapes():
    for shape in SHAPES.values():
        check("kerple_log", shape)
    for batch in (3, 5):
        check("alibi", SHAPES["offset-middle"], batch=batch)


@compiles
@pytest.mark.slow
def test_padding():
    for shape in PADDED.values():
        check("kerple_log", shape)
    # What lies under the padding is of no consequence, and a row that sees nothing is zero.
    q, k, v = tensors(130, batch=2, dtype=torch.float32)
    mask, method = padding(2, 130, (130, -7)), make("kerple_log")
    with torch.no_grad():
        out = attend(q, k, v, method, impl="flex", key_padding_mask=mask)
        k[mask[:, None].expand(-1, 3, -1)] = float("nan")
        v[mask[:, None].expand(-1, 3, -1)] = float("inf")
        assert torch.equal(attend(q, k, v, method, impl="flex", key_padding_mask=mask), out)
    assert not out[0].any() and not out[1, :, :7].any() and out[1, :, 7:].all()


@compiles
@pytest.mark.slow
def test_one_query_and_another_head_dimension():
    for keys in (500, 300, 90):
        check("kerple_log", {"queries": 1, "keys": keys}, head_dim=80, batch=1)


@compiles
@pytest.mark.slow
def test_bfloat16_has_float32_scores():
    check("kerple_log", SHAPES["general"], torch.bfloat16, tolerance=0.01)
    # A table rounded to bfloat16 would be off by up to 0.25 at these biases.
    q, k, v = tensors(600, 850, batch=2, dtype=torch.bfloat16)
    method = make("alibi")
    with torch.no_grad():
        expected = attend(*(t.double() for t in (q * 0, k, v)), method, impl="reference")
        found = attend(q * 0, k, v, method, impl="flex")
    torch.testing.assert_close(found.double(), expected, rtol=0.008, atol=0.004)


@compiles
@pytest.mark.slow
def test_one_kernel_for_all_lengths():
    lengths = (512, 640, 1000, 1024, 1536, 2048)
    method = make("alibi")
    before = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for length in lengths:
            qkv = tensors(length, dtype=torch.float32)
            attend(*qkv, method, impl="flex")
            packed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv]
            attend(*packed, method, impl="flex", window=length // 3)
    assert counters["stats"]["unique_graphs"] - before <= 1
    check("kerple_log", {"queries": 333}, batch=1)
    # Under no_grad, inputs and parameters that want gradients elsewhere are welcome.
    qkv = [t.requires_grad_() for t in tensors(333, dtype=torch.float32)]
    with torch.no_grad():
        assert not attend(*qkv, make("kerple_log"), impl="flex").requires_grad
    frozen = make("kerple_log").requires_grad_(False)
    assert not attend(*(t.detach() for t in qkv), frozen, impl="flex").requires_grad
    assert counters["stats"]["unique_graphs"] - before <= 1


@hidden
@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_weight"])
def test_gradient_of_the_score_function(name, monkeypatch):
    """FlexAttention's unfused maths stands in for the GPU: it derives the same score function."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex, "refuses", lambda problem: None)
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compiled(f, backend="aot_eager", **kw))
    flex._compiled.cache_clear()
    qkv = tensors(140, 200, batch=2, dtype=torch.float32)
    arguments = {"window": 70, "query_offset": 30, "key_padding_mask": padding(2, 200, (50, -40))}
    exact = make(name).to_float64_()
    expected = outcome("reference", exact, [t.double() for t in qkv], **arguments)
    assert_same(outcome("flex", make(name), qkv, **arguments), expected, 1e-5)
    flex._compiled.cache_clear()


def pairs(counts: torch.Tensor, indices: torch.Tensor) -> set[tuple[int, int]]:
    return {
        (row, int(column))
        for row, count in enumerate(counts[0, 0].tolist())
        for column in indices[0, 0, row, :count]
    }


@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 700), (100, 128), (129, 129), (300, 700)])
@pytest.mark.parametrize("offset", [None, 0, 77])
@pytest.mark.parametrize("window", [1, 50, 128, 257, 700])
def test_block_lists_are_those_of_the_dense_mask(queries, keys, offset, window):
    offset = keys - queries if offset is None else min(offset, keys - queries)

    def visible(b, h, m, n):
        distance = m + offset - n
        return (distance >= 0) & (distance < window)

    made = torch_flex.create_block_mask(visible, None, None, queries, keys, device="cpu")
    partial, full, partial_t, full_t, *_ = flex._blocks(
        queries, keys, offset, window, torch.device("cpu"), separate_full=True
    )
    theirs_full = pairs(made.full_kv_num_blocks, made.full_kv_indices)
    theirs = pairs(made.kv_num_blocks, made.kv_indices) | theirs_full
    assert pairs(*partial) | pairs(*full) == theirs
    # Blocks cut off by the last query cannot be full for torch; here their rows that exist decide.
    assert theirs_full <= pairs(*full)
    assert {row for row, _ in pairs(*full) - theirs_full} <= {(queries - 1) // flex.BLOCK}
    for ours, transposed in ((partial, partial_t), (full, full_t)):
        assert pairs(*ours) == {(row, column) for column, row in pairs(*transposed)}
    together, none, *_ = flex._blocks(
        queries, keys, offset, window, torch.device("cpu"), separate_full=False
    )
    assert pairs(*together) == theirs and not pairs(*none)


def test_block_lists_made_in_inference_mode_serve_training():
    with torch.inference_mode():
        blocks = flex._blocks(11, 13, 2, 5, torch.device("cpu"), separate_full=True)
    assert not any(t.is_inference() for pair in blocks[:4] for t in pair)


def problem(method, dtype=torch.float32, device="cpu", head_dim=8) -> Problem:
    q, k, v = (t.to(device) for t in tensors(4, head_dim=head_dim, dtype=dtype))
    return Problem(q, k, v, method, 0.3, Sight())


def test_refusals():
    with torch.no_grad():
        assert flex.refuses(problem(make("kerple_log"))) is None
        assert "tier positional" in flex.refuses(problem(Slanted()))
        assert "tier content" in flex.refuses(problem(Counting()))
        assert "float64" in flex.refuses(problem(make("none"), torch.float64))
        assert "meta" in flex.refuses(problem(make("none"), device="meta"))
        with pytest.raises(ValueError, match="tier content.*chunked"):
            attend(*tensors(4, dtype=torch.float32), Counting(), impl="flex")


@pytest.mark.parametrize("which", range(4))
def test_gradients_on_a_cpu_are_refused(which):
    method, qkv = make("kerple_log"), tensors(4, dtype=torch.float32)
    method.requires_grad_(which == 3)
    if which < 3:
        qkv[which].requires_grad_()
    with pytest.raises(ValueError, match="no gradients on a CPU.*chunked"):
        attend(*qkv, method, impl="flex")


def test_zero_queries_or_an_empty_batch():
    with torch.no_grad():
        for shape in ({"queries": 0, "keys": 5}, {"queries": 4, "batch": 0}):
            qkv = tensors(**shape, dtype=torch.float32)
            assert attend(*qkv, make("kerple_log"), impl="flex").shape == qkv[0].shape


def on_gpu(method, qkv, **arguments):
    """As attention_cases.outcome, computed on the GPU and handed back on the CPU."""
    leaves, method = [t.cuda().requires_grad_() for t in qkv], method.cuda()
    out = attend(*leaves, method, impl="flex", **arguments)
    generator = torch.Generator().manual_seed(99)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
    grads = torch.autograd.grad(out, [*leaves, *method.parameters()], upstream, allow_unused=True)
    return out.detach().cpu(), [None if g is None else g.cpu() for g in grads]


@hidden
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_gradients_on_a_gpu(name, heads, dtype, tolerance):
    qkv = tensors(300, 400, batch=2, heads=heads, head_dim=32, dtype=dtype)
    exact = [t.double() for t in qkv]
    for arguments in ({}, {"window": 150, "key_padding_mask": padding(2, 400, (90, -130))}):
        expected = outcome("reference", make(name, heads, 32).to_float64_(), exact, **arguments)
        moved = {key: a.cuda() if torch.is_tensor(a) else a for key, a in arguments.items()}
        assert_same(on_gpu(make(name, heads, 32), qkv, **moved), expected, tolerance)


@pytest.mark.gpu
def test_refusals_on_a_gpu():
    for head_dim in (8, 512):
        method = make("kerple_log", head_dim=head_dim)
        assert "head_dim" in flex.refuses(problem(method, device="cuda", head_dim=head_dim))
    torch.use_deterministic_algorithms(True)
    try:
        method = make("kerple_log", head_dim=32)
        assert "order" in flex.refuses(problem(method, device="cuda", head_dim=32))
    finally:
        torch.use_deterministic_algorithms(False)
