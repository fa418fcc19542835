"""Launcher in GPT-NeoX's grammar: compose the YAML files, check them, start DeepSpeed."""

import sys

from megatron_patches.launch import main

if __name__ == "__main__":
    sys.exit(main())
