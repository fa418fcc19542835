"""Adam's moments between optimizers: by parameter name, whatever the order of the groups.

An optimizer's state numbers the parameters through its groups. Read here are the files of the
standalone engine and of GPT-NeoX, written is GPT-NeoX's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_patches.config import Config
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.schedule import learning_rate
from megatron_patches.standalone.tensor_kinds import unusable
from megatron_patches.standalone.weights import (
    CheckpointError,
    State,
    cut_dimension,
    merge_shards,
    safe_load,
    single_files,
)

# Where the attention's learned position parameters stand: in a last group of their own (this suite's
# engines), or, in NeoX without the patches, among the matrices that decay or the vectors that do not.
Place = Literal["last", "decaying", "plain"]


MOST_UPDATES = 1 << 53  # what torch's counters, floats, tell apart at best
HINT = "--fresh-optimizer converts the weights alone"


class NoMoments(CheckpointError):
    """A sound checkpoint from which no moments can be taken; the text says why."""


@dataclass(frozen=True)
class Group:
    """Parameters of one group, by their keys in the whole state, in the optimizer's order."""

    name: str
    weight_decay: float
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Moments:
    """Of every parameter: updates done, and the running means of gradient and squared gradient.

    `mean` and `square` hold float32 tensors of the parameters' shapes.
    """

    steps: dict[str, int]
    mean: State
    square: State


def groups(
    model: GPT, weight_decay: float, position_decay: float = 0.0, place: Place = "last"
) -> list[Group]:
    """NeoX's parameter groups: LayerNorms and biases do not decay; one group where nothing does."""
    own = {id(p) for p in model.position_parameters()}
    keys = [key for key, parameter in model.named_parameters() if id(parameter) not in own]
    position = [key for key, parameter in model.named_parameters() if id(parameter) in own]
    exempt = set(position) if place == "plain" else set()
    if place != "last":
        keys = _with_positions_inside(keys, position)
    plain = [k for k in keys if not weight_decay or k in exempt or _is_plain(model, k)]
    decaying = [key for key in keys if key not in set(plain)]
    found = [Group("no_weight_decay_params", 0.0, tuple(plain))]
    if decaying:
        found.insert(0, Group("weight_decay_params", weight_decay, tuple(decaying)))
    if position and place == "last":
        found.append(Group("position_params", position_decay, tuple(position)))
    return found


def _is_plain(model: GPT, key: str) -> bool:
    owner, _, leaf = key.rpartition(".")
    return leaf == "bias" or isinstance(model.get_submodule(owner), torch.nn.LayerNorm)


def _with_positions_inside(keys: list[str], position: list[str]) -> list[str]:
    """NeoX makes an attention's position module before its `dense`, this suite's model after it."""
    found = list(keys)
    for key in position:
        attention, _, _ = key.partition(".attention.")
        found.insert(found.index(f"{attention}.attention.dense.weight"), key)
    return found


# ---- reading -------------------------------------------------------------------------------------


def read_moments(folder: Path, model: GPT) -> Moments:
    """The moments in a step folder of either engine; `model` holds the weights stored there.

    Raises:
        NoMoments: none are stored where they can be read (half precision, ZeRO, stages, no optimizer).
        CheckpointError: what is stored does not belong to these weights.
    """
    files = single_files(folder)
    if not files:
        raise NoMoments(f"{folder} holds weights alone")
    if next(model.parameters()).dtype != torch.float32:
        raise NoMoments(f"{folder} keeps its optimizer in the form of half precision")
    pipeline = sorted(folder.glob("layer_00-model_*-model_states.pt"))
    if pipeline and len(pipeline) != len(files):
        raise NoMoments(f"{folder} holds the optimizers of several pipeline stages")
    shards = []
    for rank in sorted(files):
        whole = safe_load(files[rank])
        optimizer = whole.get("optimizer") if isinstance(whole, dict) else None
        try:
            shards.append(_read(optimizer, model, len(files), files[rank]))
        except CheckpointError:
            raise
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{files[rank]}: no optimizer's state ({error}); {HINT}"
            ) from error
    if any(shard.steps != shards[0].steps for shard in shards):
        raise CheckpointError(
            f"{folder}: its tensor-parallel shards count different updates; {HINT}"
        )
    return Moments(
        shards[0].steps,
        merge_shards([shard.mean for shard in shards], model, str(folder)),
        merge_shards([shard.square for shard in shards], model, str(folder)),
    )


def _read(optimizer: Any, model: GPT, shards: int, file: Path) -> Moments:
    if optimizer is None:
        raise NoMoments(f"{file.parent} keeps its optimizer in the partitions of ZeRO")
    state, stored = optimizer["state"], optimizer["param_groups"]
    if not state:
        raise NoMoments(f"{file.parent} holds an optimizer that has done nothing yet")
    if not all({"exp_avg", "exp_avg_sq"} <= set(entry) for entry in state.values()):
        raise NoMoments(f"{file.parent} was not trained with Adam")
    sizes = [len(group["params"]) for group in stored]
    for layout in _layouts(model):
        if sizes == [len(group.keys) for group in layout]:
            found = _by_name(state, stored, layout)
            if _fits(found, model, shards):
                return found
    raise CheckpointError(
        f"{file}: the optimizer's state, {len(state)} tensors in groups of {sizes}, does not fit "
        f"this model, or holds what Adam's float32 means cannot be; {HINT}"
    )


def _layouts(model: GPT) -> Iterator[list[Group]]:
    """Every order in which the parameters may have been numbered; the rates do not matter here."""
    places: tuple[Place, ...] = ("last", "decaying", "plain")
    for place in places:
        yield groups(model, 1.0, place=place)
        yield groups(model, 0.0, place=place)


def _by_name(state: dict[Any, Any], stored: list[Any], layout: list[Group]) -> Moments:
    found = Moments({}, {}, {})
    for group, named in zip(stored, layout, strict=True):
        for number, key in zip(group["params"], named.keys, strict=True):
            entry = state.get(number)
            if entry is None:
                continue
            # apex counts in the group, torch and DeepSpeed for each parameter
            found.steps[key] = updates = int(entry.get("step", group.get("step", 0)))
            if not 0 <= updates < MOST_UPDATES:
                raise ValueError(f"{updates} updates of {key}")
            found.mean[key], found.square[key] = entry["exp_avg"], entry["exp_avg_sq"]
    return found


def _fits(found: Moments, model: GPT, shards: int) -> bool:
    for key, parameter in model.named_parameters():
        shape = list(parameter.shape)
        dimension = cut_dimension(model, key)
        if dimension is not None:
            shape[dimension] //= shards
        for moment in (found.mean.get(key), found.square.get(key)):
            if not isinstance(moment, Tensor) or unusable(moment):
                return False
            if list(moment.shape) != shape or moment.dtype != torch.float32:
                return False
            if not torch.isfinite(moment).all():
                return False
        if bool((found.square[key] < 0).any()):  # Adam takes its root
            return False
    return True


# ---- writing -------------------------------------------------------------------------------------


def optimizer_state(
    layout: list[Group], config: Config, step: int, moments: Moments | None
) -> dict[str, Any]:
    """The state dict of NeoX's Adam; `moments` are one shard's, None: it starts fresh.

    The entries of a group are those of torch's AdamW and of DeepSpeed's and apex's FusedAdam
    together: loading replaces a group's entries by the stored ones, whichever NeoX finds installed.
    """
    params = config.optimizer.params
    state: dict[int, dict[str, Any]] = {}
    stored: list[dict[str, Any]] = []
    for group in layout:
        first = sum(len(other["params"]) for other in stored)
        entries: dict[str, Any] = {
            "name": group.name,
            "params": list(range(first, first + len(group.keys))),
            "lr": learning_rate(config, step),
            "betas": tuple(params.betas),
            "eps": params.eps,
            "weight_decay": group.weight_decay,
            "bias_correction": True,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "fused": None,
            "capturable": False,
            "differentiable": False,
            "decoupled_weight_decay": True,
        }
        if moments is not None:
            entries["step"] = moments.steps[group.keys[0]]
            for number, key in zip(entries["params"], group.keys, strict=True):
                # An integer: FusedAdam needs one, and torch makes its tensor of it.
                state[number] = {
                    "step": moments.steps[key],
                    "exp_avg": moments.mean[key],
                    "exp_avg_sq": moments.square[key],
                }
        stored.append(entries)
    return {"state": state, "param_groups": stored}
