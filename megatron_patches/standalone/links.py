"""Whether the other ranks' hosts can be reached: asked when a run stands still, and once at its start.

Each rank keeps a socket that listens and is never read: the kernel answers for it, also while the
process is stopped, until the process ends. So refused means ended, and no answer means cut off.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

SECONDS = 5.0  # for an answer from another host
SIDE_BY_SIDE = 32  # hosts asked at once


@dataclass(frozen=True)
class Peer:
    """Another rank: where it runs and where its door is."""

    rank: int
    host: str
    process: int
    address: str
    door: int

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.address})"


class Links:
    """This rank's door, and what it finds behind those of other hosts."""

    def __init__(self, address: str) -> None:
        """Raises OSError when `address` is none of this host's."""
        self._door = socket.create_server(
            (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET
        )
        self.door = int(self._door.getsockname()[1])
        self.peers: list[Peer] = []

    def know(self, peers: Iterable[Peer], own: str) -> None:
        """Peers with another address than `own` are the ones to ask after; without any the door closes."""
        self.peers = [peer for peer in peers if peer.address != own]
        if not self.peers:
            self.close()

    def close(self) -> None:
        self._door.close()

    def cut_off(self) -> dict[int, dict[str, Any]]:
        """Rank -> what a message needs, of those whose host does not answer; takes `SECONDS` at most.

        One rank stands for its host, so that a thousand ranks are not asked a thousand times.
        """
        hosts = {peer.address: peer for peer in reversed(self.peers)}
        if not hosts:
            return {}
        with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
            faults = dict(zip(hosts, pool.map(_fault, hosts.values()), strict=True))
        return {
            peer.rank: {
                "process": peer.process,
                "host": peer.host,
                "is": f"cut off, {peer.address} does not answer {socket.gethostname()} "
                f"({faults[peer.address]})",
            }
            for peer in self.peers
            if faults[peer.address]
        }


def _fault(peer: Peer) -> str:
    """Why the peer's host cannot be reached; empty where it answers, be it by a refusal."""
    try:
        with socket.create_connection((peer.address, peer.door), SECONDS):
            return ""
    except TimeoutError:
        return f"no answer for {SECONDS:g} s"
    except OSError as error:
        refused = error.errno in (errno.ECONNREFUSED, errno.ECONNRESET)
        return "" if refused else str(error.strerror or error)
