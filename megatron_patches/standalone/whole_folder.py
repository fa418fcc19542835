"""A folder that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep.files import locked
from megatron_patches.config import ConfigError


@contextmanager
def whole_or_nothing(output: Path) -> Iterator[Path]:
    """A hidden folder beside `output` to fill, renamed to it when the body succeeds, else removed.

    What a killed run left there is replaced. Raises ConfigError when `output` exists.
    """
    if os.path.lexists(output):
        raise ConfigError(f"{output} exists: remove it, or choose another name for the new one")
    partial = output.with_name(f".{output.name}.partial")
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        raise ConfigError(f"{partial} is in the way: remove it")
    partial.mkdir(parents=True, exist_ok=True)
    with locked(partial):  # another run that fills it is left alone
        try:
            for left in partial.iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
            yield partial
            if os.path.lexists(output):  # a rename would replace an empty folder
                raise ConfigError(f"{output} has appeared meanwhile: nothing was changed")
            os.replace(partial, output)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
