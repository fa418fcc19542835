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

from data_prep.indexed import IndexedDataset
from megatron_patches.config import (
    Config,
    ConfigError,
    batch_arithmetic,
    check_standalone,
    config_sha,
    dump,
)
from megatron_patches.standalone import checkpoint, provenance, runtime
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.data import Samples, build_samples, micro_batches, sources
from megatron_patches.standalone.diagnose import TrainingError, first_cause
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.optimizer import build_engine
from megatron_patches.standalone.runtime import World
from megatron_patches.standalone.schedule import due, learning_rate, save_due
from megatron_patches.standalone.watch import Watch
from megatron_patches.training import position_state


def train(config: Config) -> Path:
    """Train (or continue) the run that `config` describes; returns its folder.

    Starting again with the same configuration continues from the last checkpoint, and does nothing
    when the run is complete.

    Raises:
        ConfigError, DataError, CheckpointError: the run cannot start; nothing was written.
        TrainingError: a loss was NaN or infinite; the message names the tensor where it began.
    """
    check_standalone(config)
    return Trainer(config, runtime.start(config)).run()


class Trainer:
    """One rank of a run: set up in the constructor, then `run`."""

    def __init__(self, config: Config, world: World) -> None:
        self.config, self.world = config, world
        self.batch = batch_arithmetic(config, world.size)
        self.folder = config.save_dir
        self.samples = self._samples("train", config.seq_length, config.train_iters)
        self.validation = self._validation_batches()
        torch.manual_seed(config.seed)
        self.model = GPT(shape_of(config))
        self.parameters = self.model.parameter_count()  # ZeRO 3 leaves nothing to count
        if config.finetune:
            self._load_first_weights()
        self.engine = build_engine(self.model, config, self.batch, world.device)
        self.step = 0
        self.provenance = self._provenance()
        self.consumed_sha = ""  # a chain over all sample numbers read so far, in their order
        self._norm: float | None = None
        self._resume()

    def _samples(self, part: str, length: int, iterations: int) -> Samples:
        return build_samples(self.config, part, length, iterations * self.batch.global_)

    def _provenance(self) -> dict[str, Any]:
        """What a later evaluation or a resumed run must agree with."""
        datasets = [IndexedDataset(prefix) for prefix, _ in sources(self.config, "train")]
        if self.validation:
            held_out = [IndexedDataset(prefix) for prefix, _ in sources(self.config, "valid")]
            provenance.tokenizer_fingerprint([*datasets, *held_out])  # DataError if they differ
        return {
            "engine": "standalone",
            "config_sha": config_sha(self.config),
            "git_sha": provenance.git_sha(),
            "data": provenance.data_fingerprint(datasets),
            "tokenizer": provenance.tokenizer_fingerprint(datasets),
            "parameters": self.parameters,
            "global_batch": self.batch.global_,
            "processes": self.world.size,
            "position": self.model.position_method.settings(),
        }

    def _validation_batches(self) -> list[torch.Tensor]:
        """The same batches at every validation, whatever the step; this rank's share."""
        config = self.config
        if not config.eval_iters or not config.eval_interval or not _has_split(config, "valid"):
            return []
        length = config.seq_length_val or config.seq_length
        asked = (config.train_iters // config.eval_interval + 1) * config.eval_iters
        samples = self._samples("valid", length, asked)
        batches = micro_batches(samples, self.batch.micro, self.world.rank, self.world.size, 0)
        # One of NeoX's evaluation steps is as many micro batches as a training step.
        count = config.eval_iters * self.batch.accumulation
        return [torch.from_numpy(next(batches)[1]) for _ in range(count)]

    def _load_first_weights(self) -> None:
        if config_load := self.config.load:
            step = self.config.iteration
            source = Path(config_load, *(() if step is None else (f"global_step{step}",)))
            checkpoint.check_start(source, self.config)
            checkpoint.load_weights(self.model, source)
        elif not (self.folder / "latest").is_file():
            raise ConfigError(
                f"{self.config.place('finetune')} needs `load`: weights to start from"
            )

    def _resume(self) -> None:
        config = self.config
        here = (self.folder / "latest").is_file()
        source = self.folder if here else None
        if source is None and config.load and not config.finetune:
            source = Path(config.load)
        if source is None:
            return
        if source != self.folder and config.iteration is not None:
            source = source / f"global_step{config.iteration}"
        provenance.check_same_run(source, self.provenance, config.zero_stage)
        client = checkpoint.resume(self.engine, source, config)
        self.step = int(client["iteration"])
        self.consumed_sha = str(client["consumed_sha"])

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> Path:
        config, world = self.config, self.world
        if self.step >= config.train_iters:
            if world.first:
                print(f"{self.folder}: complete at iteration {self.step}, nothing to do")
            return self.folder
        lock = provenance.locked(self.folder) if world.first else nullcontext()
        with lock:
            return self._run()

    def _run(self) -> Path:
        world = self.world
        watch = self._start_watch() if world.first else None
        batches = micro_batches(
            self.samples,
            self.batch.micro,
            world.rank,
            world.size,
            self.step * self.batch.accumulation,
        )
        try:
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
        method = self.model.position_method
        verb = f"continues at iteration {self.step}" if self.step else "starts"
        watch.say(
            f"{self.config.run_id} {verb}: {self.parameters:,} parameters, "
            f"{method.name} shared by {self.config.position_sharing or method.sharing}, "
            f"{self.world.size} process(es) on {self.world.device.type}, {self.config.torch_dtype_name}"
        )
        return watch

    def _loop(self, batches: Iterator[tuple[int, Any]], watch: Watch | None) -> None:
        config = self.config
        tokens_per_step = self.batch.global_ * config.seq_length
        since, losses = time.perf_counter(), []
        while self.step < config.train_iters:
            rate = learning_rate(config, self.step)
            for group in self.engine.optimizer.param_groups:
                group["lr"] = rate
            logged = due(config, config.log_interval, self.step + 1)
            losses.append(self._one_step(batches, logged))
            self.step += 1
            if logged:
                mean = self._mean_loss(torch.stack(losses).mean())
                seconds = time.perf_counter() - since
                statistics = position_state.statistics(self.model.own_methods())
                if watch is not None:
                    watch.step(
                        {
                            "iteration": self.step,
                            "lm_loss": mean,
                            "learning_rate": rate,
                            "gradient_norm": self._gradient_norm(),
                            "tokens": self.step * tokens_per_step,
                            "tokens_per_second": len(losses) * tokens_per_step / seconds,
                            "steps_per_second": len(losses) / seconds,
                            "consumed_sha": self.consumed_sha,
                            **statistics,
                        }
                    )
                since, losses = time.perf_counter(), []
            if self.validation and due(config, config.eval_interval, self.step):
                self._validate(watch, rate)
                since = time.perf_counter()
            if save_due(config, self.step):
                self._save()
                since = time.perf_counter()

    def _one_step(self, batches: Iterator[tuple[int, Any]], measure: bool) -> torch.Tensor:
        """One update; the mean loss of this rank's micro batches."""
        total = torch.zeros((), device=self.world.device)
        for _ in range(self.batch.accumulation):
            first, rows = next(batches)
            self._consume(first)
            text = torch.from_numpy(rows).to(self.world.device)
            loss = self.engine(text[:, :-1], text[:, 1:])
            total += loss.detach()
            # On the CPU reading the loss is free; on a GPU it would stall every micro batch.
            if self.world.device.type == "cpu" and not math.isfinite(loss.item()):
                raise self._failure(text)
            self.engine.backward(loss)
            if measure and self.engine.is_gradient_accumulation_boundary():
                self._measure_gradient()
            self.engine.step()
        position_state.project(self.model.own_methods(), self.engine.optimizer)
        return total / self.batch.accumulation

    def _consume(self, first: int) -> None:
        """Extend the chain by this micro batch of all ranks: the same for any split into ranks."""
        start = first - self.world.rank * self.batch.micro
        for sample in range(start, start + self.batch.micro * self.world.size):
            record = f"{self.consumed_sha} {sample}".encode()
            self.consumed_sha = hashlib.sha256(record).hexdigest()[:16]

    def _mean_loss(self, mean: torch.Tensor) -> float:
        if self.world.size > 1:
            torch.distributed.all_reduce(mean)
            mean /= self.world.size
        value = mean.item()
        if not math.isfinite(value):
            raise self._failure(None)
        return value

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
        for rows in self.validation:
            text = rows.to(self.world.device)
            losses.append(self.engine(text[:, :-1], text[:, 1:]).float())
        self.engine.train()
        mean = self._mean_loss(torch.stack(losses).mean())
        if watch is not None:
            watch.step({"iteration": self.step, "validation_loss": mean}, show=False)
            watch.say(f"{self.config.run_id}  validation loss {mean:.4f} at {self.step}")

    # ---- checkpoints -----------------------------------------------------------------------------

    def _save(self) -> None:
        """Raises TrainingError instead of writing weights that are not finite."""
        weights = [getattr(p, "ds_tensor", p) for p in self.model.parameters()]
        broken = torch.stack([~torch.isfinite(w).all() for w in weights]).any().float()
        if self.world.size > 1:
            torch.distributed.all_reduce(broken)
        if broken.item():
            raise self._failure(None)
        client = {
            "iteration": self.step,
            "consumed_sha": self.consumed_sha,
            "config_sha": config_sha(self.config),
        }
        checkpoint.save(
            self.engine, self.folder, self.step, client, self.config.keep_last_n_checkpoints
        )

    def _failure(self, text: torch.Tensor | None) -> TrainingError:
        if self.config.zero_stage == 3:
            text = None  # there a forward pass needs all ranks
        return TrainingError(
            f"loss is not finite at iteration {self.step + 1} on rank {self.world.rank}: "
            + first_cause(self.model, text)
        )


def _has_split(config: Config, part: str) -> bool:
    return bool(getattr(config, f"{part}_data_paths") or config.data_path)


__all__ = ["ConfigError", "Trainer", "TrainingError", "train"]
