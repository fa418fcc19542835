"""The commands of a run after its training: one for each protocol, split and window, and retrieval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megatron_patches.studies.questions import STRIDED, Eval
from megatron_patches.studies.schema import Study, shown


@dataclass(frozen=True)
class Step:
    """One command of a run, without its interpreter; started in the repository's root.

    `protocol` and `split` are None for the training and for retrieval. `fresh` is a file that the
    command appends to and that is removed first, so that a repeated step does not repeat its lines.
    `window` is the `sliding_window_width` of the scoring, None: that of the training.
    """

    arguments: tuple[str, ...]
    protocol: str | None = None
    split: str | None = None
    fresh: str | None = None
    window: int | None = None
    retrieval: bool = False

    @property
    def trains(self) -> bool:
        return self.protocol is None and not self.retrieval

    @property
    def title(self) -> str:
        if self.retrieval:
            return "retrieval"
        if self.protocol is None:
            return "train"
        window = "" if self.window is None else f" window {self.window}"
        return f"eval {self.protocol} {self.split}{window}"


def cells(asked: Eval, step: Step) -> list[tuple[Any, ...]]:
    """What tells the cells of one step apart: lengths, or tasks, lengths and depths of retrieval."""
    if step.retrieval and asked.retrieval is not None:
        found = asked.retrieval
        return list(product(found.tasks, found.lengths, found.depths))
    return [] if step.trains else [(length,) for length in asked.lengths]


def evaluations(study: Study, folder: Path) -> Iterator[Step]:
    """The steps that score the run in `folder`."""
    asked = study.eval
    # The kernels of a model are the same under every protocol: the first evaluation writes them.
    kernels = (
        shown(study.output_dir / "kernels" / f"{folder.name}.jsonl") if asked.kernels else None
    )
    for protocol, split, width in product(asked.protocols, asked.splits, asked.window_widths):
        window = None if width == "none" else width
        command = _scoring(study, folder, protocol, split, window)
        command += ["--kernels", kernels] if kernels else []
        yield Step(tuple(command), protocol, split, kernels, window)
        kernels = None
    if asked.retrieval is not None:
        yield Step(tuple(_retrieval(study, folder)), retrieval=True)


def _scoring(
    study: Study, folder: Path, protocol: str, split: str, window: int | None
) -> list[str]:
    asked = study.eval
    options: dict[str, Any] = {
        "max-tokens": None if protocol == "paper" else asked.max_tokens,
        "batch-size": asked.batch_size,
        "stride": asked.stride if protocol in STRIDED else None,
        "last-k": asked.last_k if protocol == "last" else None,
        "paper-windows": asked.paper_windows if protocol == "paper" else None,
        "window": window,
    }
    rows = shown(study.output_dir / "rows.jsonl")
    command = ["eval.py", "--checkpoint", shown(folder), "--resume", "--output", rows]
    command += ["--protocol", protocol, "--split", split]
    for key, value in options.items():
        command += [] if value is None else [f"--{key}", str(value)]
    # Always all lengths: the longest decides which tokens are scored; --resume skips the rest.
    return [*command, "--lengths", *map(str, asked.lengths)]


def _retrieval(study: Study, folder: Path) -> list[str]:
    asked = study.eval.retrieval
    assert asked is not None
    command = ["scripts/retrieval.py", "--checkpoint", shown(folder), "--tasks", *asked.tasks]
    for key in ("lengths", "depths"):
        command += [f"--{key}", *map(str, getattr(asked, key))]
    rows = shown(study.output_dir / "retrieval.jsonl")
    return [*command, "--samples", str(asked.samples), "--resume", "--output", rows]
