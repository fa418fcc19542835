"""A worker that trains, and whose rank 1 aborts in step 4 unless torchrun has started it again."""

from __future__ import annotations

import os

from megatron_patches.standalone.cli import train_main
from megatron_patches.standalone.train import Trainer
from megatron_patches.training.leaving import leave

STEP = 4


def aborts(self, batches, measure):
    if self.step + 1 == STEP and self.world.rank == 1:
        os.abort()  # as torch's C++ threads do when they meet what they do not expect
    return one_step(self, batches, measure)


if __name__ == "__main__":
    one_step = Trainer._one_step
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Trainer._one_step = aborts
    leave(train_main())
