"""Worker: trains. Started by deepy.py, torchrun, srun, or by hand as a single process."""

from megatron_patches.standalone.cli import train_main
from megatron_patches.training.leaving import leave

if __name__ == "__main__":
    leave(train_main())
