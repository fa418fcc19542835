"""DeepSpeed's launcher for the processes of this host, with signals that reach the workers.

DeepSpeed's own answer to SIGTERM is to kill them, and SIGUSR1 would end the launcher alone. Here both
are handed on; the workers save, end with `signals.INTERRUPTED`, and the launcher with the same.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from megatron_patches.standalone.signals import ASKING


def run(command: Sequence[str], env: Mapping[str, str]) -> int:
    """Run `command` to its end, handing on the signals that ask to save; returns its exit code."""
    early: list[int] = []  # before there is a process to hand them to
    child: subprocess.Popen[bytes] | None = None

    def hand_on(number: int, frame: Any) -> None:
        if child is None:
            early.append(number)
        elif child.poll() is None:
            child.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in ASKING}
    try:
        child = subprocess.Popen(command, env=dict(env))
        for number in early:
            child.send_signal(number)
        try:
            return child.wait()
        except KeyboardInterrupt:
            # The terminal told the child as well, which ends its workers first.
            child.wait()
            raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """`deepspeed.launcher.launch`, whose handlers of `ASKING` are replaced."""
    import psutil
    from deepspeed.launcher import launch

    def hand_on(number: int, frame: Any) -> None:
        for worker in psutil.Process().children():
            worker.send_signal(number)

    def theirs(number: int, handler: Any) -> Any:
        return signal.getsignal(number) if number in ASKING else signal.signal(number, handler)

    for number in ASKING:
        signal.signal(number, hand_on)
    launch.signal = SimpleNamespace(**{**vars(signal), "signal": theirs})
    launch.main()


if __name__ == "__main__":
    main()
