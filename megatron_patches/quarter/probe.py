"""Which attention runs right on a device, found out in a process of its own: a kernel may crash or hang.

A chain of implementations is tried in order, with and without gradients, for all methods of the plan.
The first that agrees with the reference for every method serves them all, in training and evaluation,
so that speed and rounding are the same; why the ones before it do not is kept, word for word.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
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
# With rows left over in a tile, and as in training. Both are multiples of 16, as all lengths of a run
# are: triton compiles a kernel anew for numbers that are not.
LENGTHS = (208, 512)
LAST = 64  # queries of the longest window that are compared
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_quarter_hour.py"
LONGEST_PROBE, PROBE_SHARE = 150.0, 0.2  # seconds for one implementation, and of the whole time
SHORTEST_PROBE = 90.0  # compilers need as long; kept wherever it is no more than half of the time
LOG = "probe.log"


@dataclass(frozen=True)
class Choice:
    """What attends; why what comes before it in the chain does not; seconds that each took to try."""

    name: str
    rejected: dict[str, str]
    seconds: dict[str, float]

    def told(self) -> str:
        reasons = "".join(f"; not {name}: {why}" for name, why in self.rejected.items())
        spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.seconds.items())
        return f"attention: {self.name}{reasons} (tried: {spent})"


def probe_seconds(total: float) -> float:
    """How long one implementation may take, of a run of `total` seconds."""
    usual = max(PROBE_SHARE * total, min(SHORTEST_PROBE, total / 2))
    return min(LONGEST_PROBE, usual)


def faults(
    shapes: Sequence[ModelShape],
    name: str,
    device: torch.device,
    precision: str,
    longest: int,
    note: Callable[[str], object] = lambda text: None,
) -> str | None:
    """Why implementation `name` cannot be used for these models; None where it can.

    `longest`: tokens of the longest window that will be evaluated. `note` gets the traceback of an error.
    """
    for shape in shapes:
        method = position_methods(shape)[0].to(device)
        for problem in _problems(method, longest):
            at = f"{method.name} at {problem.length}"
            try:
                found = _outcome(method, name, problem, device, precision)
            except Exception as error:  # compilers raise whatever they like
                note(f"{name}, {at}\n{traceback.format_exc()}")
                return f"{at}: {_told(error)}"
            wanted = _outcome(method, "reference", problem, device, precision)
            for what, a, b in zip(_WHAT, found, wanted, strict=False):
                wrong = float((a - b).abs().max() / b.abs().max().clamp(min=1e-3))
                if not wrong <= TOLERANCE[precision]:  # NaN is a fault
                    return f"{at}: the {what} differs from the reference by {wrong:.2g}"
    return None


def _problems(method: PositionMethod, longest: int) -> list[_Problem]:
    """Training with all gradients, and scoring without any."""
    found = [_Problem(2, length, length, True) for length in LENGTHS]
    if method.max_length is None:
        found.append(_Problem(1, longest, min(LAST, longest), False))
    else:
        found.append(_Problem(2, LENGTHS[-1], LENGTHS[-1], False))
    return found


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
    gradients: bool


_WHAT = ("output", *(f"gradient of {name}" for name in ("q", "k", "v", *["a parameter"] * 4)))


def _outcome(
    method: PositionMethod,
    name: str,
    problem: _Problem,
    device: torch.device,
    precision: str,
) -> list[Tensor]:
    """Output and, if wanted, all gradients of a random problem, in float32."""
    gradients = problem.gradients
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


@dataclass(frozen=True)
class Answer:
    """`fault` is None for an implementation that is right; `timed_out`: nobody knows."""

    fault: str | None
    seconds: float = 0.0
    timed_out: bool = False


Ask = Callable[[str], Answer]


def choose(chain: Sequence[str], ask: Ask) -> Choice:
    """Walk down the chain to the first that is right. Raises PlanError where none is."""
    rejected: dict[str, str] = {}
    seconds: dict[str, float] = {}
    late = []
    for name in chain:
        answer = ask(name)
        seconds[name] = answer.seconds
        if answer.fault is None:
            return Choice(name, rejected, seconds)
        rejected[name] = answer.fault
        late += [name] if answer.timed_out else []
    if late:
        raise PlanError(
            f"{', '.join(late)} did not answer in time, which says nothing about right or wrong: more "
            f"--minutes, or the same command again, when compilers find their caches full. {rejected}"
        )
    raise PlanError(f"no attention of {', '.join(chain)} runs right here: {rejected}")


def here(
    plan: QuarterPlan, device: torch.device, precision: str, note: Callable[[str], object]
) -> Ask:
    """`ask` in this process, for a device on which nothing is compiled."""

    def ask(name: str) -> Answer:
        begun = time.perf_counter()
        longest = max(plan.evaluation.lengths)
        shapes = [run.shape for run in plan.runs]
        fault = faults(shapes, name, device, precision, longest, note)
        return Answer(fault, time.perf_counter() - begun)

    return ask


def in_a_child(
    data: Path,
    device: torch.device,
    precision: str,
    toy: bool,
    log: Path,
    seconds: Callable[[], float],
) -> Ask:
    """`ask` in a fresh process, which may crash, or be stopped after `seconds()`, without harm.

    All that it writes to stderr, tracebacks among it, is appended to `log`.
    """

    def ask(name: str) -> Answer:
        command = [sys.executable, str(SCRIPT), "probe", "--data", str(data)]
        command += ["--implementation", name, "--device", str(device), "--precision", precision]
        command += ["--toy"] if toy else []
        limit, begun = seconds(), time.perf_counter()
        with open(log, "a+", encoding="utf-8") as told, tempfile.TemporaryFile("w+") as said:
            told.write(f"---- {name}, at most {limit:.0f} s\n")
            told.flush()
            start = told.tell()
            code = _watched(command, said.fileno(), told.fileno(), limit)
            spent = time.perf_counter() - begun
            if code is None:
                return Answer(f"no answer within {limit:.0f} s", spent, timed_out=True)
            said.seek(0)
            told.seek(start)
            return Answer(_read(said.read(), told.read(), code), spent)

    return ask


def _watched(command: Sequence[str], out: int, err: int, limit: float) -> int | None:
    """The exit code, or None for a process that was stopped, with all that it had started."""
    child = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
    try:
        return child.wait(max(0.01, limit))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _read(said: str, told: str, code: int) -> str | None:
    """The fault in the last line of a child's output, or what its end says."""
    try:
        found = json.loads(said.strip().splitlines()[-1])["fault"]
        if found is None or isinstance(found, str):
            return found
    except (IndexError, ValueError, KeyError, TypeError):
        pass
    last = (told.strip().splitlines() or ["no message"])[-1]
    return f"its process ended with code {code}: {last}"


def probe(plan: QuarterPlan, name: str, device: torch.device, precision: str) -> str:
    """What the child prints: the fault of one implementation, or null, as one line of JSON."""

    def note(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    return json.dumps({"fault": here(plan, device, precision, note)(name).fault})
