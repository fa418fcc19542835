"""Checkpoint files that another program will load without care, looked through before it does."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import torch

# What GPT-NeoX's and DeepSpeed's files hold besides tensors and plain data, by full name: random
# states, and records of ZeRO that run nothing.
PLAIN = frozenset(
    {
        "_codecs.encode",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy.dtype",
        "numpy.ndarray",
    }
)


def damaged(file: Path) -> bool:
    """A torch file is a zip with a checksum of each tensor, which torch itself does not look at."""
    try:
        with zipfile.ZipFile(file) as content:
            return content.testzip() is not None
    except zipfile.BadZipFile:
        return False  # of a torch before 1.6, or no torch file: loading it will tell
    # RuntimeError: a member that says it is encrypted; the others: offsets and names of any value
    except (EOFError, OSError, RuntimeError, ValueError, OverflowError, zlib.error, struct.error):
        return True


def code_in(files: Iterable[Path]) -> str | None:
    """A line that names the first file which would run code, or is damaged; None: all are plain.

    Reads the list of names in each file, not the tensors: quick for checkpoints of any size.
    """
    for file in files:
        try:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(str(file))
        except Exception as error:  # a damaged archive raises whatever its first wrong step does
            return f"{file}: damaged ({type(error).__name__})"
        bad = sorted(name for name in names if name not in PLAIN)
        if bad:
            return f"{file}: loading it would run code ({', '.join(bad[:3])}); GPT-NeoX loads without care"
    return None
