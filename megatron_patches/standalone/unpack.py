"""The files of one checkpoint, selected from an archive, into a folder."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from data_prep.errors import DataError
from megatron_patches.config import ConfigError
from megatron_patches.standalone.archive import Archive

_STEP = re.compile(r"global_step(0|[1-9][0-9]*)")
# Weights, one file a layer. Not taken: `mp_rank_*` (in this layout it holds pickled settings, no weights)
# and `*_optim_states.pt`; evaluation needs neither, and what is not there cannot be loaded unsafely.
_LAYER = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_CONFIG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\.yml")


@dataclass(frozen=True)
class Wanted:
    """A member that is taken: where it goes below the output, and its size in bytes."""

    target: str
    size: int


@dataclass(frozen=True)
class Selection:
    """One step of an archive: member -> where it goes; the other members are left out."""

    step: int
    files: dict[str, Wanted]
    left_out: tuple[str, ...]


def select(archive: Archive, step: int | None = None) -> Selection:
    """Which members are the checkpoint: `global_step<N>/layer_*.pt`, and `configs/*.yml` in or beside it.

    Any folders may lie above. Raises DataError for a bad archive and for one without a step,
    ConfigError when there are several and `step` does not choose.
    """
    members = archive.members()
    found = {place for member in members if (place := _place(member.name)) is not None}
    if not found:
        raise DataError(
            f"{archive.path}: no folder global_step<N> with files among its {len(members)} files"
        )
    root, chosen = _chosen(sorted(found), step, archive.path)
    files: dict[str, Wanted] = {}
    for member in members:
        target = _target(member.name, root, chosen)
        if target is not None:
            files[member.name] = Wanted(target, member.size)
    left_out = tuple(member.name for member in members if member.name not in files)
    return Selection(chosen, files, left_out)


def _place(name: str) -> tuple[str, int] | None:
    """`(folder above, N)` of a file somewhere below a `global_step<N>`."""
    parts = name.split("/")
    for index, part in enumerate(parts[:-1]):
        if match := _STEP.fullmatch(part):
            return "/".join(parts[:index]), int(match.group(1))
    return None


def _chosen(places: list[tuple[str, int]], step: int | None, path: Path) -> tuple[str, int]:
    fitting = [place for place in places if step in (None, place[1])]
    shown = ", ".join(f"{root}/global_step{n}".lstrip("/") for root, n in places[:8])
    if not fitting:
        raise ConfigError(f"{path}: has no step {step}; there are {shown}")
    if len(fitting) > 1:
        roots = len({root for root, _ in fitting}) > 1
        advice = "unpack it and give one of the folders" if roots else "choose with --step N"
        raise ConfigError(f"{path}: holds {len(places)} steps ({shown}): {advice}")
    return fitting[0]


def _target(name: str, root: str, step: int) -> str | None:
    above = f"{root}/" if root else ""
    if not name.startswith(above):
        return None
    folder, _, file = name[len(above) :].rpartition("/")
    own = f"global_step{step}"
    if folder == own and _LAYER.fullmatch(file):
        return f"{own}/{file}"
    if folder in (f"{own}/configs", "configs") and _CONFIG.fullmatch(file):
        return f"{folder}/{file}"
    return None


def unpack(archive: Archive, selection: Selection, folder: Path) -> dict[str, str]:
    """Write the selected members below `folder`; returns their sha256 by file name there."""
    hashes: dict[str, str] = {}
    for name, blocks in archive.read({name: file.size for name, file in selection.files.items()}):
        target = selection.files[name].target
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with open(folder / target, "xb") as stream:
            for block in blocks:
                digest.update(block)
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
        hashes[target] = digest.hexdigest()
    return hashes
