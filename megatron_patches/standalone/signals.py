"""SIGTERM, and SIGUSR1 as Slurm sends it before the time is up: save, then end with a code of its own."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

# BSD's EX_TEMPFAIL: nothing is wrong, and the same command goes on where this one stopped.
INTERRUPTED = 75
ASKING = (signal.SIGTERM, signal.SIGUSR1)
# A scheduler signals all processes of a job, and launchers hand the signal on to their workers: what
# arrives within this many seconds is one request, not a second one.
ONE_REQUEST = 3.0


class Interrupted(Exception):
    """A signal ended the run after a checkpoint; the message says where."""


class Signals:
    """A context in which the first signal of `ASKING` sets `asked`, and a second one ends the process.

    A thread reads what arrived: the second signal works while the main thread waits in a collective.
    Outside of the main thread, where Python allows no handlers, nothing is changed.
    """

    def __init__(self) -> None:
        self.asked: str | None = None  # name of the signal
        self._before: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._wakeup = -1

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            self._reader.close()
            return self
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in ASKING:
            self._before[number] = signal.signal(number, _ignore)
        threading.Thread(target=self._read, name="signals", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._before.items():
                signal.signal(number, handler)
        self._writer.close()  # the thread sees the end

    def _read(self) -> None:
        first = 0.0
        with self._reader:
            while data := self._reader.recv(64):
                for number in (n for n in data if n in ASKING):
                    if self.asked is None:
                        first, self.asked = time.monotonic(), signal.Signals(number).name
                    elif time.monotonic() - first > ONE_REQUEST:
                        os._exit(128 + number)


def _ignore(number: int, frame: Any) -> None:
    """Python hands over the number through the wake-up socket; nothing is left to do."""


class Agreement:
    """Whether any rank was asked to stop: one answer for all ranks, once a step.

    On GPUs the answer is that of the step before, so that the host never waits for the device to catch
    up; on the CPU, and alone, it is the present one.
    """

    def __init__(self, world: Any) -> None:
        self._world = world
        self._earlier: Callable[[], bool] | None = None

    def __call__(self, asked: bool) -> bool:
        if self._world.size == 1:
            return asked
        import torch

        flag = torch.tensor([int(asked)], dtype=torch.int32, device=self._world.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        if self._world.device.type == "cpu":
            return bool(flag.item())
        host, done = torch.empty_like(flag, device="cpu").pin_memory(), torch.cuda.Event()
        host.copy_(flag, non_blocking=True)
        done.record()

        def answer() -> bool:
            done.synchronize()
            return bool(host.item())

        earlier, self._earlier = self._earlier, answer
        return earlier() if earlier is not None else False
