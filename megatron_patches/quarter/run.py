"""The whole run: calibrate, fix one number of steps, then train and score one method after another."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_patches.quarter import budget, machine, probe
from megatron_patches.quarter.budget import Clock, Schedule
from megatron_patches.quarter.calibration import Calibration, calibrate
from megatron_patches.quarter.evaluation import HeldOut, evaluate
from megatron_patches.quarter.fitting import Fitted, fit
from megatron_patches.quarter.plan import (
    PlanError,
    PlannedRun,
    QuarterPlan,
    commit_here,
    open_text,
)
from megatron_patches.quarter.results import Results, Watchdog, run_facts, trained_sha
from megatron_patches.quarter.training import use_attention
from megatron_patches.standalone.fingerprints import data_fingerprint
from megatron_patches.standalone.kernels import kernel_rows

RESERVE = 0.02, 2.0  # of the time, and seconds at least, for the last rows
PROBE = 150.0, 0.2  # seconds for one implementation at most, and share of the time


@dataclass(frozen=True)
class Request:
    """What the command line asks for. `toy` has been applied to the plan already."""

    data: Path
    output: Path
    minutes: float
    device: torch.device
    precision: str  # of the weights: "bfloat16" or "float32"
    toy: bool = False
    attention: str | None = None
    peak_tflops: float | None = None
    save_weights: bool = False


class QuarterHour:
    """One run of a plan; `go` returns the number of failed cells."""

    def __init__(
        self, plan: QuarterPlan, request: Request, clock: Clock, say: Callable[[str], None]
    ) -> None:
        """Opens and checks everything; raises PlanError or DataError before anything is written."""
        self.request, self.clock, self.say = request, clock, say
        self.plan = _with_precision(plan, request.precision)
        self.total = 60 * request.minutes
        self.deadline = self.total - max(RESERVE[0] * self.total, RESERVE[1])
        self.peak = machine.peak(request.device, request.precision, request.peak_tflops)
        self.train = open_text(request.data, "train", plan)
        valid = open_text(request.data, "valid", plan)
        self.text = HeldOut.of(valid.tokens, plan)
        if not self.text.windows.longest:
            raise PlanError(f"{request.data}: the held-out text is shorter than every length")
        common = {
            "data": data_fingerprint([valid], self.text.cut(plan)),
            "git_sha": commit_here(plan),
        }
        self.results = Results(request.output, self.plan, common)

    def go(self) -> int:
        request = self.request
        self.results.describe(
            **machine.facts(request.device),
            **machine.set_numerics(),
            precision=request.precision,
            toy=request.toy,
            minutes=request.minutes,
            peak_flops=self.peak,
            git_sha=self.results.common["git_sha"],
        )
        dog = Watchdog(self.total - self.clock.now(), self._last_words)
        try:
            self._go()
        except KeyboardInterrupt:
            self.results.describe(state="interrupted", seconds=self.clock.now())
            raise
        except Exception as error:
            # Nothing more can be measured, and every cell that is left says why.
            self.results.fail_rest(_first_line(error))
            self.results.describe(state="failed", message=str(error), seconds=self.clock.now())
            raise
        finally:
            dog.cancel()
        self.results.describe(state="finished", seconds=self.clock.now())
        return self.results.failed

    def _last_words(self) -> None:
        self.results.fail_rest(f"out of time: the process was ended after {self.total:.0f} s")
        self.results.describe(state="ended at the deadline", seconds=self.clock.now())
        os._exit(1)

    def _go(self) -> None:
        choice = self._choose_attention()
        for line in choice.told():
            self.say(line)
        self.results.describe(attention=choice.names, attention_rejected=choice.rejected)
        calibration = calibrate(self.plan.runs, self.text, choice, self.request.device, self.say)
        planned = self._schedule(calibration)
        self._tell(calibration, planned)
        for number, run in enumerate(self.plan.runs):
            # What earlier methods did not use is shared by the later ones.
            share = (self.deadline - self.clock.now()) / (len(self.plan.runs) - number)
            end = self.clock.now() + share
            scoring = min(planned.evaluation, 0.5 * share)
            self._one(run, calibration, planned.steps, choice, end - scoring, end)

    def _choose_attention(self) -> probe.Choice:
        request, device = self.request, self.request.device
        chain = probe.CHAINS[device.type] if request.attention is None else (request.attention,)
        if device.type == "cuda":
            seconds = min(PROBE[0], PROBE[1] * self.total)
            ask = probe.in_a_child(request.data, device, request.precision, request.toy, seconds)
            return probe.choose(chain, ask)
        shapes, longest = [run.shape for run in self.plan.runs], self.text.windows.longest
        return probe.choose(
            chain, lambda name: probe.faults(shapes, name, device, request.precision, longest)
        )

    def _schedule(self, calibration: Calibration) -> Schedule:
        most = min(budget.most_steps(run, len(self.train.tokens)) for run in self.plan.runs)
        return budget.schedule(
            [calibration.speeds[run.name] for run in self.plan.runs],
            self.deadline - self.clock.now(),
            self.plan.evaluation.lengths,
            self.text.scored,
            most,
        )

    def _tell(self, calibration: Calibration, planned: Schedule) -> None:
        training, now = self.plan.runs[0].training, self.clock.now()
        slowest = max(speed.step for speed in calibration.speeds.values())
        tokens = planned.steps * training.tokens_per_step
        passes = tokens / len(self.train.tokens)
        each = planned.steps * slowest + planned.expected_evaluation
        finish = now + each * len(self.plan.runs)
        self.say(
            f"{planned.steps} steps a method, decided by {planned.limit}: {tokens:,} tokens, "
            f"{passes:.2f} passes over the text; {slowest * 1e3:.1f} ms a step at most, "
            f"{calibration.micro} sequences at once"
        )
        self.say(f"calibrated after {now:.0f} s, to finish after {finish:.0f} of {self.total:.0f}")
        self.results.describe(
            steps=planned.steps,
            steps_decided_by=planned.limit,
            passes=passes,
            micro_batch=calibration.micro,
            calibration={name: vars(speed) for name, speed in calibration.speeds.items()},
            calibration_peak_bytes=calibration.peak_bytes,
            calibrated_after=now,
            expected_finish=finish,
        )

    def _one(
        self,
        run: PlannedRun,
        calibration: Calibration,
        steps: int,
        choice: probe.Choice,
        training_end: float,
        end: float,
    ) -> None:
        """Train and score one model; whatever goes wrong becomes rows of its cells."""
        sha = trained_sha(run, steps)
        self.results.trained(run, step=steps, attention=choice.names["evaluation"], config_sha=sha)
        fields = {
            "config_sha": sha,
            "git_sha": self.results.common["git_sha"],
            "machine": machine.name(self.request.device),
        }
        self.results.describe_run(run, **run_facts(run, self.plan, steps, fields))
        try:
            fitted = fit(
                run,
                self.train,
                steps,
                micro=calibration.micro,
                attention=choice.names["training"],
                device=self.request.device,
                now=self.clock.now,
                end=training_end,
                log=lambda numbers: self.results.log(run, numbers),
            )
        except (RuntimeError, ValueError, ArithmeticError, MemoryError) as error:
            self.say(f"{run.name}: {_first_line(error)}")
            self.results.describe_run(run, failed=_first_line(error))
            self.results.fail_run(run, _first_line(error))
            return
        self._describe(run, steps, fitted)
        model, longest = fitted.model, max(self.plan.evaluation.lengths)
        rows = kernel_rows(model, run.training, steps, longest, run.options)  # type: ignore[arg-type]
        self.results.kernels(rows)
        if self.request.save_weights:
            torch.save(model.state_dict(), self.results.folder / run.name / "weights.pt")
        use_attention(model, choice.names["evaluation"])
        begun, now = self.clock.now(), self.clock.now
        speed = calibration.speeds[run.name]
        evaluate(run, model, self.text, self.plan, speed, self.results, now, end)
        self.results.describe_run(run, evaluation_seconds=now() - begun)
        self.say(f"{run.name}: scored, {now():.0f} of {self.total:.0f} s")

    def _describe(self, run: PlannedRun, steps: int, fitted: Fitted) -> None:
        training = run.training
        rate = steps * training.tokens_per_step / max(fitted.seconds, 1e-9)
        achieved = rate * budget.flops_per_token(run.shape, training.seq_length, training=True)
        facts: dict[str, Any] = {
            "parameters": run.parameters,
            "training_seconds": fitted.seconds,
            "tokens_per_second": rate,
            "tflops": achieved / 1e12,
            "model_flops_utilisation": None if self.peak is None else achieved / self.peak,
            "last_loss": fitted.loss,
            "passes": fitted.passes,
            "peak_bytes": fitted.peak_bytes,
        }
        self.results.describe_run(run, **facts)
        share = f", {achieved / self.peak:.1%} of the device's peak" if self.peak else ""
        self.say(
            f"{run.name}: {steps} steps in {fitted.seconds:.0f} s, {rate:,.0f} tokens/s, "
            f"{achieved / 1e12:.3g} TFLOP/s{share}, loss {fitted.loss:.3f}"
        )


def _with_precision(plan: QuarterPlan, precision: str) -> QuarterPlan:
    """The plan with the weights in another precision; its rows then say so."""
    runs = tuple(replace(r, training=replace(r.training, precision=precision)) for r in plan.runs)
    return replace(plan, runs=runs)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
