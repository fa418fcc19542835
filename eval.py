"""Worker: perplexity of a trained model at many lengths."""

import sys

from megatron_patches.standalone.cli import eval_main

if __name__ == "__main__":
    sys.exit(eval_main())
