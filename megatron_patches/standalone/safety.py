"""Which files of a checkpoint GPT-NeoX would load, and whether they are plain."""

from __future__ import annotations

from pathlib import Path

from megatron_patches.standalone.weights import CheckpointError, is_step, read_latest, step_number
from megatron_patches.training.untrusted import code_in


def step_that_neox_loads(path: str | Path, iteration: int | None = None) -> Path:
    """`path/global_step<iteration>`, or the folder that `path/latest` names: NeoX's own rule.

    `path` may also be such a folder itself. Raises CheckpointError where it is not there.
    """
    path = Path(path)
    if is_step(path) and path.is_dir() and iteration in (None, step_number(path)):
        return path
    if iteration is not None:
        folder = path / f"global_step{iteration}"
    elif (path / "latest").is_file():
        named = read_latest(path)
        if "/" in named or not is_step(Path(named)):
            raise CheckpointError(f"{path / 'latest'}: names {named[:60]!r}, no global_step<N>")
        folder = path / named
    else:
        raise CheckpointError(
            f"{path}: GPT-NeoX loads the step that a file `latest` names; it has none"
        )
    if folder.parent != path or not folder.is_dir():
        raise CheckpointError(f"{folder}: no such step of {path}")
    return folder


def check_untrusted(folder: Path) -> None:
    """Raises CheckpointError that names a file of the step and what it would run when unpickled."""
    fault = code_in(sorted(folder.glob("*.pt")))
    if fault is not None:
        raise CheckpointError(fault)
