"""All samples of a training run on the device, before it starts: NeoX's order, no copy in between."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from data_prep.indexed import IndexedDataset
from megatron_patches.quarter.plan import PlannedRun, Training
from megatron_patches.standalone.samples import SURPLUS, SampleOrder


class Batches:
    """The batches that the standalone engine would read, for `steps` steps.

    `rows(step)` is int64 `[batch, length + 1]` on the device. The text of all passes lies there as
    int32: 4 bytes a token and pass.
    """

    def __init__(
        self, dataset: IndexedDataset, training: Training, steps: int, device: torch.device
    ) -> None:
        self.batch, self.length, self.steps = training.batch, training.seq_length, steps
        everything = np.arange(len(dataset), dtype=np.int32)
        # As `build_samples` asks for one data path.
        wanted = math.ceil(steps * self.batch * SURPLUS)
        order = SampleOrder(dataset, everything, self.length, wanted, training.seed)
        self.passes = steps * training.tokens_per_step / len(dataset.tokens)
        item = dataset.dtype.itemsize
        firsts = (dataset.pointers[order.documents] // item).tolist()
        sizes = dataset.sizes[order.documents].tolist()
        text = np.concatenate(
            [dataset.tokens[f : f + n] for f, n in zip(firsts, sizes, strict=True)]
        )
        self._text = torch.from_numpy(text.astype(np.int32)).to(device)
        self._starts = torch.from_numpy(order.order.astype(np.int64) * self.length).to(device)
        self._window = torch.arange(self.length + 1, device=device)

    def rows(self, step: int) -> Tensor:
        starts_B = self._starts[step * self.batch : (step + 1) * self.batch]
        return self._text[starts_B[:, None] + self._window].long()

    def consume(self, chain: str, step: int) -> str:
        """The engine's `consumed_sha` after this step: a chain over the numbers of all samples read."""
        for sample in range(step * self.batch, (step + 1) * self.batch):
            chain = hashlib.sha256(f"{chain} {sample}".encode()).hexdigest()[:16]
        return chain


def shared_batches(
    dataset: IndexedDataset, runs: Sequence[PlannedRun], steps: int, device: torch.device
) -> dict[str, Batches]:
    """By run name; runs that read the same samples share one object and its memory."""
    made: dict[tuple[int, int, int], Batches] = {}
    found = {}
    for run in runs:
        key = (run.training.seed, run.training.batch, run.training.seq_length)
        if key not in made:
            made[key] = Batches(dataset, run.training, steps, device)
        found[run.name] = made[key]
    return found
