"""Which attention runs right on a device, found out in a process of its own: a kernel may crash or hang.

A chain of implementations is tried in order, with and without gradients, for all methods of the plan.
The first that agrees with the reference for every method serves them all, so that speed and rounding
are the same; why the ones before it do not is kept, word for word.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_patches.attention import attend
from megatron_patches.positions import PositionMethod
from megatron_patches.quarter.plan import PlanError, QuarterPlan
from megatron_patches.standalone.shape import ModelShape, position_methods

CHAINS = {"cuda": ("triton", "flex", "chunked"), "cpu": ("chunked",)}
# Of the largest number of a tensor: over many keys outputs are small. Four times what right kernels show.
TOLERANCE = {"float32": 5e-3, "bfloat16": 5e-2}
LENGTHS = (200, 512)  # with rows left over in a tile, and as in training
LAST = 64  # queries of the longest window that are compared
MODES = {"training": True, "evaluation": False}
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_quarter_hour.py"


@dataclass(frozen=True)
class Choice:
    """Per mode ("training", "evaluation") what attends, and why what comes before it does not."""

    names: dict[str, str]
    rejected: dict[str, dict[str, str]]  # mode -> implementation -> reason

    def told(self) -> list[str]:
        lines = []
        for mode, name in self.names.items():
            reasons = "".join(f"; not {k}: {why}" for k, why in self.rejected[mode].items())
            lines.append(f"attention, {mode}: {name}{reasons}")
        return lines


def faults(
    shapes: Sequence[ModelShape], name: str, device: torch.device, precision: str, longest: int
) -> dict[str, str | None]:
    """Mode -> why implementation `name` cannot be used for these models; None where it can.

    `longest`: tokens of the longest window that will be evaluated.
    """
    found: dict[str, str | None] = {}
    for mode, gradients in MODES.items():
        reasons = (_fault(shape, name, device, precision, gradients, longest) for shape in shapes)
        found[mode] = next((reason for reason in reasons if reason is not None), None)
    return found


def _fault(
    shape: ModelShape,
    name: str,
    device: torch.device,
    precision: str,
    gradients: bool,
    longest: int,
) -> str | None:
    method = position_methods(shape)[0].to(device)
    problems = [_Problem(2, length, length) for length in LENGTHS]
    if not gradients and method.max_length is None:
        problems.append(_Problem(1, longest, min(LAST, longest)))
    for problem in problems:
        try:
            found = _outcome(method, name, problem, device, precision, gradients)
        except Exception as error:  # compilers raise whatever they like
            return f"{method.name} at {problem.length}: {_told(error)}"
        wanted = _outcome(method, "reference", problem, device, precision, gradients)
        for what, (a, b) in zip(_WHAT, zip(found, wanted, strict=True), strict=False):
            error_ = float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))
            if not error_ <= TOLERANCE[precision]:  # NaN is a fault
                at = f"{method.name} at {problem.length}"
                return f"{at}: the {what} differs from the reference by {error_:.2g}"
    return None


def _told(error: Exception) -> str:
    """Its first line, and its last one, where compilers say what they mean."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ends = dict.fromkeys([lines[0], lines[-1]]) if lines else {}
    return " ... ".join([type(error).__name__, *(line[:300] for line in ends)])


class _Problem(NamedTuple):
    """Random queries, keys and values; of the longest only the last `compared` queries are compared,
    which the reference can compute alone: causal attention needs no other query for them."""

    batch: int
    length: int
    compared: int


_WHAT = ("output", *(f"gradient of {name}" for name in ("q", "k", "v", *["a parameter"] * 4)))


def _outcome(
    method: PositionMethod,
    name: str,
    problem: _Problem,
    device: torch.device,
    precision: str,
    gradients: bool,
) -> list[Tensor]:
    """Output and, if wanted, all gradients of a random problem, in float32."""
    generator = torch.Generator(device).manual_seed(problem.length)
    size = (problem.batch, method.owned_heads, problem.length, method.head_dim)
    q, k, v, weight = (
        torch.randn(size, generator=generator, device=device).to(getattr(torch, precision))
        for _ in range(4)
    )
    with torch.set_grad_enabled(gradients):
        leaves = [t.requires_grad_(gradients) for t in (q, k, v)]
        leaves += [p for p in method.parameters() if gradients]
        if name == "reference":
            q = q[:, :, -problem.compared :]
        out = attend(q, k, v, method, impl=name)
        if not gradients:
            return [out[:, :, -problem.compared :].float()]
        grads = torch.autograd.grad((out.float() * weight.float()).sum(), leaves)
        return [t.detach().float() for t in (out, *grads)]


Ask = Callable[[str], "dict[str, str | None]"]


def choose(chain: Sequence[str], ask: Ask) -> Choice:
    """Walk down the chain; `ask(name)` is `faults` for one implementation.

    Raises PlanError where nothing is right in some mode.
    """
    names: dict[str, str] = {}
    rejected: dict[str, dict[str, str]] = {mode: {} for mode in MODES}
    for name in chain:
        open_modes = [mode for mode in MODES if mode not in names]
        if not open_modes:
            break
        found = ask(name)
        for mode in open_modes:
            reason = found[mode]
            if reason is None:
                names[mode] = name
            else:
                rejected[mode][name] = reason
    missing = [mode for mode in MODES if mode not in names]
    if missing:
        raise PlanError(
            f"no attention of {', '.join(chain)} runs right here: {rejected[missing[0]]}"
        )
    return Choice(names, rejected)


def in_a_child(data: Path, device: torch.device, precision: str, toy: bool, seconds: float) -> Ask:
    """`ask` in a fresh process, which may crash, or be stopped after `seconds`, without harm."""

    def ask(name: str) -> dict[str, str | None]:
        command = [sys.executable, str(SCRIPT), "probe", "--data", str(data)]
        command += ["--implementation", name, "--device", str(device), "--precision", precision]
        command += ["--toy"] if toy else []
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return dict.fromkeys(MODES, f"no answer within {seconds:.0f} s")
        lines = done.stdout.strip().splitlines()
        try:
            found = json.loads(lines[-1])
            return {mode: found[mode] for mode in MODES}
        except (IndexError, ValueError, KeyError, TypeError):
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return dict.fromkeys(MODES, f"its process ended with code {done.returncode}: {said}")

    return ask


def probe(plan: QuarterPlan, name: str, device: torch.device, precision: str) -> str:
    """What the child prints: `faults` of one implementation as one line of JSON."""
    longest = max(plan.evaluation.lengths)
    return json.dumps(faults([run.shape for run in plan.runs], name, device, precision, longest))
