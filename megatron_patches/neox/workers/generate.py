"""Started by DeepSpeed in place of GPT-NeoX's generate.py."""

import sys
from pathlib import Path

# The interpreter put this folder first, whose names would hide the checkout's.
sys.path[0] = str(Path(__file__).resolve().parents[3])

from megatron_patches.neox.worker import run  # noqa: E402

if __name__ == "__main__":
    run("generate.py")
