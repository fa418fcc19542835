"""Triton against the float64 oracle: in its interpreter and, where there is one, on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton_cases
from attention_cases import make

from megatron_patches.positions import names

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

METHODS = [n for n in names() if make(n).place == "attention" and make(n).tier == "table"]
WITH_FORM = [name for name in METHODS if make(name).closed_form() is not None]
Check = Callable[..., Any]


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    with triton_cases.interpreter() as pool:
        yield pool


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def check(request: pytest.FixtureRequest) -> Check:
    """Runs a function of `triton_cases` in the interpreter, or here on the GPU."""
    if request.param == "cuda":
        return lambda work, *args, **options: work(*args, device="cuda", **options)
    pool = request.getfixturevalue("worker")
    return lambda work, *args, **options: pool.submit(work, *args, **options).result()


# A formula in the kernel; a table; a formula and a weight table.
KINDS = {
    "log": ("kerple_log", True),
    "table": ("rpe", True),
    "weighted": ("kerple_power_weight", True),
}
SHAPES: dict[str, dict[str, int]] = {
    "batch": {"queries": 70, "batch": 2},
    "decode": {"queries": 1, "keys": 130},
    "fewer-queries": {"queries": 37, "keys": 133},
    "offset-0": {"queries": 20, "keys": 50, "query_offset": 0},
    "offset-middle": {"queries": 70, "keys": 133, "query_offset": 41},
    "window-1": {"queries": 70, "window": 1},
    "window-40": {"queries": 133, "window": 40},
    "window-too-long": {"queries": 40, "window": 500},
    "window-offset": {"queries": 70, "keys": 150, "query_offset": 50, "window": 20},
}


@pytest.mark.parametrize("length", [1, 17, 127, 128, 129, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_lengths(check, kind, length):
    name, closed_form = KINDS[kind]
    check(triton_cases.parity, name, length, closed_form=closed_form)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes(check, kind, shape):
    name, closed_form = KINDS[kind]
    check(triton_cases.parity, name, closed_form=closed_form, **SHAPES[shape])


@pytest.mark.parametrize("name", METHODS)
def test_every_method(check, name):
    check(triton_cases.parity, name, 45)


@pytest.mark.parametrize("name", WITH_FORM)
def test_the_table_of_a_closed_form(check, name):
    check(triton_cases.parity, name, 45, closed_form=False)


@pytest.mark.parametrize("head_dim", [8, 24, 32, 80, 128])
def test_head_dimensions(check, head_dim):
    check(triton_cases.parity, "kerple_power_weight", 40, heads=1, head_dim=head_dim)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["kerple_log", "rpe", "kerple_weight", "rotary"])
def test_low_precision(check, name, dtype):
    check(triton_cases.parity, name, 200, dtype=dtype, heads=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_low_precision_wide_heads(check, dtype):
    check(triton_cases.parity, "kerple_power_weight", 140, dtype=dtype, heads=1, head_dim=128)


@pytest.mark.parametrize("closed_form", [True, False], ids=["formula", "table"])
@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_weight"])
def test_the_same_bits_twice(check, name, closed_form):
    check(triton_cases.twice_the_same_bits, name, closed_form)


def test_layouts_in_memory(check):
    check(triton_cases.layouts)


# 1e36 times the square of a distance overflows float32: those biases are -inf.
@pytest.mark.parametrize("scale", [1e3, 1e36])
@pytest.mark.parametrize("closed_form", [True, False], ids=["formula", "table"])
@pytest.mark.parametrize("name", ["kerple_power", "kerple_log"])
def test_hugely_negative_bias(check, name, closed_form, scale):
    check(triton_cases.extreme_bias, name, scale, closed_form)


@pytest.mark.parametrize("closed_form", [True, False], ids=["formula", "table"])
@pytest.mark.parametrize("name", ["kerple_log", "alibi", "kerple_weight"])
def test_gradients_of_a_part(check, name, closed_form):
    check(triton_cases.partial_gradients, name, closed_form)


def test_what_is_refused_says_why_and_what_to_do(worker):
    reasons = worker.submit(triton_cases.refusals).result()
    assert reasons.pop("fine") is None
    words = {
        "padding": "key_padding_mask",
        "float64": "float64",
        "head dimension": "160",
        "tier": "content",
    }
    for case, reason in reasons.items():
        assert words[case] in reason and "use chunked" in reason, case


def test_cpu_tensors_are_refused_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = triton_cases.refusals()["fine"]
    assert "GPU" in reason and "use chunked" in reason
