"""A thread on every rank that ends a run without progress, and can say which rank is the cause.

Each rank writes into `.ranks/` of the run's folder what it is at: iteration, phase, and a count of the
thread's own turns. A rank whose count stands still is dead or stopped; the one that is farthest behind
keeps the others waiting.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_prep.errors import plain
from megatron_patches.standalone.fingerprints import write_text

# In the order of a step. Ranks wait for each other in a backward pass, and later.
PHASES = (
    *("starting", "reading data", "forward pass", "backward pass", "update", "validation"),
    *("saving",),
)
UNSEEN = {"iteration": 0, "micro": 0, "phase": 0, "turns": -1, "is": "without a sign of life"}
# The numbers of a sign of life, and what each is below.
_SIGN = {"process": 2**31, "iteration": 2**63, "micro": 2**63, "phase": len(PHASES), "turns": 2**63}
_LONGEST_SIGN = 10_000  # characters of one; those of today have some hundred
LONGEST_TURN = 5.0  # seconds between two turns of the thread


class Heartbeat:
    """A context around the training loop; `beat` is called at every change of phase.

    Args:
        folder: the run's.
        rank, ranks: of this process.
        seconds: without a beat, after which the run ends; 0: never. Time in which the process itself
            did not run (a laptop asleep, Ctrl-Z) does not count.
        keep: called with the stacks of a stalled rank; returns where it kept them.
        cut_off: rank -> process, host and what is wrong, of ranks whose host cannot be reached.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        seconds: float,
        keep: Callable[[int, dict[str, Any]], str],
        leave: Callable[[int], Any] = os._exit,
        cut_off: Callable[[], dict[int, dict[str, Any]]] = dict,
    ) -> None:
        self.rank, self.ranks, self.seconds = rank, ranks, seconds
        self._place = folder / ".ranks"
        self._keep, self._leave, self._cut_off = keep, leave, cut_off
        self._turn = min(LONGEST_TURN, max(seconds / 5, 0.02)) if seconds else LONGEST_TURN
        self._at: tuple[int, int, int, int] = (0, 0, 0, 0)  # beats, iteration, micro batch, phase
        self._turns = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._main = threading.get_ident()

    def __enter__(self) -> Heartbeat:
        if self.ranks > 1:
            self._write()
        if self.seconds or self.ranks > 1:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        with suppress(OSError):
            self._file(self.rank).unlink(missing_ok=True)
            self._place.rmdir()  # by the last one

    def beat(self, iteration: int, phase: str, micro: int = 0) -> None:
        """This rank has come to `phase` of micro batch `micro` of `iteration`: an assignment, no more."""
        self._at = (self._at[0] + 1, iteration, micro, PHASES.index(phase))

    # ---- the thread --------------------------------------------------------------------------

    def _watch(self) -> None:
        seen, still, last = self._at, 0.0, time.monotonic()
        while not self._end.wait(self._turn):
            now = time.monotonic()
            # A turn that took much longer means that this process was not running.
            still += min(now - last, 2 * self._turn)
            last = now
            if self._at != seen:
                seen, still = self._at, 0.0
            self._turns += 1
            if self.ranks > 1:
                self._write()
            if self.seconds and still >= self.seconds:
                self._stalled(seen)
                return

    def _stalled(self, at: tuple[int, int, int, int]) -> None:
        _, iteration, _, phase = at
        blamed = self.behind() if self.ranks > 1 else {self.rank: self._own()}
        if self._end.is_set() or self._at != at:  # it went on while the others were asked
            return
        frame = sys._current_frames().get(self._main)
        stack = traceback.format_stack(frame) if frame is not None else []
        content = {"reason": "no progress", "blamed": _named(blamed), "stack": stack}
        kept = self._keep(iteration, content)
        if self.rank in blamed or self.rank == min(set(range(self.ranks)) - set(blamed), default=0):
            print(
                f"error: no progress for {self.seconds:g} s (`watch_stall_seconds`) on rank "
                f"{self.rank}, {PHASES[phase]} of iteration {iteration}; "
                f"{'; '.join(_named(blamed)) or 'no rank is behind the others'}; {kept}",
                file=sys.stderr,
                flush=True,
            )
        self._leave(1)

    # ---- the others --------------------------------------------------------------------------

    def behind(self) -> dict[int, dict[str, Any]]:
        """The ranks that are dead, cut off, or stopped, or else behind all others; empty: none is."""
        first = self._read()
        if dead := _dead(first):
            return dead
        time.sleep(2.5 * self._turn)
        second = self._read()
        # A killed process closes its connections, which the others see, some time before it is gone.
        if dead := _dead(second):
            return dead
        # Before what the files say: a common folder may be reached over a network that still works,
        # and one that does not shows all the others as standing still.
        if cut := self._cut_off():
            return {rank: {**second[rank], **state} for rank, state in cut.items()}
        stopped = {
            rank: {"is": "stopped, or its machine is gone", **state}
            for rank, state in second.items()
            if rank != self.rank and state.get("turns") == first.get(rank, {}).get("turns")
        }
        if stopped:
            return stopped
        places = {r: (s["iteration"], s["micro"], s["phase"]) for r, s in second.items()}
        least = min(places.values())
        late = {rank: second[rank] for rank, place in places.items() if place == least}
        return late if len(late) < self.ranks else {}

    def gone(self) -> list[str]:
        """A line for each rank of this machine whose process is gone; for others that stand still."""
        found = self.behind()
        return _named({rank: state for rank, state in found.items() if "is" in state})

    def _own(self) -> dict[str, Any]:
        _, iteration, micro, phase = self._at
        return {
            "process": os.getpid(),
            "host": socket.gethostname(),
            "iteration": iteration,
            "micro": micro,
            "phase": phase,
            "turns": self._turns,
        }

    def _file(self, rank: int) -> Path:
        return self._place / f"{rank}.json"

    def _write(self) -> None:
        with suppress(OSError):  # a full disk must not end the run from here
            self._place.mkdir(parents=True, exist_ok=True)
            write_text(self._file(self.rank), json.dumps(self._own()))

    def _read(self) -> dict[int, dict[str, Any]]:
        found = {self.rank: self._own()}
        for rank in sorted({*range(self.ranks)} - {self.rank}):
            found[rank] = _sign(self._file(rank)) or {**UNSEEN}
        return found


def _sign(file: Path) -> dict[str, Any] | None:
    """What a rank wrote of itself; None where it is not there, cut or damaged.

    A disk of several hosts can show anything, and what raised here would end the watch unseen.
    """
    try:
        with open(file, encoding="utf-8") as stream:
            state = json.loads(stream.read(_LONGEST_SIGN))
        numbers = {key: state[key] for key in _SIGN}
        if any(type(n) is not int or not 0 <= n < _SIGN[key] for key, n in numbers.items()):
            return None
        return {**numbers, "host": plain(str(state["host"]))[:255]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _dead(states: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {rank: state for rank, state in states.items() if _is_dead(state)}


def _is_dead(state: dict[str, Any]) -> bool:
    if state.get("host") != socket.gethostname():
        return False
    import psutil

    try:
        if psutil.Process(state["process"]).status() != psutil.STATUS_ZOMBIE:
            return False
    except psutil.NoSuchProcess:
        pass
    state["is"] = "dead"
    return True


def _named(states: dict[int, dict[str, Any]]) -> list[str]:
    return [
        f"rank {rank} (process {state.get('process', '?')} on {state.get('host', '?')}) is "
        f"{state.get('is', 'behind')}, last seen {PHASES[state['phase']]} of iteration "
        f"{state['iteration']}"
        for rank, state in sorted(states.items())
    ]
