"""Which network interface leads to the other ranks, and what this host calls its own."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from megatron_patches.standalone.placement import PlaceError

# What the user sets for the backend's traffic; the way in which a name is compared is the backend's.
VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def addresses() -> dict[str, list[str]]:
    """Interface -> its IP addresses, of those that are up and have one."""
    import psutil

    up = psutil.net_if_stats()
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        numbers = [e.address for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        if numbers and name in up and up[name].isup:
            found[name] = sorted(numbers, key=lambda number: ":" in number)  # IPv4 first
    return found


def asked_for(backend: str, env: Mapping[str, str]) -> str | None:
    """The interface of this host that the user's variable names for `backend`; None: not set.

    Raises PlaceError with the interfaces that there are when it names none of them.
    """
    key = VARIABLES.get(backend)
    if key is None or not env.get(key):
        return None
    here = addresses()
    for name in here:
        if _matches(name, env[key], exact=backend == "gloo"):
            return name
    known = ", ".join(f"{name} ({numbers[0]})" for name, numbers in here.items())
    raise PlaceError(
        f"{key}={env[key]!r} names no network interface of {socket.gethostname()} that is up; there "
        f"are {known or 'none'}. Unset it to take the one that leads to rank 0"
    )


def _matches(name: str, value: str, *, exact: bool) -> bool:
    """gloo reads a list of names; NCCL one of prefixes, of whole names after "=", of others after "^"."""
    if exact:
        return name in value.split(",")
    others = value.startswith("^")
    rest = value.removeprefix("^")
    whole = rest.startswith("=")
    names = rest.removeprefix("=").split(",")
    found = name in names if whole else any(name.startswith(x) for x in names if x)
    return found != others


def toward(address: str) -> tuple[str, str]:
    """Interface and own address from which packets to `address` leave; nothing is sent.

    Raises OSError when the name has no address, or no route leads there.
    """
    family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        own = str(probe.getsockname()[0])
    for name, numbers in addresses().items():
        if own in [number.partition("%")[0] for number in numbers]:
            return name, own
    raise OSError(f"no interface of this host has the address {own}, which leads to {address}")


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
