"""KERPLE-log against ALiBi and rotary in a quarter hour of one GPU, with torch, numpy and two files.

    prepare   on a machine with the full environment: a folder with plan.json and the text
    run       where the GPU is: train, score 512 to 131072 tokens, write rows as they come
    collect   back with the full environment: the training logs as rows for figures and report

`run` measures first, then fixes one number of steps for all methods so that everything ends in time;
what does not fit is a failed row with its reason. docs/gpu.md has the whole way there and back.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

BEGUN = time.monotonic()  # importing torch counts, too
# Running a file puts its own folder on the path, not the repository, which need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_patches.quarter.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(BEGUN, __doc__ or ""))
