"""Checks of the Triton implementation that run anywhere: on a GPU, or in a worker that interprets it.

Triton decides at its first import whether it compiles or interprets, so the interpreter has a process
of its own; what a check raises there is raised again in the test.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from attention_cases import assert_same, make, outcome, tensors
from torch import Tensor

from megatron_patches.attention import attend, triton
from megatron_patches.attention.problem import Problem, Sight
from megatron_patches.attention.windows import window_of
from megatron_patches.positions import PositionMethod

HEADS, HEAD_DIM = 2, 16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
Outcome = tuple[Tensor, list[Tensor | None]]


@contextmanager
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A worker process in which triton interprets its kernels on CPU tensors."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_start_interpreter) as pool:
        yield pool


def _start_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    # NaN and division by zero inside a kernel are numpy's warnings here; a bias may overflow to -inf.
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "overflow encountered")


def problem(qkv: list[Tensor], method: PositionMethod, **sight: Any) -> Problem:
    """What `attend` would hand to the implementation."""
    q, k, v = qkv
    offset = sight.get("query_offset", k.shape[2] - q.shape[2])
    who = Sight(offset, window_of(sight.get("window")), sight.get("key_padding_mask"))
    return Problem(q, k, v, method, 1 / math.sqrt(q.shape[3]), who).transform()


def run(
    qkv: list[Tensor], method: PositionMethod, *, closed_form: bool = True, **sight: Any
) -> Outcome:
    """As `attention_cases.outcome`, of the Triton implementation."""
    leaves = [t.detach().requires_grad_() for t in qkv]
    found = problem(leaves, method, **sight)
    assert triton.refuses(found) is None, triton.refuses(found)
    out = triton.run(found, closed_form=closed_form)
    upstream = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64
    )
    wanted = [*leaves, *(p for p in method.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(out, wanted, upstream.to(out.device, out.dtype), allow_unused=True)
    return out.detach(), list(grads)


def on_cpu(found: Outcome) -> Outcome:
    return found[0].cpu(), [None if g is None else g.cpu() for g in found[1]]


def parity(
    name: str,
    queries: int,
    keys: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    batch: int = 1,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    closed_form: bool = True,
    **sight: Any,
) -> None:
    """Output and all gradients agree with the float64 oracle on the same (rounded) inputs."""
    shape = {"batch": batch, "heads": heads, "head_dim": head_dim}
    qkv = tensors(queries, keys, dtype=dtype, **shape)
    exact = make(name, heads, head_dim).to_float64_()
    expected = outcome("reference", exact, [t.double() for t in qkv], **sight)
    method = make(name, heads, head_dim).to(device)
    found = run([t.to(device) for t in qkv], method, closed_form=closed_form, **sight)
    assert found[0].dtype == dtype
    assert_same(on_cpu(found), expected, TOLERANCE[dtype])


def twice_the_same_bits(name: str, closed_form: bool, device: str = "cpu") -> None:
    length, method = (60 if device == "cpu" else 1000), make(name, HEADS, HEAD_DIM).to(device)
    qkv = [t.to(device) for t in tensors(length, heads=HEADS, head_dim=HEAD_DIM, batch=2)]
    qkv = [t.float() for t in qkv]
    one, two = (run(qkv, method, closed_form=closed_form, window=44) for _ in range(2))
    pairs = zip([one[0], *one[1]], [two[0], *two[1]], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if a is not None)


def layouts(device: str = "cpu") -> None:
    """Views of a packed projection, and an upstream gradient with reversed strides."""
    size = (2, 50, HEADS, 3, HEAD_DIM)
    packed = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    results = []
    for impl in ("triton", "reference"):
        dtype = torch.float32 if impl == "triton" else torch.float64
        leaf = packed.to(device, dtype).requires_grad_()
        q, k, v = leaf.permute(3, 0, 2, 1, 4).unbind(0)
        method = make("kerple_log", HEADS, HEAD_DIM).to(device)
        found = problem([q, k, v], method)
        out = triton.run(found) if impl == "triton" else attend(q, k, v, method, impl=impl)
        weights = torch.arange(out.numel(), dtype=torch.float64).sin().view(out.shape[::-1])
        (out.permute(3, 2, 1, 0) * weights.to(device, dtype)).sum().backward()
        results.append((out.detach().cpu(), [leaf.grad.cpu()]))
    assert_same(*results, 1e-5)


def extreme_bias(name: str, scale: float, closed_form: bool, device: str = "cpu") -> None:
    """Scores of -1e30 and beyond: the query sees itself alone, and no NaN appears anywhere."""
    method = make(name, HEADS, HEAD_DIM).to(device)
    with torch.no_grad():
        method.bias_p.fill_(2.0 if method.closed_form().kind == "power" else scale)
        method.bias_a.fill_(scale if method.closed_form().kind == "power" else 1.0)
    qkv = [t.float().to(device) for t in tensors(100, heads=HEADS, head_dim=HEAD_DIM)]
    out, grads = run(qkv, method, closed_form=closed_form)
    torch.testing.assert_close(out, qkv[2])
    assert all(grad.isfinite().all() for grad in grads)


def partial_gradients(name: str, closed_form: bool, device: str = "cpu") -> None:
    """Whichever tensors are trained, their gradients are those of training everything."""
    method = make(name, HEADS, HEAD_DIM).to(device)
    qkv = [t.float().to(device) for t in tensors(60, heads=HEADS, head_dim=HEAD_DIM)]
    _, everything = run(qkv, method, closed_form=closed_form)
    leaves = [*qkv, *method.parameters()]
    upstream = torch.randn(
        qkv[0].shape, generator=torch.Generator().manual_seed(99), dtype=torch.float64
    ).to(device, torch.float32)
    groups = [[0], [1], [2], *([[3], [0, len(leaves) - 1]] if len(leaves) > 3 else [])]
    for group in groups:
        for index, leaf in enumerate(leaves):
            leaf.requires_grad_(index in group)
        out = triton.run(problem(qkv, method), closed_form=closed_form)
        grads = torch.autograd.grad(out, [leaves[index] for index in group], upstream)
        for index, grad in zip(group, grads, strict=True):
            torch.testing.assert_close(grad, everything[index])
    for leaf in leaves:
        leaf.requires_grad_(False)
    assert not triton.run(problem(qkv, method), closed_form=closed_form).requires_grad


def refusals() -> dict[str, str | None]:
    """Reasons for problems that are refused, and None for one that is not."""
    from attention_cases import Counting, padding

    def reason(
        method: PositionMethod, dtype: Any = torch.float32, dim: int = 8, **sight: Any
    ) -> Any:
        qkv = tensors(5, heads=HEADS, head_dim=dim, dtype=dtype)
        return triton.refuses(problem(qkv, method, **sight))

    log = make("kerple_log", HEADS, 8)
    return {
        "fine": reason(log),
        "padding": reason(log, key_padding_mask=padding(1, 5, (2,))),
        "float64": reason(log, torch.float64),
        "head dimension": reason(make("kerple_log", HEADS, 160), dim=160),
        "tier": reason(Counting(HEADS, 8)),
    }
