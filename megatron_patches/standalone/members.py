"""What each rank says of itself when a run starts, and what may be wrong with all of it together."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch
import yaml

from megatron_patches.config import Config, dump
from megatron_patches.standalone import interfaces
from megatron_patches.standalone.links import Peer
from megatron_patches.standalone.placement import Placement

SHOWN = 3  # differing keys in a message


@dataclass(frozen=True)
class Member:
    """What each rank says of itself."""

    rank: int
    size: int
    launcher: str
    host: str
    process: int
    address: str
    door: int
    cores: str  # those that it may use; ranks that name the same ones share them
    torch: str
    config: str

    def peer(self) -> Peer:
        return Peer(self.rank, self.host, self.process, self.address, self.door)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def introduce(config: Config, place: Placement, address: str, door: int) -> Member:
    affinity = getattr(os, "sched_getaffinity", lambda _: ())(0)
    return Member(
        rank=place.rank,
        size=place.size,
        launcher=place.launcher,
        host=socket.gethostname(),
        process=os.getpid(),
        address=address,
        door=door,
        cores=" ".join(map(str, sorted(affinity))),
        torch=torch.__version__.partition("+")[0],
        config=dump(config),
    )


def missing(own: Member, found: dict[int, Member], seconds: float) -> str:
    absent = [str(rank) for rank in range(own.size) if rank not in found]
    shown = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
    come = ", ".join(sorted({m.host for m in found.values()}))
    return (
        f"{len(absent)} of {own.size} ranks did not come within {seconds:g} s (`join_seconds`): rank "
        f"{shown}; the others are on {come}. Did they start, and with MASTER_ADDR an address of "
        f"{own.host}, where rank 0 waits at {own.address}?"
    )


def disagreement(first: Member, other: Member) -> str | None:
    if other.size != first.size:
        return (
            f"{first} was started as one of {first.size} processes, {other} as one of {other.size} "
            f"({first.launcher}, {other.launcher}): give all hosts the same numbers"
        )
    if other.torch != first.torch:
        return f"{first} has torch {first.torch}, {other} has {other.torch}: install the same"
    if other.config == first.config:
        return None
    one, two = yaml.safe_load(first.config), yaml.safe_load(other.config)
    keys = [key for key in sorted({*one, *two}) if one.get(key) != two.get(key)]
    shown = "; ".join(f"`{key}` is {one.get(key)!r} and {two.get(key)!r}" for key in keys[:SHOWN])
    more = f" and {len(keys) - SHOWN} more keys" if len(keys) > SHOWN else ""
    return (
        f"{first} and {other} have different configurations: {shown}{more}: copy the same files to "
        "all hosts"
    )


def lone_loopback(members: list[Member]) -> str | None:
    """An address that only its own host can use, though there are others."""
    if len({m.address for m in members}) == 1:
        return None
    for member in members:
        if interfaces.is_loopback(member.address):
            return (
                f"{member} would be reached at {member.address}, which other hosts cannot "
                "use: set MASTER_ADDR to an address of rank 0's host, not to a name that /etc/hosts "
                "gives to 127.0.0.1 or 127.0.1.1, and no loopback as interface"
            )
    return None
