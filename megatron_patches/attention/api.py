"""`attend`: check the arguments, choose an implementation, run it or say why not.

Shape suffixes used in this package: B batch, H heads, Q queries, K keys, D head dimension, L distances.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor

from megatron_patches.attention.gates import Gates
from megatron_patches.attention.problem import Problem, Sight
from megatron_patches.attention.selection import announce, choose, implementation
from megatron_patches.attention.windows import Window, window_of
from megatron_patches.positions import PositionMethod
from megatron_patches.positions._once import exact

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: PositionMethod,
    *,
    impl: str = "auto",
    query_offset: int | None = None,
    window: int | tuple[str, int] | Window | None = None,
    key_padding_mask: Tensor | None = None,
    transformed: bool = False,
    eps: float = 0.0,
    gates: tuple[Tensor, Tensor | None] | None = None,
) -> Tensor:
    """Causal softmax attention with a position method.

    Args:
        q: queries `[batch, heads, queries, head_dim]`, float16, bfloat16, float32 or float64.
        k, v: keys and values `[batch, heads, keys, head_dim]`, dtype and device of `q`.
        method: what `megatron_patches.positions.build` made for the same number of heads, not its
            name. Its `transform` (rotary) is applied here, its `bias` is added to the scaled scores,
            its `weight` multiplies them. `embed` methods act on the input of the model, so they add
            nothing here.
        impl: `reference` (dense, the oracle), `chunked` (linear memory), `flex` or `triton`
            (compiled), or `auto`. A named implementation runs or raises; it is never replaced.
        query_offset: position of the first query among the keys. Default: the queries are the last
            ones, `keys - queries`.
        window: number of keys a query sees, itself included (`distance < window`), or `("blockwise", b)`: a
            query sees its own block of `b` positions and the one before. Default: all.
        key_padding_mask: boolean `[batch, keys]`, True where a key is padding. A query that sees no
            key at all gets zeros. Queries, keys and values under the padding count as zeros, so
            nothing there, NaN included, can reach an output or a gradient. Distances that follow the
            length of the text (`randomised_*`) follow that of k, padding included.
        transformed: True if `method.transform` was applied already, as in a key/value cache.
        eps: far keys may be left out while they weigh less than this together, for every query; the
            output then differs by at most `2 * eps * max|v|`. 0 leaves out nothing. Saves time where
            a bias falls fast; implementations that cannot skip compute exactly.
        gates: what `method.decay` made of the layer's input: log decays `[batch, heads, keys]` and
            gains `[batch, heads, queries]` or None. Methods with gates need it, others refuse it.

    Returns:
        `[batch, heads, queries, head_dim]` in the dtype of `q`. Scores, tables and normalisation are
        at least float32 whatever that dtype is, under autocast too; a fused kernel may round the
        probabilities to the dtype of `v` before it multiplies them.

    Raises:
        TypeError: `method` is no `PositionMethod`.
        ValueError: shapes, dtypes, devices, head counts or lengths that do not fit; a length beyond
            what the method can read; an implementation that does not exist or cannot do this.

    >>> import torch
    >>> from megatron_patches.positions import build
    >>> method = build("alibi", heads=2, head_dim=8, hidden_size=16)
    >>> q, k, v = torch.randn(3, 1, 2, 10, 8).unbind(0)
    >>> whole = attend(q, k, v, method)
    >>> last = attend(q[:, :, -1:], k, v, method)  # the last query alone, as with a cache
    >>> bool(torch.allclose(whole[:, :, -1:], last, atol=1e-6))
    True
    """
    problem = _check(q, k, v, method, query_offset, window, key_padding_mask, eps)
    problem = replace(problem, gates=_check_gates(problem, gates))
    # Autocast would round scores and tables inside the implementations, and only in some of them.
    with exact(q.device.type):
        return _run(problem, impl, transformed)


def _run(problem: Problem, impl: str, transformed: bool) -> Tensor:
    q, method = problem.q, problem.method
    if impl != "auto":
        reason = implementation(impl).refuses(problem)
        if reason is not None:
            raise ValueError(f"attention implementation {impl!r} cannot do this: {reason}")
    if q.shape[2] == 0 or q.shape[0] == 0:
        return q.clone()  # not a new tensor: it must stay part of the graph
    if not transformed:
        if q.shape[3] != method.head_dim:
            raise ValueError(
                f"head_dim is {q.shape[3]}, the position method was built for {method.head_dim}: "
                "the scores would be scaled wrongly"
            )
        problem = problem.transform()
    name = choose(problem) if impl == "auto" else impl
    announce(name, problem)
    return implementation(name).run(problem)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: PositionMethod,
    query_offset: int | None,
    window: int | tuple[str, int] | Window | None,
    key_padding_mask: Tensor | None,
    eps: float,
) -> Problem:
    if not isinstance(method, PositionMethod):
        named = repr(method) if isinstance(method, str) else "NAME"
        raise TypeError(
            f"method must be a position method, not {_kind(method)}: pass megatron_patches.positions."
            f"build({named}, heads=..., head_dim=..., hidden_size=...)"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 4:
            raise ValueError(
                f"{name} must be [batch, heads, length, head_dim], got {_kind(tensor)}"
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, q is {q.dtype} on {q.device}: "
                "they must agree"
            )
    if q.dtype not in DTYPES:
        raise ValueError(f"q must be float16, bfloat16, float32 or float64, got {q.dtype}")
    if k.shape != v.shape:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must have the same shape")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} differ in batch or head dimension"
        )
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads, k has {k.shape[1]}: repeat the key and value heads of "
            "grouped-query attention before the call"
        )
    _check_method(method, q)
    queries, keys = q.shape[2], k.shape[2]
    seen_within, query_offset = window_of(window), _integer("query_offset", query_offset)
    if keys == 0:
        raise ValueError("there are no keys: k has length 0")
    if queries > keys:
        raise ValueError(
            f"{queries} queries but {keys} keys: causal attention needs the key of every query"
        )
    offset = keys - queries if query_offset is None else query_offset
    if not 0 <= offset <= keys - queries:
        raise ValueError(
            f"query_offset {offset} with {queries} queries and {keys} keys: "
            f"it must lie in [0, {keys - queries}]"
        )
    if not isinstance(eps, Real) or not 0.0 <= eps < 1.0:
        raise ValueError(f"eps is a share of the attention weight, in [0, 1); got {eps!r}")
    if key_padding_mask is not None and (
        not isinstance(key_padding_mask, Tensor)
        or key_padding_mask.device != q.device
        or key_padding_mask.dtype != torch.bool
        or key_padding_mask.shape != (q.shape[0], keys)
    ):
        raise ValueError(
            f"key_padding_mask must be boolean [batch, keys] = [{q.shape[0]}, {keys}] with True at "
            f"padding, on the device of q, got {_kind(key_padding_mask)}"
        )
    if q.shape[1] != method.owned_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads, the position method was built for {method.owned_heads}"
        )
    method.can_read(keys)
    scale = method.score_scale
    if scale is None:
        scale = 1.0 / math.sqrt(method.head_dim)
    first_token = None
    if key_padding_mask is not None and method.tier == "positional":
        first_token = (~key_padding_mask).int().argmax(1)
    sight = Sight(offset, seen_within, key_padding_mask, eps, first_token)
    return Problem(q, k, v, method, scale, sight)


def _check_method(method: PositionMethod, q: Tensor) -> None:
    if method.gated and (method.rewrites_scores or method.tier != "content"):
        raise ValueError(f"{method.name}: gates go with tier content, and without `score`")
    device = next((t.device for t in [*method.parameters(), *method.buffers()]), q.device)
    if device != q.device:
        raise ValueError(f"{method.name} is on {device}, q on {q.device}: move one of them")


def _check_gates(problem: Problem, gates: tuple[Tensor, Tensor | None] | None) -> Gates | None:
    method, q = problem.method, problem.q
    if gates is None:
        if method.gated:
            raise ValueError(
                f"{method.name} has gates: pass gates=method.decay(hidden), from the layer's input"
            )
        return None
    if not method.gated:
        raise ValueError(f"{method.name} has no gates, yet some were passed")
    if not isinstance(gates, tuple | list) or len(gates) != 2:
        raise ValueError(
            f"gates must be the pair that {method.name}'s decay returns, log decays and gains or None, "
            f"got {_kind(gates)}"
        )
    log_decay, gain = gates
    for name, tensor, length in (
        ("log decay", log_decay, problem.keys),
        ("gain", gain, q.shape[2]),
    ):
        shape = (q.shape[0], q.shape[1], length)
        if tensor is None and name == "gain":
            continue
        if not isinstance(tensor, Tensor) or tensor.shape != shape or tensor.device != q.device:
            raise ValueError(
                f"gates: the {name} must be {shape} on {q.device}, got {_kind(tensor)}: "
                "[batch, heads, keys], for the gain queries instead of keys"
            )
    return Gates.of(log_decay, gain, problem.sight.padding, problem.sight.offset)


def _integer(name: str, value: int | None) -> int | None:
    try:
        return None if value is None else operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name} must be an integer, got {value!r}") from error


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    return type(value).__name__
