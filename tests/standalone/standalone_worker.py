"""Trains several configurations in one process group: `standalone_worker.py RUN.yml ...`.

Each start of a process costs seconds, so the tests start two processes once and run everything there.
"""

from __future__ import annotations

import sys

from megatron_patches.config import compose
from megatron_patches.standalone import runtime
from megatron_patches.standalone.train import train
from megatron_patches.training.leaving import leave

if __name__ == "__main__":
    for file in sys.argv[1:]:
        train(compose([file]))
    runtime.finish()
    leave(0)
