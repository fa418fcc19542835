"""Writing a checkpoint: aside, with a manifest, renamed when all of it is on the disk.

At no moment does the folder lack the checkpoint that `latest` names: a process that is killed, or a
disk that is full, at any point leaves that one as it was, and a name such as `writing-global_step8` at
most, which the next save removes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from megatron_patches.standalone import manifest
from megatron_patches.standalone.weights import CheckpointError, is_step, step_number

ASIDE = "writing-"
FULL = 1 << 20  # bytes: a disk with less than this is full
NO_ROOM = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def save(engine: Any, folder: Path, step: int, client: dict[str, Any], keep: int | None) -> Path:
    """Write `global_step<step>` with weights, optimizer and `client` state, then point `latest` at it.

    All ranks call it. `keep` is the number of steps left on disk, this one included; steps beyond
    `step` do not count and stay.

    Raises CheckpointError on all ranks when something cannot be written, a full disk above all; the
    folder is then as before.
    """
    tag = f"global_step{step}"
    aside = folder / f"{ASIDE}{tag}"
    needed = max(_least_bytes(engine), _bytes_of_latest(folder))
    try:
        together(lambda: _prepare(folder, step, needed))
        with _failures(engine) as (written, failed):
            engine.save_checkpoint(
                str(folder), tag=aside.name, client_state=client, save_latest=False
            )
            if engine.zero_optimization_partition_weights():
                # ZeRO 3 leaves only slices on each rank; whole weights make the run readable alone.
                whole = engine._zero3_consolidated_16bit_state_dict()
                if _rank() == 0:
                    engine.checkpoint_engine.save(
                        {"module": whole}, str(aside / "mp_rank_00_model_states.pt")
                    )
        together(lambda: _raise_first(failed))
        records = _records(aside, written)
        about = {key: value for key, value in client.items() if isinstance(value, int | str)}
        together(lambda: _publish(folder, aside, tag, records, about, keep))
    except (CheckpointError, OSError) as error:
        raise CheckpointError(_told(error, folder, aside, step, needed)) from error
    return folder / tag


def together(work: Callable[[], None]) -> None:
    """Do `work` on every rank; a failure of one is a failure of all, instead of a wait without end."""
    fault = None
    try:
        work()
    except (OSError, ValueError, RuntimeError) as error:
        fault = str(error)
    if torch.distributed.get_world_size() == 1:
        faults = [fault]
    else:
        faults = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(faults, fault)
    for other in faults:
        if other is not None:
            raise CheckpointError(other)


def _rank() -> int:
    return torch.distributed.get_rank()


# ---- before ----------------------------------------------------------------------------------


def _least_bytes(engine: Any) -> int:
    """What the files of one step hold at least: weights, and the tensors of the optimizer."""
    weights = sum(
        getattr(p, "ds_numel", p.numel()) * p.element_size() for p in engine.module.parameters()
    )
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    states = [value for state in inner.state.values() for value in state.values()]
    own = sum(s.numel() * s.element_size() for s in states if isinstance(s, torch.Tensor))
    parts = torch.distributed.get_world_size() if engine.zero_optimization() else 1
    return int(weights + own * parts)


def _bytes_of_latest(folder: Path) -> int:
    """The size of the step that `latest` names: the next one is as large. 0 without one."""
    try:
        step = folder / (folder / "latest").read_text(encoding="utf-8").strip()
        return sum(f.stat().st_size for f in step.iterdir()) if is_step(step) else 0
    except (OSError, ValueError):
        return 0


def _prepare(folder: Path, step: int, needed: int) -> None:
    if _rank():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{ASIDE}*"):  # of a run that was killed while saving
        shutil.rmtree(left)
    if needed > free_bytes(folder):
        raise OSError(f"no room for the checkpoint of iteration {step}")


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


# ---- while -----------------------------------------------------------------------------------


@contextmanager
def _failures(engine: Any) -> Iterator[tuple[set[str], list[str]]]:
    """The names of the files that DeepSpeed's writer has written, and what it raised.

    Collected: a rank that left early would keep the others waiting.
    """
    writer = engine.checkpoint_engine
    found: list[str] = []
    written: set[str] = set()
    original = writer.save

    def save(state_dict: Any, path: str) -> None:
        if found:
            return
        try:
            original(state_dict, path)
            written.add(Path(path).name)
        except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into the second
            found.append(f"{path}: cannot be written: {str(error).splitlines()[0]}")

    writer.save = save
    try:
        yield written, found
    finally:
        del writer.save  # the class's own is in force again


def _raise_first(failed: list[str]) -> None:
    if failed:
        raise CheckpointError(failed[0])


def _records(aside: Path, written: set[str]) -> dict[str, manifest.Record]:
    """All files, synchronised and read back, shared out over the ranks.

    Raises CheckpointError on all ranks when one that was `written` by any of them is not there: a
    manifest without it would certify a step that cannot be resumed from.
    """
    rank, ranks = _rank(), torch.distributed.get_world_size()
    found: dict[str, manifest.Record] = {}

    def read() -> None:
        for file in manifest.files_of(aside)[rank::ranks]:
            found[file.name] = manifest.record(file, sync=True)
            if file.suffix == ".pt":
                manifest.check_sums(file)

    together(read)
    everyone: list[Any] = [(found, written)]
    if ranks > 1:
        everyone = [None] * ranks
        torch.distributed.all_gather_object(everyone, (found, written))
    records = {name: entry for part, _ in everyone for name, entry in part.items()}
    if lost := set().union(*(names for _, names in everyone)) - set(records):
        raise CheckpointError(f"{aside / min(lost)}: was written, and is gone")
    return records


# ---- after -----------------------------------------------------------------------------------


def _publish(
    folder: Path,
    aside: Path,
    tag: str,
    records: dict[str, manifest.Record],
    about: dict[str, Any],
    keep: int | None,
) -> None:
    if _rank():
        return
    target = folder / tag
    manifest.write(aside, records, about)
    _sync(aside)
    if target.exists():  # of a run that was killed before it could name this step in `latest`
        _remove(target)
    aside.rename(target)
    _sync(folder)
    point_latest(folder, tag)
    steps = [f for f in folder.iterdir() if is_step(f) and step_number(f) <= step_number(target)]
    for old in sorted(steps, key=step_number)[: -keep if keep else 0]:
        _remove(old)


def point_latest(folder: Path, tag: str) -> None:
    """Let `latest` name the step `tag`: whole, and on the disk when this returns."""
    temporary = folder / ".latest"
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(tag)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, folder / "latest")
    _sync(folder)


def _remove(step: Path) -> None:
    """Out of the way by one rename: half a step never stands under the name of a whole one."""
    aside = step.with_name(f"{ASIDE}removed-{step.name}")
    step.rename(aside)
    shutil.rmtree(aside)


def _sync(folder: Path) -> None:
    """Names that were made or changed in `folder` survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _told(error: Exception, folder: Path, aside: Path, step: int, needed: int) -> str:
    """What failed, after the room of the unfinished files was given back."""
    written = 0
    try:
        if aside.is_dir():
            written = sum(f.stat().st_size for f in aside.glob("*"))
        left = free_bytes(folder)
        # torch's writer does not say why it failed; and a quota is not in the free bytes.
        full = left < max(needed - written, FULL) or any(w in str(error) for w in NO_ROOM)
        if _rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        free = free_bytes(folder)
    except OSError:
        full, free = False, 0
    latest = ""
    with suppress(OSError):
        latest = (folder / "latest").read_text(encoding="utf-8", errors="replace").strip()
    kept = f"{latest} is untouched" if latest else "there is no earlier one"
    if not full:
        return f"the checkpoint of iteration {step} was not written ({kept}): {error}"
    needed = max(needed, written)
    missing = f"at least {needed - free:,} bytes are missing" if needed > free else str(error)
    return (
        f"{folder}: the disk is full: the checkpoint of iteration {step} takes {needed:,} bytes or "
        f"more, {free:,} are free, {missing} ({kept}); make room and start the same command again"
    )
