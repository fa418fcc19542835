"""Training: NeoX's samples and schedule, DeepSpeed's engine, our model."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from megatron_patches.config import Config, ConfigError, check_standalone, dump
from megatron_patches.standalone import checkpoint, provenance, runtime
from megatron_patches.standalone.data import micro_batches
from megatron_patches.standalone.diagnose import TrainingError
from megatron_patches.standalone.run_state import RunState
from megatron_patches.standalone.schedule import due, learning_rate, save_due
from megatron_patches.standalone.signals import Interrupted, Signals
from megatron_patches.standalone.watch import Watch
from megatron_patches.training import position_state


def train(config: Config, signals: Signals | None = None) -> Path:
    """Train (or continue) the run that `config` describes; returns its folder.

    Starting again with the same configuration continues from the last whole checkpoint, and does
    nothing when the run is complete. docs/reliability.md says what is guaranteed. `signals`, already
    entered, is for a caller that has more to do under it; without, this call is the whole context.

    Raises:
        ConfigError, DataError: the run cannot start; nothing was written.
        CheckpointError: no checkpoint can be resumed from, or a new one cannot be written.
        TrainingError: a watchdog stopped the run; the message names rank, iteration and tensor.
        Interrupted: SIGTERM or SIGUSR1 arrived, and a checkpoint was saved.
    """
    check_standalone(config)
    with nullcontext(signals) if signals is not None else Signals() as asked:
        return Trainer(config, runtime.start(config), asked).run()


class Trainer(RunState):
    """One rank of a run: set up in the constructor, then `run`."""

    def run(self) -> Path:
        config, world = self.config, self.world
        if self.step >= config.train_iters:
            if world.first:
                if self.broken:
                    with provenance.locked(self.folder):
                        self._set_aside()
                print(f"{self.folder}: complete at iteration {self.step}, nothing to do")
            return self.folder
        lock = provenance.locked(self.folder) if world.first else nullcontext()
        with lock:
            try:
                return self._run()
            except Interrupted:
                # DeepSpeed's launcher ends the other ranks as soon as one has left.
                if world.size > 1:
                    torch.distributed.barrier()
                raise

    def _run(self) -> Path:
        watch = self._start_watch() if self.world.first else None
        batches = micro_batches(
            self.samples,
            self.batch.micro,
            self.world.rank,
            self.world.size,
            self.step * self.batch.accumulation,
        )
        try:
            with self.heart:
                self._loop(batches, watch)
        finally:
            if watch is not None:
                watch.close()
        return self.folder

    def _start_watch(self) -> Watch:
        self.folder.mkdir(parents=True, exist_ok=True)
        provenance.write_text(self.folder / "config.yml", dump(self.config))
        provenance.write_json(self.folder / "run.json", self.provenance | self.world.machine())
        watch = Watch(self.config, self.folder, self.step)
        if self.broken:
            self._set_aside()
        for name, why in self.broken.items():
            event = {"event": "broken checkpoint", "name": name, "message": why}
            watch.step({"iteration": self.step, **event}, show=False)
        method = self.model.position_method
        verb = f"continues at iteration {self.step}" if self.step else "starts"
        watch.say(
            f"{self.config.run_id} {verb}: {self.parameters:,} parameters, "
            f"{method.name} shared by {self.config.position_sharing or method.sharing}, "
            f"{self.world.size} process(es) on {self.world.device.type}, {self.config.torch_dtype_name}"
        )
        return watch

    def _set_aside(self) -> None:
        checkpoint.set_aside(self.folder, self.folder / f"global_step{self.step}", self.broken)

    def _loop(self, batches: Iterator[tuple[int, Any]], watch: Watch | None) -> None:
        try:
            self._steps(batches, watch)
        except (TrainingError, checkpoint.CheckpointError):
            raise
        except RuntimeError as error:
            gone = self.heart.gone() if self.world.size > 1 and _of_a_collective(error) else []
            if not gone:
                raise
            raise self.guard.failure(self.step + 1, "; ".join(gone)) from error

    def _steps(self, batches: Iterator[tuple[int, Any]], watch: Watch | None) -> None:
        config = self.config
        first, since = self.step, time.perf_counter()
        while self.step < config.train_iters:
            rate = learning_rate(config, self.step)
            for group in self.engine.optimizer.param_groups:
                group["lr"] = rate
            logged = due(config, config.log_interval, self.step + 1)
            self.losses.append(self._one_step(batches, logged))
            self.step += 1
            if logged:
                self._log(watch, rate, self.step - first, time.perf_counter() - since)
                first, since = self.step, time.perf_counter()
            if self.validation and due(config, config.eval_interval, self.step):
                self._validate(watch, rate)
                first, since = self.step, time.perf_counter()
            if save_due(config, self.step):
                self.save()
                first, since = self.step, time.perf_counter()
            if self.step < config.train_iters:
                self._stop_when_asked()

    def _log(self, watch: Watch | None, rate: float, steps: int, seconds: float) -> None:
        own = torch.stack(self.losses).mean()
        mean = self.guard.mean(self.step, own)
        tokens_per_step = self.batch.global_ * self.config.seq_length
        statistics = position_state.statistics(self.model.own_methods())
        if watch is not None:
            watch.step(
                {
                    "iteration": self.step,
                    "lm_loss": mean,
                    "learning_rate": rate,
                    "gradient_norm": self._gradient_norm(),
                    "tokens": self.step * tokens_per_step,
                    "tokens_per_second": steps * tokens_per_step / seconds,
                    "steps_per_second": steps / seconds,
                    "consumed_sha": self.consumed_sha,
                    **statistics,
                }
            )
        self.guard.logged(self.step, mean, own)
        self.losses = []

    def _stop_when_asked(self) -> None:
        """Between two steps, on all ranks after the same one."""
        asked = self.signals.asked if self.signals is not None else None
        if not self.agreed(asked is not None):
            return
        if self.saved != self.step:
            self.save()
        raise Interrupted(
            f"{asked or 'a signal on another rank'}: {self.folder} is saved at iteration "
            f"{self.step} of {self.config.train_iters}; the same command continues"
        )

    def _one_step(self, batches: Iterator[tuple[int, Any]], measure: bool) -> torch.Tensor:
        """One update; the mean loss of this rank's micro batches."""
        total = torch.zeros((), device=self.world.device)
        now = self.step + 1
        position_state.begin(self.model.own_methods(), self.step)
        for micro in range(self.batch.accumulation):
            self.heart.beat(now, "reading data", micro)
            first, rows = next(batches)
            self._consume(first)
            self._check_tokens(
                rows, f"samples {first} to {first + len(rows) - 1} of the training text"
            )
            text = torch.from_numpy(rows).to(self.world.device)
            self.heart.beat(now, "forward pass", micro)
            loss = self.engine(text[:, :-1], text[:, 1:])
            total += loss.detach()
            # On the CPU reading the loss is free; on a GPU it would stall every micro batch.
            if self.world.device.type == "cpu" and not math.isfinite(loss.item()):
                raise self.guard.not_finite(now, [self.world.rank], text)
            self.heart.beat(now, "backward pass", micro)
            self.engine.backward(loss)
            if measure and self.engine.is_gradient_accumulation_boundary():
                self._measure_gradient()
            self.heart.beat(now, "update", micro)
            self.engine.step()
        position_state.project(self.model.own_methods(), self.engine.optimizer)
        return total / self.batch.accumulation

    def _consume(self, first: int) -> None:
        """Extend the chain by this micro batch of all ranks: the same for any split into ranks."""
        self.guard.read(self.step + 1, first)
        start = first - self.world.rank * self.batch.micro
        for sample in range(start, start + self.batch.micro * self.world.size):
            record = f"{self.consumed_sha} {sample}".encode()
            self.consumed_sha = hashlib.sha256(record).hexdigest()[:16]

    def _measure_gradient(self) -> None:
        """The norm over all parameters, before clipping, where DeepSpeed does not keep it itself."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self._norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else None

    def _gradient_norm(self) -> float | None:
        norm = self.engine.get_global_grad_norm()  # ZeRO and half precision
        return self._norm if norm is None else float(norm)

    @torch.no_grad()
    def _validate(self, watch: Watch | None, rate: float) -> None:
        self.engine.eval()
        losses = []
        for number, rows in enumerate(self.validation):
            self.heart.beat(self.step, "validation", number)
            text = rows.to(self.world.device)
            losses.append(self.engine(text[:, :-1], text[:, 1:]).float())
        self.engine.train()
        mean = self.guard.mean(self.step, torch.stack(losses).mean())
        if watch is not None:
            watch.step({"iteration": self.step, "validation_loss": mean}, show=False)
            watch.say(f"{self.config.run_id}  validation loss {mean:.4f} at {self.step}")


def _of_a_collective(error: RuntimeError) -> bool:
    """What gloo and NCCL raise when another rank is gone; gloo's errors have no class of their own."""
    words = ("gloo", "nccl", "peer", "socket", "timed out")
    text = str(error).lower()
    return isinstance(error, torch.distributed.DistError) or any(word in text for word in words)


__all__ = ["ConfigError", "Trainer", "TrainingError", "train"]
