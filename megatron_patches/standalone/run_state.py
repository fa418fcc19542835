"""One rank of a training: what it is made of, where it starts or continues, and how it is saved."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch

from data_prep.indexed import IndexedDataset
from megatron_patches.config import Config, ConfigError, batch_arithmetic, config_sha
from megatron_patches.standalone import checkpoint, provenance
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.data import (
    build_samples,
    check_entries,
    sources,
    validation_batches,
)
from megatron_patches.standalone.guard import Guard
from megatron_patches.standalone.heartbeat import Heartbeat
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.optimizer import build_engine
from megatron_patches.standalone.runtime import World
from megatron_patches.standalone.signals import Agreement, Signals


class RunState:
    """Model, engine, data and position of a run; the constructor loads the last whole checkpoint."""

    def __init__(self, config: Config, world: World, signals: Signals | None = None) -> None:
        self.config, self.world, self.signals = config, world, signals
        self.batch = batch_arithmetic(config, world.size)
        self.folder = config.save_dir
        self.samples = build_samples(
            config, "train", config.seq_length, config.train_iters * self.batch.global_
        )
        held_out = validation_batches(config, self.batch, world.rank, world.size)
        self.validation = [torch.from_numpy(rows) for rows in held_out]
        torch.manual_seed(config.seed)
        self.model = GPT(shape_of(config))
        self.parameters = self.model.parameter_count()  # ZeRO 3 leaves nothing to count
        for rows in held_out:
            self._check_tokens(rows, "the validation text")
        if config.finetune:
            self._load_first_weights()
        self.engine = build_engine(self.model, config, self.batch, world.device)
        self.guard = Guard(config, world, self.model, self.batch.micro)
        self.heart = Heartbeat(
            self.folder,
            world.rank,
            world.size,
            config.watch_stall_seconds,
            self.guard.keep,
            cut_off=world.links.cut_off if world.links is not None else dict,
        )
        self.agreed = Agreement(world)
        self.step = 0
        self.saved: int | None = None  # the step that `latest` names
        self.broken: dict[str, str] = {}  # steps that could not be resumed from, and why
        self.losses: list[torch.Tensor] = []  # this rank's, since the last logged step
        self.provenance = self._provenance()
        self.consumed_sha = ""  # a chain over all sample numbers read so far, in their order
        self._norm: float | None = None
        self._resume()

    def _check_tokens(self, rows: np.ndarray, where: str) -> None:
        """DataError for a token that is none of the model's: the text need not name its tokenizer."""
        check_entries(rows, self.model.shape.vocabulary, where)

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

    def _load_first_weights(self) -> None:
        if checkpoint.begun(self.folder):
            return  # it goes on from its own, though what it began with may be gone
        if self.config.load is None:
            raise ConfigError(
                f"{self.config.place('finetune')} needs `load`: weights to start from"
            )
        source = checkpoint.loaded_folder(self.config)
        checkpoint.check_start(source, self.config)
        checkpoint.load_weights(self.model, source)

    def _resume(self) -> None:
        config = self.config
        own = checkpoint.begun(self.folder)
        source = self.folder if own else None
        if source is None and config.load and not config.finetune:
            source = checkpoint.loaded_folder(config)
        if source is None:
            return
        provenance.check_same_run(source, self.provenance, config.zero_stage)
        client, step, self.broken = checkpoint.resume(self.engine, source, config, fall_back=own)
        self.step = int(client["iteration"])
        self.saved = self.step if own else None
        self.consumed_sha = str(client["consumed_sha"])
        self.guard.lowest = float(client.get("lowest_loss", math.inf))
        self.losses = self._own_losses(client.get("losses"))
        for why in self.broken.values() if self.world.first else ():
            print(f"WARNING: broken checkpoint: {why}", file=sys.stderr)
        if self.broken and self.world.first:
            print(f"WARNING: {self.folder}: going on from {step.name} instead", file=sys.stderr)

    def _own_losses(self, stored: torch.Tensor | None) -> list[torch.Tensor]:
        """Of `[ranks, steps]` since the last logged step, this rank's; of other ranks, their mean."""
        if stored is None:
            return []
        same = stored.shape[0] == self.world.size
        own = stored[self.world.rank] if same else stored.mean(0)
        return list(own.to(self.world.device))

    def save(self) -> None:
        """Raises TrainingError instead of writing weights that are not finite."""
        self.heart.beat(self.step, "saving")
        weights = [getattr(p, "ds_tensor", p) for p in self.model.parameters()]
        broken = torch.stack([~torch.isfinite(w).all() for w in weights]).any().float()
        ranks = [rank for rank, found in enumerate(self.guard.of_all(broken)) if found]
        if ranks:
            raise self.guard.not_finite(self.step, ranks, None)
        losses = torch.stack(self.losses) if self.losses else torch.zeros(0)
        client = {
            "iteration": self.step,
            "consumed_sha": self.consumed_sha,
            "config_sha": config_sha(self.config),
            "lowest_loss": self.guard.lowest,
            "losses": self.guard.rows_of_all(losses.to(self.world.device)).cpu(),
        }
        checkpoint.save(
            self.engine, self.folder, self.step, client, self.config.keep_last_n_checkpoints
        )
        self.saved = self.step
        self.heart.beat(self.step, "saving", 1)
