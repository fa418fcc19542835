"""What a run tells the world: log.jsonl, TensorBoard, wandb and a progress display. None may stop it."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_patches.config import Config
from megatron_patches.standalone.tracker_clients import names
from megatron_patches.standalone.trackers import Follower
from megatron_patches.training.log import forget_after

SMOOTHING = 0.9  # of tokens per second, for the time left only


class Watch:
    """Receives one mapping of numbers a logged step, on the first rank only.

    `log.jsonl` gets everything; the trackers read it there, each in a process of its own. What one of
    them cannot send is reported once.

    Raises OSError when log.jsonl cannot be written.
    """

    def __init__(self, config: Config, folder: Path, first_step: int) -> None:
        self.total = config.train_iters
        self.path = folder / "log.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        forget_after(self.path, first_step)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed in `close`)
        self._display = _Display(self.total, first_step, config.run_id)
        self._trackers: list[Follower] = []
        for name in names(config):
            try:
                self._trackers.append(Follower(name, folder, first_step, self.say))
            except OSError as error:
                self.say(f"WARNING: {name} is off, its process cannot be started: {error}")

    def step(self, numbers: dict[str, Any], *, show: bool = True) -> None:
        try:
            self._file.write(json.dumps(numbers, allow_nan=True) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk; writing through an open file does not name it
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if show:
            self._display.show(numbers)
        for tracker in self._trackers:
            tracker.wrote(int(numbers["iteration"]))

    def say(self, text: str) -> None:
        self._display.say(text)

    def close(self) -> None:
        """Give the trackers time to finish, unless an error is on its way: that must be told first."""
        with suppress(OSError):  # what could not be written was told when it was tried
            self._file.close()
        failing = sys.exc_info()[0] is not None
        for tracker in self._trackers:
            tracker.close(0.0) if failing else tracker.close()
        self._display.close()


class _Display:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, total: int, done: int, title: str) -> None:
        self.total, self.title = total, title
        self._rate = 0.0
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(title, total=total, completed=done, state="")

    def show(self, numbers: dict[str, Any]) -> None:
        step, rate = int(numbers["iteration"]), float(numbers.get("steps_per_second") or 0.0)
        self._rate = rate if not self._rate else SMOOTHING * self._rate + (1 - SMOOTHING) * rate
        left = (self.total - step) / self._rate if self._rate else 0.0
        state = (
            f"loss {numbers['lm_loss']:.4f}  {numbers['tokens_per_second']:,.0f} tokens/s  "
            f"{_clock(left)} left"
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, state=state)
        else:
            print(f"{self.title}  {step}/{self.total}  {state}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S" if seconds >= 3600 else "%M:%S", time.gmtime(seconds))
