"""Carry a run's log.jsonl to a tracker, in a process of its own: whatever happens here, training goes on.

    python -m megatron_patches.standalone.tracking wandb checkpoints/kerple_log-local_code-1234

sends what the tracker does not have yet. A training starts the same with `--follow`: the log is then
read as it grows, until standard input ends, which it also does when the training dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_patches.config import Config, load_run_config
from megatron_patches.standalone.arguments import FAILED, guarded, parser, whole
from megatron_patches.standalone.provenance import locked, write_json
from megatron_patches.standalone.tracker_clients import Client, TensorBoard, Wandb

POLL = 1.0  # seconds between two looks at the log
ENDING = 30  # seconds after the training's end in which a tracker must have finished
NICE = 10  # the training goes first where cores are short


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(
        "Send the log of a run to a tracker, from where it was left.",
        "python -m megatron_patches.standalone.tracking wandb checkpoints/kerple_log-local_code-1234",
    )
    made.add_argument("tracker", choices=["tensorboard", "wandb"])
    made.add_argument("folder", type=Path, help="folder of the run")
    made.add_argument(
        "--follow",
        type=whole(0),
        metavar="N",
        help="(as trainings call it) send what comes after iteration N until standard input ends",
    )
    options = made.parse_args(arguments)
    if options.follow is None:
        return guarded(lambda: send(options.tracker, options.folder), options.debug)
    return follow(options.tracker, options.folder, options.follow)


def send(tracker: str, folder: Path) -> int:
    """Everything that the tracker does not have, once; refused while the run trains."""
    config = load_run_config(folder)
    with locked(folder):
        courier = Courier(tracker, config, folder, None, print)
        sent = courier.deliver()
        courier.client.close()
    print(f"{sent} rows sent to {tracker}, which now has iteration {courier.done}")
    return 0


def follow(tracker: str, folder: Path, after: int) -> int:
    """The same as the log grows. Answers with a JSON object a line; what goes wrong is its `error`."""
    # Signals are for the training; this process ends when its input does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    # Whatever the tracker's package prints goes elsewhere: the answers keep their lines.
    answers, sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8"), sys.stderr

    def tell(**answer: Any) -> None:
        with suppress(OSError):  # the training is gone, and with it who could be told
            # A line of its own, also after output of the package that ends without one.
            print("\n" + json.dumps(answer), file=answers, flush=True)

    ended = threading.Event()
    threading.Thread(target=_wait_for_the_end, args=(ended,), daemon=True).start()
    try:
        config = load_run_config(folder)
        courier = Courier(tracker, config, folder, after, lambda text: tell(said=text))
        tell(done=courier.done)
        last = False
        while not last:
            last = ended.wait(POLL)  # first, so that the last look comes after the last row
            if courier.deliver():
                tell(done=courier.done)
        courier.client.close()
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}")
        os._exit(FAILED)  # a package that failed may also hang when the interpreter ends
    return 0


def _wait_for_the_end(ended: threading.Event) -> None:
    sys.stdin.buffer.read()
    signal.alarm(ENDING)  # unhandled, it ends the process also when a call never returns
    ended.set()


class Courier:
    """Reads complete lines of log.jsonl and hands their numbers to one tracker, each once.

    `done` is the last iteration that the tracker has; `.trackers/NAME.json` keeps it.
    """

    def __init__(
        self, tracker: str, config: Config, folder: Path, after: int | None, say: Any
    ) -> None:
        self._account = folder / ".trackers" / f"{tracker}.json"
        self._account.parent.mkdir(parents=True, exist_ok=True)
        # That of an earlier session may still be sending, for `ENDING` seconds at most.
        self._lock = open(self._account.with_suffix(".lock"), "w")  # noqa: SIM115 (as long as this process)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.done, count = _read_account(self._account)
        self._log = open(folder / "log.jsonl", "rb")  # noqa: SIM115 (as long as this process)
        self.client: Client
        if tracker == "tensorboard":
            self.client = TensorBoard(config, folder, self.done, after)
            self._first = (self.client.begin, 0)
        else:
            self.client = Wandb(config, folder, say)
            # Rows of the last iteration that are counted: a validation has the iteration of a step.
            self._first = max((self.done, count), (self.client.begin, 0))
        self._at = (-1, 0)  # iteration of the row that was read last, and how many rows had it

    def deliver(self) -> int:
        """Send what is new in the log; returns how many rows that were."""
        sent = 0
        for row in self._rows():
            iteration, numbers = row["iteration"], _numbers(row)
            self._at = (iteration, self._at[1] + 1 if iteration == self._at[0] else 1)
            if self._at > self._first and len(numbers) > 1:
                self.client.log(iteration, numbers)
                sent += 1
        if sent:
            self.client.flush()
            self.done = self._at[0]
            write_json(self._account, {"iteration": self.done, "rows": self._at[1]})
        return sent

    def _rows(self) -> Iterator[dict[str, Any]]:
        while True:
            place, line = self._log.tell(), self._log.readline()
            if not line.endswith(b"\n"):
                self._log.seek(place)  # the end, or a line that is being written
                return
            try:
                row = json.loads(line)
                if isinstance(row["iteration"], int) and row["iteration"] >= 0:
                    yield row
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # not a row


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float)}


def _read_account(file: Path) -> tuple[int, int]:
    """Iteration and rows of it that a tracker has; (0, 0) where nothing was sent.

    Raises ValueError for a file that says something else: guessing would repeat or lose rows.
    """
    if not file.exists():
        return 0, 0
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        iteration, rows = found["iteration"], found["rows"]
        if min(iteration, rows) >= 0 and type(iteration) is type(rows) is int:
            return iteration, rows
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ValueError(f"{file}: not an account of what was sent; remove it to send the log again")


if __name__ == "__main__":
    sys.exit(main())
