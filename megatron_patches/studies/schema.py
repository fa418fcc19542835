"""The schema of a study file: few keys of its own, NeoX's keys only inside the override sets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, ValidationError

from megatron_patches.config import Config, ConfigError
from megatron_patches.config.keys_base import Keys, NonNegative, Positive
from megatron_patches.config.keys_own import Own
from megatron_patches.config.messages import MISSING, field_problems, nearest
from megatron_patches.config.reading import duplicates, normal, read_file
from megatron_patches.studies.questions import Eval, eval_problems, repeated

ROOT = Path(__file__).resolve().parents[2]

Overrides: TypeAlias = dict[str, Any]  # NeoX keys, dotted ones as after --set
Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.]*$")]

# The sweep sets these itself, from the study's own keys.
OWN = {
    "seed": "seeds",
    "seq_length": "train_lengths",
    "max_position_embeddings": "train_lengths",
    "pos_emb": "methods",
    "dataset": "datasets",
    "save": "checkpoints",
    "run_name": "checkpoints",
    "variant": "factors",
    **{key: "eval" for key in Own.model_fields if key.startswith("eval_")},
}
# Of the studies that follow another: what they may choose from its runs, and what is theirs.
CHOSEN = ("methods", "datasets", "seeds", "train_lengths")
THEIRS = (*CHOSEN, "follows", "eval", "output")
NOT_KEYS = ("file", "name", "lengths_named", "training_dir", "moved")


class Study(Keys):
    """methods x datasets x seeds x train_lengths x factors, each trained once and scored by `eval`."""

    base: str
    cluster: str | None = None
    methods: Annotated[list[str], Field(min_length=1)]
    datasets: Annotated[list[str], Field(min_length=1)]
    seeds: Annotated[list[NonNegative], Field(min_length=1)]
    train_lengths: Annotated[list[Positive], Field(min_length=1)]
    overrides: Overrides = Field(default_factory=dict)
    # For one training length, in quotes or not: a batch that keeps the tokens of a step, say.
    length_overrides: dict[str, Overrides] = Field(default_factory=dict)
    # factor -> level -> overrides; the levels of all factors are crossed.
    factors: dict[Name, dict[Name, Overrides]] = Field(default_factory=dict)
    eval: Eval
    output: str | None = None  # None: results/<study>
    checkpoints: str | None = None  # None: checkpoints/<study>
    # Another study beside this one, whose trained runs are asked more: it decides everything but
    # `eval`, `output`, and which of its methods, datasets, seeds and training lengths are meant.
    follows: Name | None = None
    # Not keys of the file: the file itself; its stem, after which folders and jobs are named; whether
    # the names of runs hold the training length, as they do in a study of several; where the lines of
    # trainings go, None: `output` (a study that follows another has that of the other); whether
    # `output` is that of a command line.
    file: Path
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    lengths_named: bool
    training_dir: Path | None = None
    moved: bool = False

    @property
    def output_dir(self) -> Path:
        return ROOT / (self.output or f"results/{self.name}")

    @property
    def checkpoint_dir(self) -> Path:
        return ROOT / (self.checkpoints or f"checkpoints/{self.name}")

    @property
    def training_file(self) -> Path:
        return (self.training_dir or self.output_dir) / "training.jsonl"

    def with_output(self, folder: Path) -> Study:
        """The study with all that it writes about its runs in `folder`, in place of `output`."""
        changes = {"output": str(folder.resolve()), "training_dir": None, "moved": True}
        return self.model_copy(update=changes)

    def override_sets(self) -> Iterator[tuple[str, Overrides]]:
        """Every set with the dotted key under which it stands."""
        yield "overrides", self.overrides
        for length, changes in self.length_overrides.items():
            yield f"length_overrides.{length}", changes
        for factor, levels in self.factors.items():
            for level, changes in levels.items():
                yield f"factors.{factor}.{level}", changes


def layer_file(layer: str, name: str) -> Path:
    """configs/<layer>/<name>.yml, or the file itself where `name` ends in .yml (from the root)."""
    if name.endswith((".yml", ".yaml")):
        return ROOT / name
    return ROOT / "configs" / layer / f"{name}.yml"


def shown(path: Path) -> str:
    """A path as a command started in the repository's root may spell it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def load_study(path: str | Path) -> Study:
    """The study in a YAML file, checked.

    Raises ConfigError, one line a problem: an unknown key with the nearest ones, a wrong type, a
    method or file that does not exist, overrides of what the study itself sets.
    """
    path = Path(path)
    entries = read_file(path)
    problems = duplicates(entries)
    places: dict[str, str] = {}
    values: dict[str, Any] = {}
    known = [key for key in Study.model_fields if key not in NOT_KEYS]
    for entry in entries:
        places.setdefault(entry.key, entry.where)
        places.update(entry.lines)
        if entry.key in known:
            values.setdefault(entry.key, entry.value)
        else:
            problems.append(f"{entry.where}: unknown key `{entry.key}`{nearest(entry.key, known)}")
    parent = _followed(path, values.get("follows"), places)
    if parent is not None:
        problems += [f"{places.get(key, path)}: {text}" for key, text in _mixed(values, parent)]
        values = {**_handed_on(parent), **values}
    lengths = values.get("train_lengths")
    named = isinstance(lengths, list) and len(lengths) > 1
    values |= {"file": path, "name": path.stem}
    values["lengths_named"] = named if parent is None else parent.lengths_named
    values["training_dir"] = None if parent is None else parent.output_dir
    try:
        study = Study.model_validate(values)
    except ValidationError as error:
        found = field_problems(Study, error.errors(include_url=False), places)
        problems += [
            line.replace(MISSING, f"{path}: the study lacks the required")
            if line.startswith(MISSING)
            else line
            for line in found
        ]
        raise ConfigError.of(problems) from None

    def where(key: str) -> str:
        return places.get(key) or places.get(key.partition(".")[0]) or str(path)

    problems += [f"{where(key)}: {text}" for key, text in _problems(study)]
    if problems:
        raise ConfigError.of(problems)
    return study


def _followed(path: Path, name: Any, places: Mapping[str, str]) -> Study | None:
    """The study that this one follows; ConfigError where there is none, or it follows another."""
    if not isinstance(name, str):
        return None
    where, other = places["follows"], path.parent / f"{name}.yml"
    if not other.is_file():
        raise ConfigError(f"{where}: `follows: {name}`: no file {shown(other)}")
    if name == path.stem:
        raise ConfigError(f"{where}: `follows: {name}`: a study cannot follow itself")
    # Asked before it is loaded, or studies that follow each other would be loaded without an end.
    theirs = [entry.value for entry in read_file(other) if entry.key == "follows" and entry.value]
    if theirs:
        raise ConfigError(f"{where}: `follows: {name}`: it follows {theirs[0]}: name that")
    return load_study(other)


def _handed_on(study: Study) -> dict[str, Any]:
    """What a study that follows takes over."""
    own = (*NOT_KEYS, "eval", "output", "follows")
    values = {key: getattr(study, key) for key in Study.model_fields if key not in own}
    return {**values, "checkpoints": shown(study.checkpoint_dir)}


def _mixed(values: Mapping[str, Any], parent: Study) -> Iterator[tuple[str, str]]:
    """(key, sentence) where a study asks for runs that the one it follows does not have."""
    for key, value in values.items():
        if key not in THEIRS:
            yield key, f"`{key}`: `follows: {parent.name}` decides this; leave it out"
        for item in value if key in CHOSEN and isinstance(value, list) else []:
            if item not in getattr(parent, key):
                yield key, f"`{key}: {item}`: {parent.name} has no such runs"


def _problems(study: Study) -> Iterator[tuple[str, str]]:
    """(key, sentence) for what no single type shows."""
    yield from _layer_problems(study)
    for key in ("methods", "datasets", "seeds", "train_lengths"):
        yield from repeated(key, getattr(study, key))
    for length in study.length_overrides if study.follows is None else ():
        if length not in map(str, study.train_lengths):
            listed = ", ".join(map(str, study.train_lengths))
            yield f"length_overrides.{length}", f"{length} is none of `train_lengths` {listed}"
    for factor, levels in study.factors.items():
        if not levels:
            yield f"factors.{factor}", f"`factors.{factor}` has no level"
    for key, changes in study.override_sets():
        yield from _override_problems(key, changes)
    yield from eval_problems(study.eval)
    folder = study.output
    if folder and not Path(folder).is_absolute() and not _under_results(folder):
        yield "output", f"`output: {folder}` must be a folder under results/"


def _under_results(folder: str) -> bool:
    return (ROOT / folder).resolve().is_relative_to((ROOT / "results").resolve())


def _layer_problems(study: Study) -> Iterator[tuple[str, str]]:
    asked = {"base": [study.base], "method": study.methods, "dataset": study.datasets}
    if study.cluster is not None:
        asked["cluster"] = [study.cluster]
    for layer, names in asked.items():
        key = f"{layer}s" if f"{layer}s" in Study.model_fields else layer
        there = sorted(file.stem for file in (ROOT / "configs" / layer).glob("*.yml"))
        for name in names:
            file = layer_file(layer, name)
            if not os.path.isfile(file):  # False for a name that is too long as well
                near = "" if name.endswith(".yml") else nearest(name, there)
                yield key, f"`{key}: {name}`: no file {shown(file)}{near}"


def _override_problems(key: str, changes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in changes:
        top = normal(name.partition(".")[0])
        place = f"{key}.{name}"
        if top in OWN:
            yield place, f"`{place}`: the study's key `{OWN[top]}` decides this"
        elif top not in Config.model_fields:
            yield place, f"unknown key `{place}`{nearest(top, Config.model_fields)}"
