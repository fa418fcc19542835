"""The training's side of its trackers: each runs in a process of its own, reads log.jsonl, and may fail.

The log on disk is the queue: a step never waits for a tracker, and no row is dropped in between.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from megatron_patches.standalone.tracking import ENDING

PACKAGE = Path(__file__).resolve().parents[2]
LATE = 300.0  # seconds without an answer about a row, after which a tracker is called slow
WORDS = 300  # characters of an error that are shown


class Follower:
    """One tracker of a running training.

    Args:
        name: `tensorboard` or `wandb`.
        folder: of the run, with `config.yml` and `log.jsonl`.
        after: the iteration from which the run goes on.
        say: shows a line to the user; called from another thread as well.
    """

    def __init__(self, name: str, folder: Path, after: int, say: Callable[[str], None]) -> None:
        self.name, self.folder, self._say = name, folder, say
        self.done = 0  # the last iteration that the tracker has
        self._written = after
        self._waiting: float | None = None  # since when a row is without an answer
        self._error = ""
        self._told = self._stopped = False
        self._strays: deque[str] = deque(maxlen=3)  # what the tracker's package printed last
        module = "megatron_patches.standalone.tracking"
        command = [sys.executable, "-m", module, name, str(folder), f"--follow={after}"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for the training
        )
        self._reader = threading.Thread(target=self._read, name=f"{name} of the run", daemon=True)
        self._reader.start()

    def wrote(self, iteration: int) -> None:
        """The log has one more row. Returns at once."""
        self._written = iteration
        if self.done >= iteration:  # a resumed run repeats what was sent before
            return
        now = time.monotonic()
        waiting = self._waiting = self._waiting or now
        if now - waiting > LATE and not self._told:
            self._lost(f"no answer for {LATE:.0f} s; it may still catch up")

    def close(self, seconds: float = ENDING + 5.0) -> None:
        """Let the tracker send what is left; it is stopped after `seconds`.

        With 0 seconds it is left to itself, and ends itself after `tracking.ENDING`.
        """
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended; its reader says why
            self._process.stdin.close()
        self._reader.join(seconds)
        if seconds and self._reader.is_alive():
            self._stopped = True
            with suppress(ProcessLookupError):  # gone, but a process of its own holds the pipe
                os.killpg(self._process.pid, signal.SIGKILL)
            self._reader.join(1.0)
            self._lost(f"it did not finish within {ENDING} s of the end and was stopped")

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in filter(bytes.strip, answers):
                self._take(line.decode("utf-8", "replace"))
        code = self._process.wait()
        if self._error or (code and not self._stopped):
            self._lost(self._error or self._ending(code))

    def _take(self, line: str) -> None:
        try:
            answer = json.loads(line)
            if "said" in answer:
                self._say(str(answer["said"]))
            if "done" in answer:
                self.done = int(answer["done"])
                self._waiting = None if self.done >= self._written else time.monotonic()
            self._error = str(answer.get("error", self._error))
        except (ValueError, TypeError, AttributeError, RecursionError):
            self._strays.append(line.strip())

    def _ending(self, code: int) -> str:
        if code == -signal.SIGALRM:
            return f"it did not finish within {ENDING} s of the end and was stopped"
        return " | ".join([f"its process ended with code {code}", *filter(None, self._strays)])

    def _lost(self, reason: str) -> None:
        if self._told:
            return
        self._told = True
        reason = " ".join(reason.split())[:WORDS].rstrip(".")
        command = f"python -m megatron_patches.standalone.tracking {self.name} {self.folder}"
        self._say(
            f"WARNING: {self.name}: {reason}. It has iteration {self.done} of {self._written}; "
            f"{self.folder / 'log.jsonl'} has all, and when the run has ended `{command}` sends the rest"
        )


def _environment() -> dict[str, str]:
    """In which the other process finds this suite, installed or not."""
    paths = [str(PACKAGE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
