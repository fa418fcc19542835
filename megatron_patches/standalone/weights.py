"""Weights of a run of either engine, read as untrusted input and laid out for `GPT`.

Two layouts exist: one file for all layers (`mp_rank_RR_model_states.pt`, the standalone engine and
NeoX with pipe_parallel_size 0) and one file a layer (`layer_NN-model_RR-model_states.pt`, NeoX with
pipeline stages and the KERPLE authors' fork). RR counts tensor-parallel shards, which are merged.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_patches.standalone import manifest
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.tensor_kinds import unusable
from megatron_patches.training.untrusted import damaged

State = dict[str, Tensor]

_SINGLE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_STEP = re.compile(r"global_step([0-9]{1,18})")
# The MLP's names before GPT-NeoX renamed them.
_OLD_NAMES = {".mlp.dense_h_to_4h.": ".mlp.linear1.", ".mlp.dense_4h_to_h.": ".mlp.linear2."}
# Megatron's cuts: rows of the first kind, columns of the second; all else is equal on every shard.
_CUT_ROWS = re.compile(
    r"(query_key_value\.(weight|bias)|linear1\.(weight|bias)|word_embeddings\.weight"
    r"|final_linear\.weight)$"
)
_CUT_COLUMNS = re.compile(r"(attention\.dense|linear2)\.weight$")


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, partial or of another model."""


def step_folder(path: str | Path) -> Path:
    """The `global_stepN` folder that `path` means: itself, or the one that its `latest` names.

    Raises CheckpointError naming what is missing.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder")
    if any(_SINGLE.fullmatch(f.name) or _LAYER.fullmatch(f.name) for f in path.iterdir()):
        return path
    latest = path / "latest"
    if not latest.is_file():
        steps = sorted(f.name for f in path.iterdir() if _STEP.fullmatch(f.name))
        hint = f"; name one of its steps: {', '.join(steps)}" if steps else ""
        raise CheckpointError(f"{path}: holds neither weights nor a file `latest`{hint}")
    tag = read_latest(path)
    if not _STEP.fullmatch(tag):  # also keeps a path such as ../../x out
        raise CheckpointError(f"{latest}: names {tag[:60]!r}, expected global_step<N>")
    if not (path / tag).is_dir():
        raise CheckpointError(f"{latest}: names {tag}, which is not in {path}")
    return path / tag


def read_latest(path: Path) -> str:
    """What the file `latest` of a run says; of a long one the beginning, which names no step."""
    with open(path / "latest", encoding="utf-8", errors="replace") as stream:
        return stream.read(80).strip()


def is_step(folder: Path) -> bool:
    """Whether the name is that of one step, `global_step<N>`."""
    return _STEP.fullmatch(folder.name) is not None


def step_number(folder: Path) -> int:
    match = _STEP.fullmatch(folder.name)
    return int(match.group(1)) if match else 0


def _allowed_globals() -> list[Any]:
    """What else than tensors NeoX's and DeepSpeed's files hold: numpy's and Python's random states."""
    import _codecs

    import numpy as np
    from numpy._core import multiarray

    dtypes = [type(np.dtype(kind)) for kind in ("u4", "u8", "i4", "i8", "f4", "f8")]
    return [multiarray._reconstruct, np.ndarray, np.dtype, _codecs.encode, *dtypes]


def safe_load(path: Path, also: Sequence[Any] = ()) -> Any:
    """`torch.load` that runs no code: tensors, plain data, numpy arrays and the classes in `also`.

    Raises CheckpointError for anything else, and for a damaged file.
    """
    try:
        with torch.serialization.safe_globals([*_allowed_globals(), *also]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises whatever its first wrong step does
        raise CheckpointError(
            f"{path}: damaged, or holds more than weights ({_why(error)})"
        ) from error


def _why(error: Exception) -> str:
    """The cause alone: torch's message goes on to advise loading the file without this care."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and "weights_only" not in line and "failed" not in line]
    return told[0].split(" was not an allowed")[0][:200] if told else type(error).__name__


def _tensors(path: Path, mapping: Any, prefix: str = "") -> State:
    if not isinstance(mapping, dict):
        raise CheckpointError(f"{path}: expected a mapping of tensors, found {type(mapping)}")
    found = {str(key): value for key, value in mapping.items() if value is not None}
    bad = [f"{key} ({why})" for key, value in sorted(found.items()) if (why := unusable(value))]
    if bad:
        listed = ", ".join(bad[:5])
        raise CheckpointError(f"{path}: these entries are no tensors of floating numbers: {listed}")
    return {prefix + key: value for key, value in found.items()}


def single_files(folder: Path) -> dict[int, Path]:
    """The files `mp_rank_RR_model_states.pt` of a step folder by RR."""
    matches = [(_SINGLE.fullmatch(file.name), file) for file in sorted(folder.iterdir())]
    return {int(match.group(1)): file for match, file in matches if match}


def read_shards(folder: Path) -> list[State]:
    """One state dict a tensor-parallel shard, with the keys of `GPT` (old names translated).

    Raises CheckpointError when files are missing, damaged or contradict each other.
    """
    singles = single_files(folder)
    layers: dict[int, dict[int, Path]] = defaultdict(dict)
    for file in sorted(folder.iterdir()):
        if match := _LAYER.fullmatch(file.name):
            layers[int(match.group(2))][int(match.group(1))] = file
    read = [*singles.values(), *(file for files in layers.values() for file in files.values())]
    try:
        faults = manifest.check(folder, [file.name for file in read])
        if not (folder / manifest.NAME).is_file():
            faults = [f"{file}: damaged: its checksums differ" for file in read if damaged(file)]
    except ValueError as error:
        faults = [str(error)]
    if faults:
        raise CheckpointError(faults[0])
    if layers:
        shards = _read_layers(folder, layers)
    elif singles:
        shards = {}
        for rank, file in singles.items():
            whole = safe_load(file)
            module = whole.get("module") if isinstance(whole, dict) else None
            if module is None:
                raise CheckpointError(f"{file}: has no weights (its entry `module` is empty)")
            shards[rank] = _tensors(file, module)
    else:
        sliced = any(folder.glob("zero_pp_rank_*"))
        hint = (
            "; ZeRO 3 left slices of the weights there: put them together with the zero_to_fp32.py that "
            "DeepSpeed writes beside them"
        )
        raise CheckpointError(
            f"{folder}: holds no mp_rank_* or layer_* files{hint if sliced else ''}"
        )
    if sorted(shards) != list(range(len(shards))):
        raise CheckpointError(f"{folder}: shards {sorted(shards)} are there, one is missing")
    return [_translated(shards[rank]) for rank in sorted(shards)]


def _read_layers(folder: Path, layers: dict[int, dict[int, Path]]) -> dict[int, State]:
    numbers = {frozenset(files) for files in layers.values()}
    if len(numbers) != 1:
        raise CheckpointError(f"{folder}: its shards do not have the same layer files")
    shards: dict[int, State] = {}
    for rank, files in layers.items():
        shards[rank] = {}
        for number, file in sorted(files.items()):
            shards[rank].update(_tensors(file, safe_load(file), f"sequential.{number}."))
    return shards


def _translated(state: State) -> State:
    found: State = {}
    for key, tensor in state.items():
        for old, new in _OLD_NAMES.items():
            key = key.replace(old, new)
        found[key] = tensor
    return found


def cut_dimension(model: GPT, key: str) -> int | None:
    """The dimension along which tensor parallelism cuts the tensor `key`; None: whole everywhere."""
    own = position_key(model, key)
    if own is not None:
        return model.position_method.head_dim_of.get(own)
    if _CUT_ROWS.search(key):
        return 0
    return 1 if _CUT_COLUMNS.search(key) else None


def position_key(model: GPT, key: str) -> str | None:
    """The name within its position method of the tensor `key`; None: it belongs to no method."""
    _, found, name = key.partition(f".{model.position_method.module_name}.")
    return name if found else None


def merge_shards(shards: list[State], model: GPT, source: str) -> State:
    """One state dict from the tensor-parallel shards of `source`, heads in their order.

    Raises CheckpointError when shards disagree on what should be equal.
    """
    if len(shards) == 1:
        return shards[0]
    keys = {frozenset(state) for state in shards}
    if len(keys) != 1:
        raise CheckpointError(f"{source}: its tensor-parallel shards hold different tensors")
    merged: State = {}
    for key in shards[0]:
        parts = [state[key] for state in shards]
        dimension = cut_dimension(model, key)
        if dimension is not None:
            across = {_across(part, dimension) for part in parts}
            if len(across) != 1 or parts[0].dim() <= dimension:
                raise CheckpointError(f"{source}: {key}: its parts do not fit together")
            merged[key] = torch.cat(parts, dim=dimension)
        elif any(not torch.equal(parts[0], part) for part in parts[1:]):
            raise CheckpointError(
                f"{source}: {key}: should be the same on all tensor-parallel shards, is not"
            )
        else:
            merged[key] = parts[0]
    return merged


def _across(part: Tensor, dimension: int) -> tuple[Any, ...]:
    """What the parts of a tensor share: dtype and all sides but the one that is cut."""
    sides = list(part.shape)
    return (part.dtype, *sides[:dimension], len(sides), *sides[dimension + 1 :])


def fill(model: GPT, state: State, source: str) -> None:
    """Copy `state` into `model`, strictly.

    Derived tensors that other versions store (frequencies, slopes) must agree with the model's own,
    which stay: another convention of slopes is another model. Copies of a shared position method must
    agree with each other.

    Raises CheckpointError that lists every missing, surplus, wrongly shaped or non-finite tensor.
    """
    wanted = model.state_dict()
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    problems = [f"{key}: missing" for key in sorted(set(wanted) - set(state))]
    kept: State = {}
    first_of: dict[int, str] = {}
    for key, tensor in sorted(state.items()):
        own = wanted.get(key)
        if own is None or key in buffers:
            problems += _check_derived(model, key, tensor, own)
            if own is not None:
                kept[key] = own
            continue
        shape = "" if tensor.shape == own.shape else f"shape {tuple(tensor.shape)}"
        if wrong := unusable(tensor) or shape:
            problems.append(f"{key}: {wrong}, expected {tuple(own.shape)}")
            continue
        if not torch.isfinite(tensor.to(own.dtype)).all():
            problems.append(f"{key}: holds NaN or infinite values")
        first = first_of.setdefault(own.data_ptr() if own.numel() else id(own), key)
        if first != key and not torch.equal(kept[first], tensor):
            problems.append(
                f"{key}: differs from {first}, which the model shares; "
                "was it trained with position_sharing: layer?"
            )
        kept[key] = tensor
    if problems:
        more = [f"and {len(problems) - 20} more"] if len(problems) > 20 else []
        listed = "\n  ".join([f"this {model.shape.pos_emb} model:", *problems[:20], *more])
        raise CheckpointError(f"{source} does not fit {listed}")
    model.load_state_dict(kept, strict=True)


def _check_derived(model: GPT, key: str, tensor: Tensor, own: Tensor | None) -> list[str]:
    """A stored tensor that the model computes itself: equal to the model's own, or a problem."""
    owner, _, leaf = key.rpartition(".")
    if own is None and owner.endswith("." + model.position_method.module_name):
        candidate = getattr(model.position_method, leaf, None)
        own = candidate if isinstance(candidate, Tensor) else None
    if own is None:
        return [f"{key}: not part of this model"]
    if tensor.shape != own.shape:
        return [f"{key}: shape {tuple(tensor.shape)}, expected {tuple(own.shape)}"]
    tolerance = 1e-5 if tensor.dtype == torch.float32 else 1e-2
    if not torch.allclose(tensor.float(), own.float(), rtol=tolerance, atol=0.0):
        return [f"{key}: another convention than this model's (values differ)"]
    return []
