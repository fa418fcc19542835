"""GPT-NeoX's loading: no code from files, no weights of another method, nothing instead of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_patches import positions
from megatron_patches.config import FUNCTION, ConfigError
from megatron_patches.config.reading import read_file
from megatron_patches.neox.patches import Patches
from megatron_patches.training.untrusted import code_in


def apply(patches: Patches) -> None:
    from megatron import checkpointing, training

    patches.wrap(checkpointing, "load_checkpoint", _load_checkpoint)
    patches.wrap(training, "pretrain", _pretrain)


def _load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_checkpoint(
        neox_args: Any,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any,
        inference: bool = False,
        iteration: int | None = None,
    ) -> Any:
        folder = step(Path(neox_args.load), iteration)
        if folder is not None:
            _check_together(sorted(folder.glob("*.pt")))
            check_same_model(folder, neox_args)
        return original(
            neox_args, model, optimizer, lr_scheduler, inference=inference, iteration=iteration
        )

    return load_checkpoint


def step(path: Path, iteration: int | None) -> Path | None:
    """The step folder that NeoX will load; None where it starts anew, since nothing was saved yet.

    Raises ConfigError for a path inside which NeoX would find nothing although weights are there.
    """
    if any(path.glob("mp_rank_*")) or any(path.glob("layer_*")):
        raise ConfigError(
            f"load {path} names a step: write load: {path.parent} and iteration: "
            f"{path.name.removeprefix('global_step')}"
        )
    if iteration is not None:
        return path / f"global_step{iteration}"
    latest = path / "latest"
    if not latest.is_file():
        return None
    return path / latest.read_text(encoding="utf-8", errors="replace").strip()


def _check_together(files: list[Path]) -> None:
    """Each rank looks through its share; all of them stop where one finds something."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found: list[Any] = [None] * ranks
    torch.distributed.all_gather_object(found, code_in(files[rank::ranks]))
    faults = [fault for fault in found if fault is not None]
    if faults:
        raise ConfigError(faults[0])


def check_same_model(folder: Path, neox_args: Any) -> None:
    """Raises ConfigError where the files that NeoX keeps beside the weights tell of another model.

    A log kernel and a power kernel store parameters of equal names and shapes.
    """
    stored: dict[str, Any] = {}
    for file in sorted((folder / "configs").glob("*.yml")):
        stored.update({entry.key: entry.value for entry in read_file(file)})
    fields = type(neox_args).__dataclass_fields__
    for key in sorted(FUNCTION & set(fields)) if stored else []:
        before = stored.get(key, fields[key].default)
        now = getattr(neox_args, key)
        if key == "pos_emb" and before in {*positions.names(), *positions.aliases()}:
            before = positions.resolve(before)
        # None and an empty mapping are the same default.
        if (before or None) != (now or None):
            raise ConfigError(
                f"{folder}: its weights were trained with {key}: {before}, this configuration has "
                f"{now}; correct it, or load another checkpoint"
            )


def _pretrain(original: Callable[..., Any]) -> Callable[..., Any]:
    def pretrain(neox_args: Any, *args: Any, **kwargs: Any) -> Any:
        if neox_args.no_load_optim and neox_args.train_iters:
            raise ConfigError(
                "no_load_optim: GPT-NeoX would train with an optimizer of learning rate 0; "
                "write finetune: true to start from weights alone"
            )
        return original(neox_args, *args, **kwargs)

    return pretrain
