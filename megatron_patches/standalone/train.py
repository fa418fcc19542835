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
    Batch,
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
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.runtime import World
from megatron_patches.standalone.schedule import learning_rate
from megatron_patches.standalone.watch import Watch


class TrainingError(RuntimeError):
    """The run cannot go on: a loss or a tensor is not finite."""


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


def parameter_groups(model: GPT, config: Config) -> list[dict[str, Any]]:
    """NeoX's rule: matrices decay, biases and norms do not. Position parameters decay only on request.

    Position parameters form groups of their own: they stay float32 when the rest is bfloat16.
    """
    decay = config.weight_decay
    special = {id(p) for p in model.position_parameters()}
    position = decay if config.position_weight_decay else 0.0
    groups: dict[tuple[str, float], list[torch.nn.Parameter]] = {}
    for module in model.modules():
        plain = isinstance(module, torch.nn.LayerNorm)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in special:
                continue
            rate = 0.0 if plain or name == "bias" else decay
            members = groups.setdefault((str(parameter.dtype), rate), [])
            if all(parameter is not member for member in members):
                members.append(parameter)
    found = [{"params": params, "weight_decay": rate} for (_, rate), params in groups.items()]
    if special:
        found.append({"params": model.position_parameters(), "weight_decay": position})
    return found


def deepspeed_settings(config: Config, batch: Batch) -> dict[str, Any]:
    """The part of the configuration that DeepSpeed reads itself."""
    settings: dict[str, Any] = {
        "train_batch_size": batch.global_,
        "train_micro_batch_size_per_gpu": batch.micro,
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_clipping": config.gradient_clipping,
        "zero_optimization": config.zero_optimization or {"stage": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,  # the progress display prints
        "wall_clock_breakdown": config.wall_clock_breakdown,
    }
    if config.is_bf16:
        settings["bf16"] = {"enabled": True}
        # DeepSpeed accumulates float32 gradients of bfloat16 weights under ZeRO only.
        wide = {"grad_accum_dtype": "fp32"} if config.zero_stage else None
        if config.data_types or wide:
            settings["data_types"] = config.data_types or wide
    if config.is_fp16:
        given = config.fp16 or {}
        settings["fp16"] = {k: v for k, v in given.items() if k not in ("type", "fp16")}
        settings["fp16"]["enabled"] = True
    return settings


def _forget_first_update(optimizer: Any) -> None:
    """DeepSpeed may take a first update with zero gradients, to allocate Adam's moments.

    Adam counts it, which shrinks the first real updates (to 0.74 of their size for betas 0.9 and
    0.95); with a learning rate it would also decay the weights once.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    for state in inner.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()


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
        if config.finetune and config.load:
            checkpoint.load_weights(self.model, config.load)
        self.engine = self._engine()
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
        return {
            "engine": "standalone",
            "config_sha": config_sha(self.config),
            "git_sha": provenance.git_sha(),
            "data": provenance.data_fingerprint(datasets),
            "tokenizer": provenance.tokenizer_fingerprint(datasets),
            "parameters": self.parameters,
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

    def _engine(self) -> Any:
        config, params = self.config, self.config.optimizer.params
        deepspeed = runtime.import_deepspeed()
        self.model.to(self.world.device)
        if config.torch_dtype_name != "float32":
            self.model.to(getattr(torch, config.torch_dtype_name))
            # ZeRO 3 packs all weights into one buffer of one dtype: there the stored position
            # parameters are rounded like the rest (the optimizer's own copies are float32).
            if config.zero_stage < 3:
                self.model.remember_positions()
        optimizer = torch.optim.AdamW(
            parameter_groups(self.model, config),
            # `learning_rate` sets it before every update; 0 until then, see _forget_first_update
            lr=0.0,
            betas=(params.betas[0], params.betas[1]),
            eps=params.eps,
            # one fused kernel on both devices, without DeepSpeed's compilation at first use
            fused=True,
        )
        engine, *_ = deepspeed.initialize(
            model=self.model,
            optimizer=optimizer,
            config=deepspeed_settings(config, self.batch),
            dist_init_required=False,
        )
        _forget_first_update(engine.optimizer)
        return engine

    def _resume(self) -> None:
        config = self.config
        here = (self.folder / "latest").is_file()
        source = self.folder if here else None
        if source is None and config.load and not config.finetune:
            source = Path(config.load)
        if source is None:
            return
        before = provenance.read_run(source).get("data", self.provenance["data"])
        if before != self.provenance["data"]:
            raise ConfigError(
                f"{source}: this run was trained on data {before}, the files are now "
                f"{self.provenance['data']}: restore them, or start a new run"
            )
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
        (self.folder / "config.yml").write_text(dump(self.config), encoding="utf-8")
        provenance.write_json(self.folder / "run.json", self.provenance)
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
            logged = self._due(config.log_interval, self.step + 1)
            losses.append(self._one_step(batches, logged))
            self.step += 1
            if logged:
                mean = self._mean_loss(torch.stack(losses).mean())
                seconds = time.perf_counter() - since
                statistics = self._position_statistics()
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
            if self.validation and self._due(config.eval_interval, self.step):
                self._validate(watch, rate)
                since = time.perf_counter()
            if self._save_due():
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
                raise TrainingError(self._diagnose(text))
            self.engine.backward(loss)
            if measure and self.engine.is_gradient_accumulation_boundary():
                self._measure_gradient()
            self.engine.step()
        self._project()
        return total / self.batch.accumulation

    def _consume(self, first: int) -> None:
        """Extend the chain by this micro batch of all ranks: the same for any split into ranks."""
        start = first - self.world.rank * self.batch.micro
        for sample in range(start, start + self.batch.micro * self.world.size):
            record = f"{self.consumed_sha} {sample}".encode()
            self.consumed_sha = hashlib.sha256(record).hexdigest()[:16]

    def _whole(self, write: bool) -> Any:
        """A context in which position parameters are whole: ZeRO 3 may leave a slice on each rank."""
        # Small ones usually stay whole; gathering those would end with DeepSpeed slicing them.
        sliced = [
            p for p in self.model.position_parameters() if hasattr(p, "ds_id") and not p.numel()
        ]
        if not sliced:
            return nullcontext()
        from deepspeed.runtime.zero import GatheredParameters

        return GatheredParameters(sliced, modifier_rank=0 if write else None)

    def _project(self) -> None:
        """Legal position parameters after every update, also in the optimizer's own copies."""
        methods = [method for method in dict.fromkeys(self.model.methods) if method.bounds]
        outside: list[tuple[torch.nn.Parameter, float, float]] = []
        with self._whole(write=True):
            for method in methods:
                for name, (low, high) in method.bounds.items():
                    parameter = method.get_parameter(name)
                    if bool(((parameter < low) | (parameter > high)).any()):
                        outside.append((parameter, low, high))
                method.project_()
        if self.config.zero_stage or self.config.torch_dtype_name != "float32":
            # ZeRO and half precision update a copy of their own and overwrite the parameter.
            from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

            for parameter, low, high in outside:
                value = safe_get_full_fp32_param(parameter)
                if value is not None:
                    safe_set_full_fp32_param(parameter, value.clamp(low, high))

    def _mean_loss(self, mean: torch.Tensor) -> float:
        if self.world.size > 1:
            torch.distributed.all_reduce(mean)
            mean /= self.world.size
        value = mean.item()
        if not math.isfinite(value):
            raise TrainingError(self._diagnose(None))
        return value

    def _measure_gradient(self) -> None:
        """The norm over all parameters, before clipping, where DeepSpeed does not keep it itself."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        self._norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else None

    def _gradient_norm(self) -> float | None:
        norm = self.engine.get_global_grad_norm()  # ZeRO and half precision
        return self._norm if norm is None else float(norm)

    def _position_statistics(self) -> dict[str, float]:
        """All ranks call it: under ZeRO 3 they put the parameters together."""
        methods = list(dict.fromkeys(self.model.methods))
        with self._whole(write=False):
            found = [method.statistics() for method in methods]
        if len(methods) == 1:
            return {f"position/{k}": v for k, v in found[0].items()}
        return {f"position/layer{i}/{k}": v for i, own in enumerate(found) for k, v in own.items()}

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

    def _due(self, interval: int, step: int) -> bool:
        return step % interval == 0 or step == self.config.train_iters

    def _save_due(self) -> bool:
        config = self.config
        if self.step == config.train_iters or self.step in (config.extra_save_iters or ()):
            return True
        if config.checkpoint_factor is None:
            return False
        if config.checkpoint_scale == "log":
            level = round(math.log(self.step, config.checkpoint_factor))
            return self.step == int(config.checkpoint_factor**level)
        return self._due(int(config.checkpoint_factor), self.step)

    def _save(self) -> None:
        client = {
            "iteration": self.step,
            "consumed_sha": self.consumed_sha,
            "config_sha": config_sha(self.config),
        }
        checkpoint.save(
            self.engine, self.folder, self.step, client, self.config.keep_last_n_checkpoints
        )

    # ---- what went wrong -------------------------------------------------------------------------

    def _diagnose(self, text: torch.Tensor | None) -> str:
        """Name the first tensor that is not finite: parameter, gradient, or output of a module."""
        where = f"loss is not finite at iteration {self.step + 1} on rank {self.world.rank}: "
        for name, parameter in self.model.named_parameters():
            # ZeRO 3 keeps a slice of each on every rank.
            if not torch.isfinite(getattr(parameter, "ds_tensor", parameter)).all():
                return where + f"parameter {name} holds NaN or infinity"
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                return where + f"the gradient of {name} holds NaN or infinity"
        if text is None or self.config.zero_stage == 3:  # there a forward pass needs all ranks
            return where + "no parameter or gradient is the cause; lower the learning rate"
        found: list[str] = []

        def look(name: str) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                if isinstance(output, torch.Tensor) and not torch.isfinite(output).all():
                    found.append(name)

            return hook

        hooks = [m.register_forward_hook(look(n)) for n, m in self.model.named_modules() if n]
        with torch.no_grad():
            self.model(text[:, :-1], text[:, 1:])
        for handle in hooks:
            handle.remove()
        return where + (f"first in the output of {found[0]}" if found else "only the loss itself")


def _has_split(config: Config, part: str) -> bool:
    return bool(getattr(config, f"{part}_data_paths") or config.data_path)


__all__ = ["ConfigError", "Trainer", "TrainingError", "train"]
