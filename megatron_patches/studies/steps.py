"""The commands of a run after its training: its kernels, one for each protocol, split, window and options
of the position method, and retrieval for each of the last three."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from megatron_patches.analysis.aggregate import read_with
from megatron_patches.config.reading import flow_yaml
from megatron_patches.studies.questions import STRIDED, Eval
from megatron_patches.studies.schema import Study, shown


@dataclass(frozen=True)
class Step:
    """One command of a run, without its interpreter; started in the repository's root.

    `protocol` is None for all but scorings, `split` for the training and the kernels. `kernels` is
    the file that the kernels go to; `fresh` one that is removed first, because what it holds is
    of another training. `window` is the one of scoring and retrieval, None: that of
    the training; `options` are those of the position method in the same sense.
    """

    arguments: tuple[str, ...]
    protocol: str | None = None
    split: str | None = None
    fresh: str | None = None
    window: int | str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    retrieval: bool = False
    kernels: str | None = None

    @property
    def trains(self) -> bool:
        return self.protocol is None and not self.retrieval and self.kernels is None

    @property
    def title(self) -> str:
        if self.kernels is not None:
            return "kernels"
        if self.trains:
            return "train"
        kind = "retrieval" if self.retrieval else f"eval {self.protocol}"
        window = "" if self.window is None else f" window {self.window}"
        return f"{kind} {self.split}{window}{read_with(self.options)}"


def cells(asked: Eval, step: Step) -> list[tuple[Any, ...]]:
    """What tells the cells of one step apart: lengths, or tasks, lengths and depths of retrieval."""
    if step.retrieval and asked.retrieval is not None:
        found = asked.retrieval
        return list(product(found.tasks, found.lengths, found.depths))
    return [] if step.protocol is None else [(length,) for length in asked.lengths]


def kernel_file(study: Study, folder: Path) -> str | None:
    """Where the kernels of the run in `folder` go, None where the study does not ask for them."""
    if not study.eval.kernels:
        return None
    return shown(study.output_dir / "kernels" / f"{folder.name}.jsonl")


def evaluations(study: Study, folder: Path) -> Iterator[Step]:
    """The steps that ask the run in `folder`."""
    asked = study.eval
    kernels = kernel_file(study, folder)
    if kernels is not None:
        writing = ("eval.py", "--checkpoint", shown(folder), "--only-kernels", kernels)
        yield Step(writing, kernels=kernels)
    windows = [None if width == "none" else width for width in asked.window_widths]
    settings = [({} if given == "none" else given) for given in asked.position_options]
    readings = [
        (split, window, options, _reading(split, window, options))
        for split, window, options in product(asked.splits, windows, settings)
    ]
    for protocol, (split, window, options, words) in product(asked.protocols, readings):
        command = tuple(_scoring(study, folder, protocol, words))
        yield Step(command, protocol, split, window=window, options=options)
    if asked.retrieval is not None:
        for split, window, options, words in readings:
            command = tuple(_retrieval(study, folder, words))
            yield Step(command, split=split, window=window, options=options, retrieval=True)


def _reading(split: str, window: int | str | None, options: Mapping[str, Any]) -> list[str]:
    """What scoring and retrieval have in common."""
    words = ["--split", split, *([] if window is None else ["--window", str(window)])]
    for key, value in options.items():
        words += ["--position-option", f"{key}={flow_yaml(value)}"]
    return words


def _scoring(study: Study, folder: Path, protocol: str, reading: list[str]) -> list[str]:
    asked = study.eval
    options: dict[str, Any] = {
        "max-tokens": None if protocol == "paper" else asked.max_tokens,
        "batch-size": asked.batch_size,
        "stride": asked.stride if protocol in STRIDED else None,
        "last-k": asked.last_k if protocol == "last" else None,
        "paper-windows": asked.paper_windows if protocol == "paper" else None,
    }
    rows = shown(study.output_dir / "rows.jsonl")
    command = ["eval.py", "--checkpoint", shown(folder), "--resume", "--output", rows]
    command += ["--protocol", protocol, *reading]
    for key, value in options.items():
        command += [] if value is None else [f"--{key}", str(value)]
    # Always all lengths: the longest decides which tokens are scored; --resume skips the rest.
    return [*command, "--lengths", *map(str, asked.lengths)]


def _retrieval(study: Study, folder: Path, reading: list[str]) -> list[str]:
    asked = study.eval.retrieval
    assert asked is not None
    command = ["scripts/retrieval.py", "--checkpoint", shown(folder), "--tasks", *asked.tasks]
    for key in ("lengths", "depths"):
        command += [f"--{key}", *map(str, getattr(asked, key))]
    rows = shown(study.output_dir / "retrieval.jsonl")
    return [*command, *reading, "--samples", str(asked.samples), "--resume", "--output", rows]
