"""Continuing a run: from the newest step whose files are what was written, exactly."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from megatron_patches.config import (
    Config,
    ConfigError,
    another_run,
    config_sha,
    load_run_config,
)
from megatron_patches.standalone import manifest
from megatron_patches.standalone.saving import point_latest, together
from megatron_patches.standalone.weights import (
    CheckpointError,
    is_step,
    safe_load,
    step_folder,
    step_number,
)


def begun(folder: Path) -> bool:
    """Whether a run has saved a step there, be it broken or without `latest`."""
    return folder.is_dir() and (
        (folder / "latest").is_file() or any(is_step(f) and f.is_dir() for f in folder.iterdir())
    )


def resume(
    engine: Any, path: Path, config: Config, *, fall_back: bool
) -> tuple[dict[str, Any], Path, dict[str, str]]:
    """Weights, optimizer and client state of the run in `path`. All ranks call it.

    With `fall_back`, where the newest step is broken, the last good one is taken.

    Returns the client state, the step's folder, and what was passed over: name -> why.

    Raises CheckpointError when no step is whole, with the faults of all; ConfigError when the files
    are of a run of another configuration.
    """
    if fall_back:
        folder, found, broken = _last_good(path)
    else:
        folder, broken = step_folder(path), {}
        found = _verified_shas(folder)
    # Before DeepSpeed copies anything: tensors of another model would stop it with a message of torch.
    if found != {config_sha(config)}:
        trained = None
        with suppress(ConfigError):  # its hash was read from the step itself
            trained = load_run_config(path)
        raise another_run(path, trained, ", ".join(sorted(found)), config)
    loaded, client = engine.load_checkpoint(str(folder.parent), tag=folder.name)
    if loaded is None:
        raise CheckpointError(f"{folder}: DeepSpeed found nothing to resume there")
    return dict(client), folder, broken


def set_aside(run: Path, good: Path, broken: Iterable[str]) -> None:
    """Rename the `broken` steps that `resume` passed over, and let `latest` name `good`.

    Their content stays, as `broken-global_stepN`; only the process that holds the run's lock calls it.
    """
    for step in [run / name for name in broken if is_step(Path(name))]:
        number, target = 1, run / f"broken-{step.name}"
        while target.exists():
            number += 1
            target = run / f"broken-{step.name}-{number}"
        step.rename(target)
    point_latest(run, good.name)


def _last_good(run: Path) -> tuple[Path, set[str], dict[str, str]]:
    """The step that `latest` names, or the newest other one that is whole; and why not those before."""
    names: list[Any] = [_candidates(run)]
    if torch.distributed.get_world_size() > 1:
        torch.distributed.broadcast_object_list(names, src=0)
    named, steps = names[0]
    broken = {}
    if named not in steps:
        broken["latest"] = f"{run / 'latest'}: names {named or 'no step'!r}, which is not there"
    for tag in sorted(steps, key=lambda tag: (tag == named, step_number(Path(tag))), reverse=True):
        try:
            return run / tag, _verified_shas(run / tag), broken
        except CheckpointError as error:
            broken[tag] = str(error)
    raise CheckpointError(
        f"{run}: no step of it is whole: {'; '.join(broken.values())}; restore one, or start anew "
        "under another `run_name`"
    )


def _candidates(run: Path) -> tuple[str, list[str]]:
    """What `latest` says, and the steps that are there."""
    latest = run / "latest"
    named = ""
    if latest.is_file():
        with open(latest, encoding="utf-8", errors="replace") as stream:
            named = stream.read(80).strip()
    return named, [f.name for f in run.iterdir() if is_step(f) and f.is_dir()]


def deepspeed_globals() -> list[Any]:
    """What the optimizer files of ZeRO hold besides tensors: plain records, which run nothing."""
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    scalers = [loss_scaler.LossScaler, loss_scaler.DynamicLossScaler]
    return [*scalers, ZeroStageEnum, fragment_address]


def _verified_shas(folder: Path) -> set[str]:
    """Check every file of a step against its manifest and read it with the safe loader.

    Shared out over the ranks, one at a time. DeepSpeed unpickles without restriction, so nothing may
    reach it unread. Returns the hashes of configurations that the files name; raises CheckpointError
    on all ranks if one finds a bad file.
    """
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    also, found = deepspeed_globals(), set()

    def read() -> None:
        records = manifest.read(folder)
        if records is not None:
            there = {f.name for f in folder.glob("*.pt")}
            names = sorted(set(records) | there)
            if extra := there - set(records):
                raise CheckpointError(f"{folder / min(extra)}: not in the manifest")
            if bad := manifest.faults(folder, names[rank::ranks], records):
                raise CheckpointError(bad[0])
        for file in sorted(folder.glob("*_states.pt"))[rank::ranks]:
            state = safe_load(file, also)
            if isinstance(state, dict) and "config_sha" in state:
                found.add(str(state["config_sha"]))

    together(read)
    everyone: list[Any] = [found]
    if ranks > 1:
        everyone = [None] * ranks
        torch.distributed.all_gather_object(everyone, found)
    shas: set[str] = set().union(*everyone)
    if not shas:
        raise CheckpointError(f"{folder}: holds no state of this engine's to resume from")
    return shas
