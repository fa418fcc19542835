"""Which implementations exist, and which one `auto` takes: a table, not code."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from megatron_patches.attention.problem import Problem, Sight

logger = logging.getLogger(__name__)

# Each is a module of this package, loaded when first used: some need optional packages.
IMPLEMENTATIONS = ("reference", "chunked", "flex", "triton")

# (device, gradients wanted) -> what `auto` tries, in this order. `chunked` refuses nothing.
PREFERENCES: dict[tuple[str, bool], tuple[str, ...]] = {
    ("cpu", False): ("chunked",),
    ("cpu", True): ("chunked",),
    ("cuda", False): ("triton", "chunked"),
    ("cuda", True): ("triton", "chunked"),
}
ELSEWHERE = ("chunked",)

# Kernels compiled for a device are compared with the reference on it once, before `auto` trusts them.
COMPILED = frozenset({"flex", "triton"})
# Relative to the largest number; float32 may multiply in TensorFloat-32.
TOLERANCE = {torch.float32: 5e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-9}
_trusted: dict[tuple[str, str, str, str, bool], bool] = {}
_announced: set[tuple[str, str, str, str]] = set()


class Implementation(Protocol):
    """What a module of an implementation offers."""

    def refuses(self, problem: Problem) -> str | None:
        """Why it cannot solve this problem, with what to do instead; None if it can."""

    def run(self, problem: Problem) -> Tensor:
        """`out_BHQD` in the dtype of `problem.q`."""


def implementation(name: str) -> Implementation:
    """Raises ValueError for a name that does not exist."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"attention implementation {name!r} does not exist; available: auto, "
            + ", ".join(IMPLEMENTATIONS)
        )
    return cast(Implementation, import_module(f"megatron_patches.attention.{name}"))


def preferences(device_type: str, gradients: bool) -> tuple[str, ...]:
    """What `auto` tries on a device, in order."""
    return PREFERENCES.get((device_type, gradients), ELSEWHERE)


def choose(problem: Problem) -> str:
    """The implementation that `auto` stands for here; logged once for each new combination."""
    for name in preferences(problem.q.device.type, problem.needs_gradient):
        reason = implementation(name).refuses(problem)
        if reason is None and not _is_trusted(name, problem):
            reason = "it does not run right on this device"
        if reason is None:
            break
        _announce(f"not {name} ({reason})", problem)
    return name


def announce(name: str, problem: Problem) -> None:
    """Log once which implementation runs which method on which device in which dtype."""
    _announce(name, problem)


def _announce(what: str, problem: Problem) -> None:
    key = (what, problem.method.name, problem.q.device.type, str(problem.q.dtype))
    if key not in _announced:
        _announced.add(key)
        logger.info("attention: %s for %s on %s in %s", *key)


def _is_trusted(name: str, problem: Problem) -> bool:
    """Compare a compiled implementation with the reference on this device, once for each kind.

    A kind is a method's class, dtype and need of gradients. A kernel that does not compile here is not
    trusted either; a named implementation would raise instead.
    """
    device = problem.q.device
    if name not in COMPILED or device.type == "cpu":
        return True
    kind = (name, str(device), problem.method.name, str(problem.q.dtype), problem.needs_gradient)
    if kind not in _trusted:
        try:
            error = max(
                float((a - b).abs().max() / b.abs().max().clamp(min=1.0))
                for a, b in zip(_probe(name, problem), _probe("reference", problem), strict=True)
            )
        except Exception as fault:  # compilers raise whatever they like
            logger.error("attention: %s does not run on %s: %s", name, device, fault)
            error = float("inf")
        _trusted[kind] = error < TOLERANCE[problem.q.dtype]
        if not _trusted[kind] and error != float("inf"):
            logger.error(
                "attention: %s differs from the reference by %g on %s", name, error, device
            )
    return _trusted[kind]


def _probe_length(problem: Problem) -> int:
    """200 tokens, or as many as the problem has where the method cannot read that many now."""
    try:
        problem.method.can_read(200)
        problem.method.stretch(200)
    except ValueError:
        return problem.keys
    return 200


def _probe(name: str, problem: Problem) -> list[Tensor]:
    """Output and, if wanted, gradients of a small random problem with the method at hand."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, problem.q.shape[1], _probe_length(problem), problem.q.shape[3])
    wanted = problem.needs_gradient
    q, k, v = (
        torch.randn(shape, generator=generator).to(problem.q.device, problem.q.dtype)
        for _ in range(3)
    )
    leaves = [t.requires_grad_(wanted) for t in (q, k, v)]
    out = implementation(name).run(Problem(q, k, v, problem.method, problem.scale, Sight()))
    if not wanted:
        return [out.float()]
    return [t.float() for t in (out, *torch.autograd.grad(out.float().sum(), leaves))]
