"""One start of `deepy.py`: its processes, what it printed, how it ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_patches.soak.promises import Broken, require

ROOT = Path(__file__).resolve().parents[2]
BEGINS, ENDS = 180.0, 120.0  # seconds at most, on a busy machine
LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_BEGAN = re.compile(r"^soak (?:starts|continues at iteration (\d+)): ", re.MULTILINE)
_STEP = re.compile(r"^soak  (\d+)/\d+  loss ", re.MULTILINE)


class Start:
    """The command, started in a process group of its own; what it prints goes to `output`."""

    def __init__(self, command: Sequence[str], output: Path) -> None:
        env = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
        env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        self.output = output
        with open(output, "wb") as stream:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=stream, stderr=stream, start_new_session=True
            )
        self.began = time.monotonic()
        self._known: dict[int, psutil.Process] = {}

    # ---- what it says ------------------------------------------------------------------------

    def said(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def begins_at(self) -> int | None:
        """The iteration that it continues at, 0 for a start; None while it has not said so."""
        found = _BEGAN.search(self.said())
        return int(found[1] or 0) if found else None

    def reached(self) -> int:
        """The last step that it printed."""
        with open(self.output, "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 4096))
            steps = _STEP.findall(stream.read().decode(errors="replace"))
        return int(steps[-1]) if steps else 0

    def last_words(self) -> str:
        lines = [line for line in self.said().splitlines() if line and not _STEP.match(line)]
        return " | ".join(lines[-4:])

    # ---- waiting -----------------------------------------------------------------------------

    def wait_for(self, what: Callable[[], object], name: str, pause: float = 0.01) -> None:
        """Raises Broken when the command ends before `what`, or takes too long to come to it."""
        end = time.monotonic() + BEGINS
        while not what():
            code = self.process.poll()
            require(code is None, f"ended by itself, code {code}, before {name}: {self._tail()}")
            require(time.monotonic() < end, f"{BEGINS:g} s passed before {name}: {self._tail()}")
            time.sleep(pause)

    def wait(self, longest: float = ENDS) -> int:
        """The exit code; no process of the command may outlive it."""
        self.look()
        try:
            code = self.process.wait(longest)
        except subprocess.TimeoutExpired as error:
            raise Broken(f"did not end in {longest:g} s: {self._tail()}") from error
        _, alive = psutil.wait_procs(list(self._known.values()), timeout=20)
        require(not alive, f"{len(alive)} processes outlived the command: {self._tail()}")
        return code

    def _tail(self) -> str:
        return self.last_words() or "it printed nothing"

    # ---- its processes -----------------------------------------------------------------------

    def look(self) -> None:
        """Remember the processes that there are now."""
        with suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._known[child.pid] = child

    def ranks(self) -> dict[int, psutil.Process]:
        """Rank -> its process."""
        self.look()
        found = {}
        for child in self._known.values():
            with suppress(psutil.Error):
                given = [w for w in child.cmdline() if w.startswith("--local_rank=")]
                if given:
                    found[int(given[0].partition("=")[2])] = child
        return found

    def send(self, target: str, number: int) -> None:
        """A signal to the `launcher` (deepy.py), to the whole `group`, or to `rank N`."""
        self.look()
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if target == "group":
                os.killpg(self.process.pid, number)
            elif target == "launcher":
                self.process.send_signal(number)
            else:
                self.ranks()[int(target.removeprefix("rank "))].send_signal(number)

    def destroy(self) -> None:
        """Whatever is left of it ends."""
        self.look()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for child in self._known.values():
            with suppress(psutil.Error):
                child.kill()
        self.process.wait()
        psutil.wait_procs(list(self._known.values()), timeout=20)


def destroy_leftovers(file: Path) -> None:
    """End the processes of an earlier soak that train from `file`; its launchers first."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(file) in process.cmdline() and process.pid != os.getpid():
                found.append(process)
    for process in found:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=20)
