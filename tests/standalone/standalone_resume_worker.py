"""Two processes that train, are stopped, and train again: `standalone_resume_worker.py PLAN.yml`.

The plan is a list of `[name of what to do, configuration]`; a start of two processes costs seconds, so
they do all of it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import yaml

from megatron_patches.config import ConfigError, from_mapping
from megatron_patches.standalone import runtime
from megatron_patches.standalone.signals import Interrupted
from megatron_patches.standalone.train import Trainer, train
from megatron_patches.training.leaving import leave


class Stopped(BaseException):
    pass


ORIGINAL = Trainer._one_step


def say(text: str) -> None:
    """One line in one write: what two ranks print at once must not share a line."""
    os.write(1, f"{text}\n".encode())


def stop_before(step: int) -> None:
    def one_step(self: Trainer, *arguments: Any) -> Any:
        if self.step == step:
            raise Stopped
        return ORIGINAL(self, *arguments)

    Trainer._one_step = one_step


def signal_at(step: int, rank: int) -> None:
    """One rank alone gets the signal, in the middle of a step."""

    def one_step(self: Trainer, *arguments: Any) -> Any:
        if self.step == step and self.world.rank == rank:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.2)  # the thread that reads it
        return ORIGINAL(self, *arguments)

    Trainer._one_step = one_step


def do(what: str, config: dict[str, Any]) -> None:
    if what == "stop":
        stop_before(9)
    if what == "signal":
        signal_at(4, rank=1)
    try:
        train(from_mapping(config))
    except Stopped:
        assert what == "stop"
    except Interrupted as ended:
        assert what == "signal"
        say(f"rank {os.environ['RANK']}: {ended}")
    except ConfigError as error:
        assert what == "refused", error
        say(f"refused: {error}")
    finally:
        Trainer._one_step = ORIGINAL


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as stream:
        for what, config in yaml.safe_load(stream):
            do(what, config)
    runtime.finish()
    leave(0)
