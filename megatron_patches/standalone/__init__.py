"""The built-in engine: a GPT in GPT-NeoX's parameter layout, trained with DeepSpeed, without GPT-NeoX."""

from megatron_patches.standalone.checkpoint import CheckpointError, load_model
from megatron_patches.standalone.model import GPT, ModelShape

__all__ = ["GPT", "CheckpointError", "ModelShape", "load_model"]
