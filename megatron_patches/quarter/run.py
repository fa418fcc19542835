"""The whole run: calibrate, fix one number of steps, train all methods, then score length by length."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_patches.quarter import budget, machine, probe
from megatron_patches.quarter.batches import Batches, shared_batches
from megatron_patches.quarter.budget import Clock, Schedule
from megatron_patches.quarter.calibration import Calibration, Setting, calibrate
from megatron_patches.quarter.evaluation import HeldOut, Limits, evaluate
from megatron_patches.quarter.plan import PlanError, PlannedRun, QuarterPlan, commit_here, open_text
from megatron_patches.quarter.results import Results, Watchdog, first_line, run_facts, trained_sha
from megatron_patches.quarter.train import Trained, measured, train
from megatron_patches.standalone.fingerprints import data_fingerprint
from megatron_patches.standalone.kernels import kernel_rows
from megatron_patches.standalone.model import GPT

RESERVE = 0.02, 2.0  # of the time, and seconds at least, for the last rows
CALIBRATION = (
    10.0,
    0.05,
)  # seconds of timed steps of all methods together; share of the time at most


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
    """One run of a plan; `go` returns the number of failed cells.

    `lost` counts what else could not be written: kernel rows or weights of a method.
    """

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
        self.text = HeldOut.of(valid.tokens, plan.evaluation)
        if not self.text.windows.longest:
            raise PlanError(f"{request.data}: the held-out text is shorter than every length")
        common = {
            "data": data_fingerprint([valid], self.text.cut(plan)),
            "git_sha": commit_here(plan),
        }
        self.results = Results(request.output, self.plan, common)
        self.lost = 0

    def go(self) -> int:
        request, device = self.request, self.request.device
        self.results.describe(
            **machine.facts(device),
            **machine.set_numerics(),
            precision=request.precision,
            toy=request.toy,
            minutes=request.minutes,
            peak_flops=self.peak,
            git_sha=self.results.common["git_sha"],
            clocks_before=machine.clocks(device),
        )
        if self.peak is None and device.type == "cuda":
            self.say(f"peak of {machine.name(device)} not known: --peak-tflops N gives utilisation")
        dog = Watchdog(self.total - self.clock.now(), self._last_words)
        try:
            self._go()
        except KeyboardInterrupt:
            self.results.describe(state="interrupted", seconds=self.clock.now())
            raise
        except Exception as error:
            # Nothing more can be measured, and every cell that is left says why.
            self.results.keep_traceback("the run", error)
            self.results.fail_rest(first_line(error))
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
        device = self.request.device
        choice = self._choose_attention()
        self.say(choice.told())
        self.results.describe(
            attention=choice.name,
            attention_rejected=choice.rejected,
            probe_seconds=choice.seconds,
        )
        most = min(budget.most_steps(run, len(self.train.tokens)) for run in self.plan.runs)
        begun = self.clock.now()
        batches = shared_batches(self.train, self.plan.runs, most, device)
        building = self.clock.now() - begun
        seconds = min(CALIBRATION[0], CALIBRATION[1] * self.total) / len(self.plan.runs)
        setting = Setting(self.text, batches, choice.name, device, seconds)
        calibration = calibrate(self.plan.runs, setting, self.say, self._give_up)
        runs = [run for run in self.plan.runs if run.name in calibration.speeds]
        if not runs:
            raise PlanError(
                "no method got through the calibration: errors.log in the output has why"
            )
        planned = self._schedule(calibration, most, building)
        self._tell(calibration, planned)
        if planned.steps != most:
            # The order of samples depends on their number. The first ones are not needed any more.
            del batches, setting
            batches = shared_batches(self.train, runs, planned.steps, device)
        models = self._train_all(runs, batches, calibration, planned, choice.name)
        self.results.describe(clocks_after_training=machine.clocks(device))
        self._score_all(models, calibration)
        for run in runs:
            if run.name in models:
                self._write_kernels(run, models[run.name], planned.steps)
        self.results.describe(clocks_after=machine.clocks(device))

    def _choose_attention(self) -> probe.Choice:
        request, device = self.request, self.request.device
        chain = probe.CHAINS[device.type] if request.attention is None else (request.attention,)
        if device.type == "cuda":
            usual = probe.probe_seconds(self.total)
            ask = probe.in_a_child(
                *(request.data, device, request.precision, request.toy),
                self.results.folder / probe.LOG,
                # Never beyond the deadline: a killed parent would leave its child on the device.
                lambda: min(usual, (self.deadline - self.clock.now()) / 2),
            )
        else:
            ask = probe.here(self.plan, device, request.precision, self.results.note)
        return probe.choose(chain, ask)

    def _schedule(self, calibration: Calibration, most: int, building: float) -> Schedule:
        return budget.schedule(
            [*calibration.speeds.values()],
            self.deadline - self.clock.now() - building,
            self.plan.evaluation.lengths,
            self.text.scored,
            most,
            budget.FEWEST_TOY_STEPS if self.request.toy else budget.FEWEST_STEPS,
        )

    def _tell(self, calibration: Calibration, planned: Schedule) -> None:
        training, now = self.plan.runs[0].training, self.clock.now()
        slowest = max(speed.step for speed in calibration.speeds.values())
        tokens = planned.steps * training.tokens_per_step
        passes = tokens / len(self.train.tokens)
        finish = now + sum(planned.training) + planned.expected_evaluation
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
            tokens_per_pass=calibration.pass_tokens,
            calibration={name: vars(speed) for name, speed in calibration.speeds.items()},
            calibration_peak_bytes=calibration.peak_bytes,
            calibrated_after=now,
            expected_finish=finish,
        )

    def _train_all(
        self,
        runs: Sequence[PlannedRun],
        batches: Mapping[str, Batches],
        calibration: Calibration,
        planned: Schedule,
        attention: str,
    ) -> dict[str, GPT]:
        """The trained models by run name. A method that fails costs its own cells alone."""
        models: dict[str, GPT] = {}
        common = {"git_sha": self.results.common["git_sha"]}
        common["machine"] = machine.name(self.request.device)
        for (
            run
        ) in self.plan.runs:  # of those that failed in the calibration `collect` makes rows, too
            sha = trained_sha(run, planned.steps)
            self.results.trained(run, step=planned.steps, attention=attention, config_sha=sha)
            fields = {**common, "config_sha": sha}
            self.results.describe_run(run, **run_facts(run, self.plan, planned.steps, fields))
        for number, run in enumerate(runs):
            end = planned.training_end(number, self.deadline)
            try:
                trained = self._train(run, batches[run.name], calibration, planned, end, attention)
                models[run.name] = trained.model
            except Exception as error:  # compilers and drivers raise whatever they like
                self._give_up(run, error)
            machine.free(self.request.device)
        return models

    def _train(
        self,
        run: PlannedRun,
        batches: Batches,
        calibration: Calibration,
        planned: Schedule,
        end: float,
        attention: str,
    ) -> Trained:
        trained = train(
            run,
            batches,
            planned.steps,
            micro=calibration.micro,
            attention=attention,
            device=self.request.device,
            now=self.clock.now,
            end=end,
            log=lambda numbers: self.results.log(run, numbers),
        )
        self._describe(run, planned.steps, trained)
        return trained

    def _give_up(self, run: PlannedRun, error: Exception) -> None:
        message = first_line(error)
        self.say(f"{run.name}: {message}")
        self.results.keep_traceback(run.name, error)
        self.results.describe_run(run, failed=message)
        self.results.fail_run(run, message)

    def _score_all(self, models: Mapping[str, GPT], calibration: Calibration) -> None:
        """All models at one length before the next one: a run that is cut leaves whole columns."""
        limits = Limits(self.clock.now, self.deadline, calibration.pass_tokens)
        for length in sorted(self.plan.evaluation.lengths):
            for run in [run for run in self.plan.runs if run.name in models]:
                model, speed = models[run.name], calibration.speeds[run.name]
                evaluate(run, model, length, self.text, self.plan, speed, limits, self.results)
            self.say(f"scored at {length}, {self.clock.now():.0f} of {self.total:.0f} s")

    def _write_kernels(self, run: PlannedRun, model: GPT, steps: int) -> None:
        """And the weights, if wanted: after the scores, which nothing here can cost any more."""
        longest, sha = max(self.plan.evaluation.lengths), trained_sha(run, steps)
        try:
            rows = kernel_rows(
                *(model, run.training, steps, longest, run.options),  # type: ignore[arg-type]
                config_sha=sha,
            )
            self.results.kernels(rows)
            if self.request.save_weights:
                torch.save(model.state_dict(), self.results.folder / run.name / "weights.pt")
        except Exception as error:
            self.lost += 1
            self.say(f"{run.name}: no kernel rows or weights: {first_line(error)}")
            self.results.keep_traceback(f"{run.name}, kernel rows and weights", error)
            self.results.describe_run(run, kernels_failed=first_line(error))

    def _describe(self, run: PlannedRun, steps: int, trained: Trained) -> None:
        facts = measured(run, steps, trained, self.peak)
        self.results.describe_run(run, **facts)
        share = (
            f", {facts['model_flops_utilisation']:.1%} of the device's peak" if self.peak else ""
        )
        self.say(
            f"{run.name}: {steps} steps in {trained.seconds:.0f} s, "
            f"{facts['tokens_per_second']:,.0f} tokens/s, {facts['tflops']:.3g} TFLOP/s{share}, "
            f"loss {trained.loss:.3f}"
        )


def _with_precision(plan: QuarterPlan, precision: str) -> QuarterPlan:
    """The plan with the weights in another precision; its rows then say so."""
    runs = tuple(replace(r, training=replace(r.training, precision=precision)) for r in plan.runs)
    return replace(plan, runs=runs)
