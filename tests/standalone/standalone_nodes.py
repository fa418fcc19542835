"""Two network namespaces of this machine that stand for two hosts.

Each has its own interfaces, host name and loopback; a veth pair is the only way from one to the other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import standalone_launching as launching
import standalone_tools as tools

ADDRESSES = ("10.213.77.1", "10.213.77.2")
LINK = "veth0"  # in both


def why_no_nodes() -> str | None:
    missing = [name for name in ("ip", "unshare", "hostname") if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux, hostname)"
    return None if os.geteuid() == 0 else "making network namespaces takes root"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Nodes:
    """node1 and node2; `start` runs a program in one of them."""

    def __init__(self) -> None:
        self.names = [f"toy{os.getpid()}n{number}" for number in (1, 2)]
        self.started: list[subprocess.Popen[str]] = []

    def command(self, node: int, *command: str, mount: str | None = None) -> list[str]:
        """`mount`: a folder in whose place this node, and it alone, sees an empty one."""
        # `ip netns exec` has a mount namespace of its own already.
        hide = f'mount -t tmpfs none "{mount}"; ' if mount else ""
        begin = ["ip", "netns", "exec", self.names[node], "unshare", "--uts", "sh", "-c"]
        return [*begin, f'hostname "$0"; {hide}exec "$@"', f"node{node + 1}", *command]

    def start(
        self, node: int, *command: str, mount: str | None = None, **env: str
    ) -> subprocess.Popen[str]:
        """With the variables that tell a rank its place: the process itself, not a parent of it."""
        place = {"RANK": str(node), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        where = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
        process = subprocess.Popen(
            self.command(node, *command, mount=mount),
            cwd=tools.ROOT,
            env=launching.environment(**place, **where, **env),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def link(self, state: str) -> None:
        """`down` or `up`, at node2's end."""
        ip("-n", self.names[1], "link", "set", LINK, state)


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Raises CalledProcessError where the kernel makes no namespaces."""
    nodes = Nodes()
    try:
        for name in nodes.names:
            ip("netns", "add", name)
        end = ("type", "veth", "peer", "name", LINK, "netns", nodes.names[1])
        ip("link", "add", LINK, "netns", nodes.names[0], *end)
        for name, address in zip(nodes.names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", LINK)
            for link in ("lo", LINK):
                ip("-n", name, "link", "set", link, "up")
        yield nodes
    finally:
        for process in nodes.started:
            process.kill()
            process.communicate()
        for name in nodes.names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
