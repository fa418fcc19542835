"""The commands of a run after its training: its kernels, one for each protocol, split and window, and
retrieval for each split and window."""

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

    `protocol` is None for all but scorings, `split` for the training and the kernels. `kernels` is
    the file that the kernels go to; `fresh` one that is removed first, because what it holds is
    of another training. `window` is the `sliding_window_width` of scoring and retrieval, None: that of
    the training.
    """

    arguments: tuple[str, ...]
    protocol: str | None = None
    split: str | None = None
    fresh: str | None = None
    window: int | None = None
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
        return f"{kind} {self.split}{window}"


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
        words = ("eval.py", "--checkpoint", shown(folder), "--only-kernels", kernels)
        yield Step(words, kernels=kernels)
    windows = [None if width == "none" else width for width in asked.window_widths]
    for protocol, split, window in product(asked.protocols, asked.splits, windows):
        command = _scoring(study, folder, protocol, split, window)
        yield Step(tuple(command), protocol, split, window=window)
    if asked.retrieval is not None:
        for split, window in product(asked.splits, windows):
            command = _retrieval(study, folder, split, window)
            yield Step(tuple(command), split=split, window=window, retrieval=True)


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


def _retrieval(study: Study, folder: Path, split: str, window: int | None) -> list[str]:
    asked = study.eval.retrieval
    assert asked is not None
    command = ["scripts/retrieval.py", "--checkpoint", shown(folder), "--tasks", *asked.tasks]
    for key in ("lengths", "depths"):
        command += [f"--{key}", *map(str, getattr(asked, key))]
    command += ["--split", split, *([] if window is None else ["--window", str(window)])]
    rows = shown(study.output_dir / "retrieval.jsonl")
    return [*command, "--samples", str(asked.samples), "--resume", "--output", rows]
