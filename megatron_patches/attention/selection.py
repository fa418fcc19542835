"""Which implementations exist, and which one `auto` takes: a table, not code."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from megatron_patches.attention.problem import Problem

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
TOLERANCE = 2e-3  # float32 with TensorFloat-32 products
_trusted: dict[tuple[str, str], bool] = {}
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
            reason = "it is wrong on this device"
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
    """Compare a compiled implementation with the reference on a small problem of this device, once."""
    device = problem.q.device
    if name not in COMPILED or device.type == "cpu":
        return True
    key = (name, str(device))
    if key not in _trusted:
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            shape = (1, problem.q.shape[1], 200, problem.q.shape[3])
            q, k, v = (torch.randn(shape, generator=generator).to(device) for _ in range(3))
            small = Problem(q, k, v, problem.method, problem.scale, type(problem.sight)())
            wanted = implementation("reference").run(small)
            error = float((implementation(name).run(small) - wanted).abs().max())
        _trusted[key] = error < TOLERANCE
        if not _trusted[key]:
            logger.error(
                "attention: %s differs from the reference by %g on %s", name, error, device
            )
    return _trusted[key]
