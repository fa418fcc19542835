"""Worker: continues a text with a trained model."""

import sys

from megatron_patches.standalone.cli import generate_main

if __name__ == "__main__":
    sys.exit(generate_main())
