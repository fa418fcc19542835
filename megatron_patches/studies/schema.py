"""The schema of a study file: few keys of its own, NeoX's keys only inside the override sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import Field, ValidationError

from megatron_patches.config import Config, ConfigError
from megatron_patches.config.keys_base import Keys, NonNegative, Positive
from megatron_patches.config.messages import field_problems, nearest
from megatron_patches.config.reading import duplicates, normal, read_file

ROOT = Path(__file__).resolve().parents[2]
# What `eval.py` can do; one list, the configuration's.
PROTOCOLS: tuple[str, ...] = get_args(Config.model_fields["eval_protocol"].annotation)

Overrides: TypeAlias = dict[str, Any]  # NeoX keys, dotted ones as after --set
Name: TypeAlias = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.]*$")]

Split: TypeAlias = Literal["valid", "test"]

# The sweep sets these itself, from the study's own keys.
OWN = {
    "seed": "seeds",
    "seq_length": "train_lengths",
    "max_position_embeddings": "train_lengths",
    "pos_emb": "methods",
    "dataset": "datasets",
    "save": "checkpoints",
    "run_name": "checkpoints",
    **{f"eval_{key}": "eval" for key in ("lengths", "protocol", "stride", "last_k", "split")},
    "eval_batch_size": "eval",
}


def _valid() -> list[Split]:
    return ["valid"]


class Eval(Keys):
    """What every trained model is scored on. Lengths, `stride`, `last_k`, `max_tokens` in tokens."""

    lengths: Annotated[list[Positive], Field(min_length=1)]
    protocols: Annotated[list[str], Field(min_length=1)] = Field(
        default_factory=lambda: ["nonoverlap"]
    )
    splits: Annotated[list[Split], Field(min_length=1)] = Field(default_factory=_valid)
    max_tokens: Annotated[int, Field(ge=2)] | None = None  # None: the whole split
    stride: Positive | None = None  # of `sliding`; of `last` where it shall be denser
    last_k: Positive | None = None  # of `last`
    batch_size: Positive | None = None
    kernels: bool = False  # also write the learned kernels, OUTPUT/kernels/<run>.jsonl


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
    # The file's stem, never a key of the file: folders and jobs are named after it.
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]

    @property
    def output_dir(self) -> Path:
        return ROOT / (self.output or f"results/{self.name}")

    @property
    def checkpoint_dir(self) -> Path:
        return ROOT / (self.checkpoints or f"checkpoints/{self.name}")

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
    known = [key for key in Study.model_fields if key != "name"]
    for entry in entries:
        places.setdefault(entry.key, entry.where)
        places.update(entry.lines)
        if entry.key in known:
            values.setdefault(entry.key, entry.value)
        else:
            problems.append(f"{entry.where}: unknown key `{entry.key}`{nearest(entry.key, known)}")
    try:
        study = Study.model_validate({**values, "name": path.stem})
    except ValidationError as error:
        found = field_problems(Study, error.errors(include_url=False), places)
        missing = "no file sets the required"
        problems += [
            line.replace(missing, f"{path}: the study lacks the required")
            if line.startswith(missing)
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


def _problems(study: Study) -> Iterator[tuple[str, str]]:
    """(key, sentence) for what no single type shows."""
    yield from _layer_problems(study)
    for key in ("methods", "datasets", "seeds", "train_lengths"):
        yield from _repeated(key, getattr(study, key))
    for key in ("lengths", "protocols", "splits"):
        yield from _repeated(f"eval.{key}", getattr(study.eval, key))
    for length in study.length_overrides:
        if length not in map(str, study.train_lengths):
            listed = ", ".join(map(str, study.train_lengths))
            yield f"length_overrides.{length}", f"{length} is none of `train_lengths` {listed}"
    for factor, levels in study.factors.items():
        if not levels:
            yield f"factors.{factor}", f"`factors.{factor}` has no level"
    for key, changes in study.override_sets():
        yield from _override_problems(key, changes)
    yield from _eval_problems(study.eval)
    folder = study.output
    if folder and not Path(folder).is_absolute() and Path(folder).parts[0] != "results":
        yield "output", f"`output: {folder}` must be a folder under results/"


def _layer_problems(study: Study) -> Iterator[tuple[str, str]]:
    asked = {"base": [study.base], "method": study.methods, "dataset": study.datasets}
    if study.cluster is not None:
        asked["cluster"] = [study.cluster]
    for layer, names in asked.items():
        key = f"{layer}s" if f"{layer}s" in Study.model_fields else layer
        there = sorted(file.stem for file in (ROOT / "configs" / layer).glob("*.yml"))
        for name in names:
            file = layer_file(layer, name)
            if not file.is_file():
                near = "" if name.endswith(".yml") else nearest(name, there)
                yield key, f"`{key}: {name}`: no file {shown(file)}{near}"


def _repeated(key: str, items: Iterable[Any]) -> Iterator[tuple[str, str]]:
    seen = list(items)
    for item in dict.fromkeys(item for item in seen if seen.count(item) > 1):
        yield key, f"`{key}` lists {item} twice"


def _override_problems(key: str, changes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in changes:
        top = normal(name.partition(".")[0])
        place = f"{key}.{name}"
        if top in OWN:
            yield place, f"`{place}`: the study's key `{OWN[top]}` decides this"
        elif top not in Config.model_fields:
            yield place, f"unknown key `{place}`{nearest(top, Config.model_fields)}"


def _eval_problems(asked: Eval) -> Iterator[tuple[str, str]]:
    for protocol in asked.protocols:
        if protocol not in PROTOCOLS:
            choice = ", ".join(PROTOCOLS)
            yield (
                "eval.protocols",
                f"`eval.protocols: {protocol}` is none of {choice}{nearest(protocol, PROTOCOLS)}",
            )
    shortest = min(asked.lengths)
    if "last" in asked.protocols:
        if asked.last_k is None:
            yield "eval.protocols", "protocol `last` needs `eval.last_k`"
        elif asked.last_k > shortest:
            yield (
                "eval.last_k",
                f"`eval.last_k: {asked.last_k}` is more than the shortest length, {shortest}",
            )
    elif asked.last_k is not None:
        yield "eval.last_k", "`eval.last_k` belongs to protocol `last`, which is not asked for"
    if "sliding" in asked.protocols:
        if asked.stride is None:
            yield "eval.protocols", "protocol `sliding` needs `eval.stride`"
        elif asked.stride > shortest:
            yield (
                "eval.stride",
                f"`eval.stride: {asked.stride}` would skip targets of windows of {shortest}",
            )
    elif asked.stride is not None and "last" not in asked.protocols:
        yield "eval.stride", "`eval.stride` belongs to protocols `sliding` and `last`"
