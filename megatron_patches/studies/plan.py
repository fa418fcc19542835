"""From a study to its runs: composed configurations, exact commands, and what is finished already."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path

from megatron_patches.config import (
    ConfigError,
    batch_arithmetic,
    check_standalone,
    config_sha,
)
from megatron_patches.config.compose import compose_entries
from megatron_patches.config.reading import Entry, flow_yaml, read_file
from megatron_patches.studies.kernels import evaluation_options, with_kernels
from megatron_patches.studies.progress import Cells, check_cut, no_kernels, open_cells, trained
from megatron_patches.studies.run import Run
from megatron_patches.studies.schema import Overrides, Study, layer_file, shown
from megatron_patches.studies.steps import Step, cells, evaluations, kernel_file
from megatron_patches.studies.texts import check_trained, data_prefixes, prepared


@dataclass(frozen=True)
class Plan:
    """All runs of a study; `trained` and `open_cells` say what the files already hold."""

    study: Study
    runs: tuple[Run, ...]
    trained: frozenset[str]  # names of runs whose last checkpoint is there
    left: Mapping[tuple[str, str], Cells]  # (run, title of a step) -> cells without an answer
    without_kernels: frozenset[str] = (
        frozenset()
    )  # names of runs whose file of kernels is not there

    @property
    def open_cells(self) -> dict[tuple[str, str], int]:
        """(run, title of a step) -> how many cells without an answer."""
        return {key: len(found) for key, found in self.left.items()}

    def steps(self, run: Run) -> list[Step]:
        """What is left of a run; nothing where every cell has its answer and the kernels are there."""
        left = [step for step in run.evaluations if self._open(run, step)]
        if not left or run.name in self.trained:
            return left
        # Of a model that is trained anew the kernels are written anew.
        renewed = [s for s in run.evaluations if s in left or s.kernels and self._kernels_of(run)]
        return [run.train, *renewed]

    def _open(self, run: Run, step: Step) -> bool:
        if step.kernels is not None:
            return run.name in self.without_kernels and self._kernels_of(run)
        return bool(self.left[run.name, step.title])

    def _kernels_of(self, run: Run) -> bool:
        """Whether the run's method has any; asked only where it matters, because it takes seconds."""
        return run.config.pos_emb in self._with_kernels

    @cached_property
    def _with_kernels(self) -> set[str]:
        return with_kernels(run.config.pos_emb for run in self.runs)

    @property
    def unfinished(self) -> list[Run]:
        return [run for run in self.runs if self.steps(run)]

    def cells(self, run: Run) -> int:
        """All cells of a run, with a result or without."""
        return sum(len(cells(self.study.eval, step)) for step in run.evaluations)

    def missing_data(self) -> dict[str, list[str]]:
        """Dataset -> prefixes of its files that are not there, for what is left of the runs."""
        found: dict[str, list[str]] = {}
        for run in self.runs:
            name = run.config.dataset_name
            # Scoring alone needs no training text, and kernels no text at all.
            splits = ["train" if step.trains else step.split for step in self.steps(run)]
            needed = dict.fromkeys(split for split in splits if split is not None)
            for prefix in data_prefixes(run.config, tuple(needed)) if needed else ():
                if not prepared(prefix) and prefix not in found.get(name, []):
                    found.setdefault(name, []).append(prefix)
        return found


def make_plan(study: Study, only: Sequence[str] = ()) -> Plan:
    """Runs of a study, those whose name matches a pattern of `only` (none: all).

    Seeds vary slowest, methods fastest, so that an interrupted study has whole comparisons.
    Raises ConfigError for a configuration that does not compose, for patterns that match nothing,
    for runs that would train the same model, for models that learned another text, for
    `eval.position_options` of other methods, and when `output` holds rows that were scored on another
    text or another cut of it.
    """
    check_cut(study)
    runs = tuple(_runs(study))
    repeated = {run.name for run in runs if sum(other.name == run.name for other in runs) > 1}
    if repeated:
        raise ConfigError(f"{study.name}: two runs are named {', '.join(sorted(repeated))}")
    _refuse_twins(study, runs)
    _refuse_options(study, runs)
    if only:
        runs = tuple(r for r in runs if any(fnmatch.fnmatchcase(r.name, p) for p in only))
        if not runs:
            raise ConfigError(f"--only {' '.join(only)}: no run of {study.name} has such a name")
    ready = [run for run in runs if trained(run)]
    check_trained(ready)
    bare = frozenset(run.name for run in runs if no_kernels(run))
    names = frozenset(run.name for run in ready)
    return Plan(study, runs, names, open_cells(study, runs), bare)


def _refuse_twins(study: Study, runs: Sequence[Run]) -> None:
    """ConfigError for two runs of one hash: the rows of the one would count as those of the other."""
    first: dict[str, Run] = {}
    for run in runs:
        other = first.setdefault(run.sha, run)
        if other is not run:
            raise ConfigError(
                f"{study.name}: {other.name} and {run.name} train the same model (configuration "
                f"{run.sha}): what tells them apart does not change it, so ask for one of them"
            )


def _refuse_options(study: Study, runs: Sequence[Run]) -> None:
    """ConfigError where a method does not let be set what `eval.position_options` sets."""
    asked = {key for given in study.eval.position_options if given != "none" for key in given}
    possible = evaluation_options(run.config.pos_emb for run in runs) if asked else {}
    for method, options in sorted(possible.items()):
        if wrong := ", ".join(sorted(asked - set(options))):
            raise ConfigError(
                f"{study.file}: `eval.position_options`: a trained {method} is not read with another "
                f"{wrong}; what may be set: {', '.join(options) or 'none'}. A study that `follows` this one "
                "can ask some of its methods alone"
            )


def _runs(study: Study) -> Iterator[Run]:
    levels = [[(factor, level) for level in found] for factor, found in study.factors.items()]
    axes = (study.seeds, study.train_lengths, study.datasets, product(*levels), study.methods)
    for seed, length, dataset, chosen, method in product(*axes):
        yield _run(study, method, dataset, seed, length, dict(chosen))


def _run(
    study: Study, method: str, dataset: str, seed: int, length: int, levels: dict[str, str]
) -> Run:
    parts = [Path(method).stem, Path(dataset).stem, str(seed)]
    parts += [str(length)] if study.lengths_named else []
    name = "-".join([*parts, *levels.values()])
    folder = study.checkpoint_dir / name
    layers = [("base", study.base), ("method", method), ("dataset", dataset)]
    layers += [("cluster", study.cluster)] if study.cluster else []
    files = [layer_file(layer, part) for layer, part in layers]
    own: Overrides = {"seed": seed, "seq_length": length, "max_position_embeddings": length}
    changes = _merged(study, length, levels)
    own |= {"variant": dict(levels)} if levels else {}
    changes |= {**own, "run_name": name, "save": shown(folder)}
    settings = tuple(f"{key}={flow_yaml(value)}" for key, value in changes.items())
    try:
        entries: list[Entry] = [entry for file in files for entry in _read(file)]
        config = compose_entries(entries, settings)
        if config.use_wandb and config.wandb_group is None:
            settings += (f"wandb_group={flow_yaml(study.name)}",)
            config = compose_entries(entries, settings)
        check_standalone(config)
        batch_arithmetic(config, 1)
    except ConfigError as error:
        lines = "\n".join(f"{study.name}, run {name}: {line}" for line in str(error).splitlines())
        raise ConfigError(lines) from None
    sets = [word for setting in settings for word in ("--set", setting)]
    paths = tuple(shown(file) for file in files)
    return Run(
        name=name,
        files=paths,
        changes=settings,
        config=config,
        sha=config_sha(config),
        folder=folder,
        levels=levels,
        # Kernels that are there are of another training.
        train=Step(("deepy.py", *sets, "train.py", *paths), fresh=kernel_file(study, folder)),
        evaluations=tuple(evaluations(study, folder)),
    )


@cache
def _read(file: Path) -> tuple[Entry, ...]:
    return tuple(read_file(file))


def _merged(study: Study, length: int, levels: Mapping[str, str]) -> Overrides:
    """The override sets of one run, joined; ConfigError where two of them set a key."""
    sets = {"overrides": study.overrides}
    sets[f"length_overrides.{length}"] = study.length_overrides.get(str(length), {})
    for factor, level in levels.items():
        sets[f"factors.{factor}.{level}"] = study.factors[factor][level]
    merged: Overrides = {}
    owner: dict[str, str] = {}
    for where, changes in sets.items():
        for key, value in changes.items():
            if key in owner:
                raise ConfigError(
                    f"{study.name}: `{key}` is set by `{owner[key]}` and by `{where}`: keep one"
                )
            merged[key], owner[key] = value, where
    return merged
