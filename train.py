"""Worker: trains. Started by deepy.py, torchrun, srun, or by hand as a single process."""

import sys

from megatron_patches.standalone.cli import train_main

if __name__ == "__main__":
    sys.exit(train_main())
