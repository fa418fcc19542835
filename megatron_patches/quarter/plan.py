"""plan.json: everything that a run on a bare machine needs to know, resolved and checked beforehand."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from data_prep.indexed import IndexedDataset
from megatron_patches.standalone.fingerprints import git_sha, tokenizer_fingerprint, write_json
from megatron_patches.standalone.shape import ModelShape

FORMAT = "gpu_quarter_hour 3"
PLAN = "plan.json"
MAX_BYTES = 60_000_000  # of all files of a prepared folder together
T = TypeVar("T")


class PlanError(ValueError):
    """A request or a prepared folder that cannot be right; the message says what to do."""


@dataclass(frozen=True)
class Params:
    lr: float
    betas: tuple[float, ...]
    eps: float


@dataclass(frozen=True)
class Optimizer:
    params: Params


@dataclass(frozen=True)
class Training:
    """The keys of a configuration that training reads, under their names there.

    `batch` is the number of sequences a step, `train_iters` the most steps that shall be taken.
    """

    pos_emb: str
    dataset: str
    seed: int
    seq_length: int
    batch: int
    train_iters: int
    lr_decay_iters: int
    lr_decay_style: str
    min_lr: float
    warmup: float
    weight_decay: float
    position_weight_decay: bool
    gradient_clipping: float
    log_interval: int
    precision: str  # "bfloat16" or "float32": of the weights in the model
    optimizer: Optimizer

    @property
    def dataset_name(self) -> str:
        """The same, under the name that `Config` has for it."""
        return self.dataset

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq_length


@dataclass(frozen=True)
class PlannedRun:
    """One model. `options` tells variants of a method apart in result rows."""

    name: str
    config_sha: str
    options: dict[str, Any]
    parameters: int
    shape: ModelShape
    training: Training


@dataclass(frozen=True)
class Evaluation:
    lengths: tuple[int, ...]
    protocols: tuple[str, ...]
    max_tokens: int


@dataclass(frozen=True)
class Text:
    """One split: what its `.bin/.idx` must hold."""

    fingerprint: str
    tokens: int
    documents: int


@dataclass(frozen=True)
class QuarterPlan:
    """A study for a bare machine. `git_sha` is the commit that prepared it."""

    study: str
    git_sha: str
    tokenizer: str
    text_bytes: tuple[int, ...]  # that are scored at each length; empty: not known
    train: Text
    valid: Text
    evaluation: Evaluation
    runs: tuple[PlannedRun, ...]


def write_plan(folder: Path, plan: QuarterPlan) -> None:
    write_json(folder / PLAN, {"format": FORMAT, **dataclasses.asdict(plan)})


def read_plan(folder: Path) -> QuarterPlan:
    """Raises PlanError, with the file and what is wrong, for anything but a whole plan."""
    path = folder / PLAN
    again = "make the folder again: python scripts/gpu_quarter_hour.py prepare"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PlanError(f"{path} is missing: --data names no prepared folder; {again}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{path} cannot be read ({error}); {again}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise PlanError(f"{path} is not of the format {FORMAT!r}; {again}")
    del content["format"]
    try:
        plan = typed(QuarterPlan, content, "plan")
    except TypeError as error:
        raise PlanError(f"{path}: {error}; {again}") from error
    if not plan.runs:
        raise PlanError(f"{path} has no runs; {again}")
    return plan


def open_text(folder: Path, name: str, plan: QuarterPlan) -> IndexedDataset:
    """The split `name` ("train" or "valid"), hashed and compared with the plan.

    Raises DataError for missing or damaged files, PlanError where they are another text.
    """
    wanted: Text = getattr(plan, name)
    dataset = IndexedDataset(folder / name)
    dataset.verify()
    found = (dataset.fingerprint, len(dataset.tokens), len(dataset))
    if found != (wanted.fingerprint, wanted.tokens, wanted.documents):
        raise PlanError(
            f"{folder / name}.bin holds another text (fingerprint, tokens, documents {found}) than "
            f"{PLAN} was made for ({wanted}): copy the whole prepared folder"
        )
    if tokenizer_fingerprint([dataset]) != plan.tokenizer:
        raise PlanError(f"{folder / name} was cut with another tokenizer than {PLAN} says")
    largest, vocabulary = int(dataset.tokens.max()), plan.runs[0].shape.vocabulary
    if largest >= vocabulary:
        raise PlanError(f"{folder / name}: token {largest} is outside the {vocabulary} entries")
    return dataset


def commit_here(plan: QuarterPlan) -> str:
    """The commit that runs: git's word, else, on a machine without git, that of `prepare`."""
    found = git_sha()
    return plan.git_sha if found == "unknown" else found


def typed(cls: type[T], value: Any, where: str) -> T:
    """`value`, plain JSON, as the dataclass `cls`: every field, no other, each of its type.

    Raises TypeError that names the place.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{where} is not an object")
    hints = typing.get_type_hints(cls)
    wrong = sorted(set(hints) ^ set(value))
    if wrong:
        raise TypeError(f"{where}: missing or unknown: {', '.join(wrong)}")
    return cls(**{key: _typed(hints[key], value[key], f"{where}.{key}") for key in hints})


def _typed(hint: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return typed(hint, value, where)  # type: ignore[arg-type]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise TypeError(f"{where} is not a list")
        return tuple(_typed(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    kinds = arguments if origin in (typing.Union, types.UnionType) else (origin or hint,)
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds:
        return float(value)
    # bool is an int for isinstance, and 1 must not pass for true either
    if not any(type(value) is kind for kind in kinds):
        raise TypeError(f"{where}: {value!r} is not {' or '.join(k.__name__ for k in kinds)}")
    return value
