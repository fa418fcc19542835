"""torch's store, in which ranks meet, with messages that say what is wrong and within which time."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from megatron_patches.standalone.placement import Placement

GRACE = 10.0  # seconds for the others to hear why a run does not start, and beyond `join_seconds`


def connect(place: Placement, seconds: float) -> Any:
    """The store of the run: rank 0 listens, unless torchrun's agent does already.

    Raises RuntimeError when the port is in use, or rank 0 is not there within `seconds`.
    """
    leads = place.rank == 0 and not of_an_agent()
    end = time.monotonic() + seconds
    if not leads:
        _wait_for_listener(place, seconds, end)

    def make() -> Any:
        return torch.distributed.TCPStore(
            place.address,
            place.port,
            is_master=leads,
            timeout=timedelta(seconds=max(1.0, end - time.monotonic())),
            wait_for_workers=False,
        )

    try:
        store = _within(make, seconds + GRACE)
    except (RuntimeError, TimeoutError) as error:
        text = str(error)
        if "EADDRINUSE" in text or f"code: -{errno.EADDRINUSE}" in text:
            raise RuntimeError(
                f"port {place.port} is in use on {socket.gethostname()}, where rank 0 should listen: "
                "another run? Choose another one for all ranks: `--set master_port=N` with deepy.py "
                "and srun, MASTER_PORT otherwise, torchrun's --master_port"
            ) from error
        raise RuntimeError(
            f"rank {place.rank} on {socket.gethostname()}: what listens at {place.address}:"
            f"{place.port} (MASTER_ADDR, MASTER_PORT) is not rank 0 of a run: another program's port? "
            f"Choose another one for all ranks ({text.splitlines()[0]})"
        ) from error
    return torch.distributed.PrefixStore("run", store)


def of_an_agent() -> bool:
    """Whether the store is torchrun's, and outlives the processes that its agents start again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wait_for_listener(place: Placement, seconds: float, end: float) -> None:
    """torch would do so itself, and print a page of its C++ stack for each try."""
    while True:
        try:
            left = max(0.1, end - time.monotonic())
            with socket.create_connection((place.address, place.port), left):
                return
        except OSError as error:
            if time.monotonic() < end:
                time.sleep(0.1)
                continue
            raise RuntimeError(
                f"rank {place.rank} on {socket.gethostname()}: rank 0 was not found at {place.address}:"
                f"{place.port} (MASTER_ADDR, MASTER_PORT) for {seconds:g} s (`join_seconds`): does it "
                "run, on that host, and does no firewall close the port? "
                f"({error.strerror or error})"
            ) from error


def _within(make: Callable[[], Any], seconds: float) -> Any:
    """`make()` on a thread: torch waits without end for a listener that never speaks.

    Raises TimeoutError after `seconds`, and what `make` raises.
    """
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(make())
        except Exception as error:  # handed on to the caller, below
            found.append(error)

    thread = threading.Thread(target=work, name="rendezvous", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise TimeoutError(f"it takes connections and says nothing for {seconds:g} s")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
