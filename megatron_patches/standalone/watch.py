"""What a run tells the world: log.jsonl, TensorBoard, wandb and a progress display. None may stop it."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_patches.config import Config, config_sha, dump
from megatron_patches.training.log import forget_after

SMOOTHING = 0.9  # of tokens per second, for the time left only


class Watch:
    """Receives one mapping of numbers a logged step, on the first rank only.

    `log.jsonl` gets everything; the trackers get the same. A tracker that fails is reported once and
    left out from then on.
    """

    def __init__(self, config: Config, folder: Path, first_step: int) -> None:
        self.total = config.train_iters
        self.path = folder / "log.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        forget_after(self.path, first_step)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed in `close`)
        self._trackers: list[tuple[str, Any]] = []
        if config.tensorboard_dir:
            self._try("tensorboard", lambda: _tensorboard(config))
        if config.use_wandb:
            self._try("wandb", lambda: _wandb(config, folder))
        self._display = _Display(self.total, first_step, config.run_id)

    def step(self, numbers: dict[str, Any], *, show: bool = True) -> None:
        try:
            self._file.write(json.dumps(numbers, allow_nan=True) + "\n")
            self._file.flush()
        except OSError as error:  # a full disk; writing through an open file does not name it
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if show:
            self._display.show(numbers)
        for name, tracker in list(self._trackers):
            try:
                tracker(numbers)
            except Exception as error:  # a tracker must never take the training down
                self._drop(name, error)

    def say(self, text: str) -> None:
        self._display.say(text)

    def close(self) -> None:
        self._display.close()
        with suppress(OSError):  # what could not be written was told when it was tried
            self._file.close()
        for _, tracker in self._trackers:
            end = getattr(tracker, "end", None)
            if end is not None:
                try:
                    end()
                except Exception as error:
                    self.say(f"a tracker failed to close: {error}")

    def _try(self, name: str, make: Any) -> None:
        try:
            self._trackers.append((name, make()))
        except Exception as error:  # missing package, no network, no account
            print(f"{name} is off: {error}", file=sys.stderr)

    def _drop(self, name: str, error: Exception) -> None:
        self._trackers = [pair for pair in self._trackers if pair[0] != name]
        self.say(f"{name} failed and is off from now on: {error}")


def _numbers(numbers: dict[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in numbers.items() if isinstance(v, int | float)}


def _tensorboard(config: Config) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    assert config.tensorboard_dir is not None
    writer = SummaryWriter(str(Path(config.tensorboard_dir) / config.run_id))

    def track(numbers: dict[str, Any]) -> None:
        for key, value in _numbers(numbers).items():
            if math.isfinite(value):
                writer.add_scalar(key, value, int(numbers["iteration"]))

    track.end = writer.close  # type: ignore[attr-defined]
    return track


def _wandb(config: Config, folder: Path) -> Any:
    import wandb
    import yaml

    if "wandb_host" in config.model_fields_set:
        os.environ.setdefault("WANDB_BASE_URL", config.wandb_host)
    run = wandb.init(
        project=config.wandb_project,
        group=config.wandb_group,
        entity=config.wandb_team,
        name=config.wandb_run_name or config.run_id,
        dir=str(folder),
        config={**yaml.safe_load(dump(config)), "config_sha": config_sha(config)},
        # Without a key wandb would ask on the terminal and wait for ever.
        mode=None if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") else "offline",
    )

    def track(numbers: dict[str, Any]) -> None:
        run.log(_numbers(numbers), step=int(numbers["iteration"]))

    track.end = run.finish  # type: ignore[attr-defined]
    return track


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
