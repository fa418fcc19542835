"""The ranks of a run meet: who is there, do they mean the same run, can they reach each other.

torch's own start waits for half an hour and then says that a socket timed out. Here rank 0 calls the
roll in the store that the process group uses afterwards, and all ranks hear the same verdict.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_patches.config import Config, ConfigError
from megatron_patches.standalone import interfaces
from megatron_patches.standalone.links import Links
from megatron_patches.standalone.members import (
    Member,
    disagreement,
    introduce,
    lone_loopback,
    missing,
)
from megatron_patches.standalone.placement import PlaceError, Placement
from megatron_patches.standalone.store import GRACE, connect, of_an_agent

MEETING = "meeting"  # key of the name of the newest one
FOLDER_SECONDS = 30.0  # until a file of another host is seen, which network file systems may delay


@dataclass(frozen=True)
class Meeting:
    """The store of the process group, the links to other hosts, and the ranks that share our cores."""

    store: Any
    links: Links
    sharing: int


def meet(config: Config, place: Placement, backend: str) -> Meeting:
    """Meet the other ranks. All ranks call it.

    Raises:
        ConfigError: the ranks disagree; PlaceError: a variable names no interface or no host.
        RuntimeError: the port is in use, or a rank did not come within `join_seconds`.
    """
    address, interface = _own_address(place, backend)
    links = Links(address)
    try:
        whole = connect(place, config.join_seconds)
        own = introduce(config, place, address, links.door)
        members, store = (_lead if place.rank == 0 else _follow)(whole, own, config)
        links.know([m.peer() for m in members], address)
        _check_links(links, own, interface)
    except BaseException:
        links.close()
        raise
    if backend == "gloo":  # by default it takes whatever the host's name resolves to
        os.environ.setdefault(interfaces.VARIABLES[backend], interface)
    sharing = sum((m.address, m.cores) == (own.address, own.cores) for m in members)
    return Meeting(torch.distributed.PrefixStore("group", store), links, sharing)


# ---- the place -------------------------------------------------------------------------------


def _own_address(place: Placement, backend: str) -> tuple[str, str]:
    """This rank's address for the others, and its interface."""
    named = interfaces.asked_for(backend, os.environ)
    host, where = socket.gethostname(), f"{place.address}:{place.port}"
    try:
        interface, own = interfaces.toward(place.address)
    except socket.gaierror as error:
        raise PlaceError(
            f"rank {place.rank} on {host}: MASTER_ADDR={place.address} cannot be resolved there "
            f"({error.strerror}): set MASTER_ADDR (`master_addr`) to an address of rank 0's host"
        ) from error
    except OSError as error:
        raise RuntimeError(
            f"rank {place.rank} on {host}: no route to {where}, where rank 0 listens "
            f"({error.strerror or error}): is the network up, and MASTER_ADDR right?"
        ) from error
    if named is None or named == interface:
        return own, interface
    return interfaces.addresses()[named][0], named


# ---- the roll --------------------------------------------------------------------------------


def _lead(whole: Any, own: Member, config: Config) -> tuple[list[Member], Any]:
    """Rank 0: wait for the others, compare, and tell all of them the verdict.

    A store of torchrun's agent outlives the processes that it starts again, and agents count their
    restarts each on its own. So rank 0 names every meeting, and what an earlier one left is not read.
    """
    name = secrets.token_hex(8)
    store = torch.distributed.PrefixStore(name, whole)
    whole.set(MEETING, name)
    members, fault = _call(store, own, config.join_seconds)
    token: str | None = None
    folder = config.save_dir
    if fault is None:
        fault = _config(lone_loopback(members))
    if fault is None and len({m.address for m in members}) > 1:
        folder.mkdir(parents=True, exist_ok=True)
        token = f".meeting-{secrets.token_hex(8)}"
        (folder / token).touch()
    try:
        _tell(store, members, fault, token)
        if token is not None:
            fault = _all_see(store, members, folder)
            store.set("folder", json.dumps(fault))
            if fault is not None:
                _wait_for_readers(store, members, "informed")
                raise ConfigError(fault)
    finally:
        if token is not None:
            (folder / token).unlink(missing_ok=True)
    return members, store


def _call(store: Any, own: Member, seconds: float) -> tuple[list[Member], str | None]:
    """The ranks in their order, or those that came and what is wrong."""
    found, end = {0: own}, time.monotonic() + seconds
    while len(found) < own.size:
        for rank in range(own.size):
            if rank not in found and store.check([f"member{rank}"]):
                try:
                    found[rank] = Member(**json.loads(store.get(f"member{rank}")))
                except (TypeError, ValueError):
                    text = (
                        f"what calls itself rank {rank} is no process of this version of the code"
                    )
                    return list(found.values()), _config(f"{text}: install the same on all hosts")
                if fault := disagreement(own, found[rank]):
                    return list(found.values()), _config(fault)
        if time.monotonic() > end:
            return list(found.values()), f"missing:{missing(own, found, seconds)}"
        time.sleep(0.02)
    return [found[rank] for rank in range(own.size)], None


def _tell(store: Any, members: list[Member], fault: str | None, token: str | None) -> None:
    known = [asdict(member) | {"config": ""} for member in members]
    verdict = {"fault": fault, "members": known, "size": members[0].size, "token": token}
    store.set("verdict", json.dumps(verdict))
    if fault is not None:
        _wait_for_readers(store, members, "heard")
        raise _error(fault)


def _wait_for_readers(store: Any, members: list[Member], key: str) -> None:
    """The store ends with rank 0's process: not before the others have read why."""
    end = time.monotonic() + GRACE
    keys = [f"{key}{member.rank}" for member in members if member.rank]
    while keys and not store.check(keys) and time.monotonic() < end:
        time.sleep(0.02)


def _config(fault: str | None) -> str | None:
    """Marked as one of configuration, for exit code 2."""
    return f"config:{fault}" if fault is not None else None


def _error(fault: str) -> Exception:
    kind, _, text = fault.partition(":")
    return ConfigError(text) if kind == "config" else RuntimeError(text)


def _follow(whole: Any, own: Member, config: Config) -> tuple[list[Member], Any]:
    """Every other rank: say who it is, and hear the verdict."""
    seconds = config.join_seconds + GRACE
    verdict, store = _from_rank_0(lambda: _ask(whole, own, seconds), own, seconds)
    store.set(f"heard{own.rank}", "")
    if verdict["fault"] is not None:
        raise _error(verdict["fault"])
    if verdict["size"] != own.size:
        raise PlaceError(
            f"{own} was started as one of {own.size} processes, rank 0 as one of {verdict['size']}: "
            "give all hosts the same numbers"
        )
    if verdict["token"] is not None:
        _look(store, own, config.save_dir / verdict["token"])
    return [Member(**member) for member in verdict["members"]], store


def _ask(whole: Any, own: Member, seconds: float) -> tuple[dict[str, Any], Any]:
    """Rank 0's verdict, in the store of its meeting.

    The meeting that is found first may be one that ended before torchrun started all ranks again: its
    verdict does not know this process. Then a newer one is waited for.
    """
    name, claims, since = b"", 0, time.monotonic()
    end, patience = since + seconds, GRACE if of_an_agent() else 0.0
    while time.monotonic() < end:
        if whole.check([MEETING]) and (newest := whole.get(MEETING)) != name:
            name, since = newest, time.monotonic()
            store = torch.distributed.PrefixStore(name.decode(), whole)
            claims = store.add(f"claim{own.rank}", 1)
            if claims == 1:
                store.set(f"member{own.rank}", json.dumps(asdict(own)))
        waited = time.monotonic() - since >= patience
        if claims > 1 and waited:
            raise PlaceError(
                f"two processes call themselves rank {own.rank} of {own.size}, one of them on "
                f"{own.host}: number all ranks from 0, each once"
            )
        if claims == 1 and store.check(["verdict"]):
            verdict: dict[str, Any] = json.loads(store.get("verdict"))
            known = {(m["rank"], m["host"], m["process"]) for m in verdict["members"]}
            unfit = verdict["fault"] is not None or verdict["size"] != own.size
            if (own.rank, own.host, own.process) in known or (unfit and waited):
                return verdict, store
        time.sleep(0.02)
    raise torch.distributed.DistStoreError("no verdict")


def _from_rank_0(ask: Callable[[], Any], own: Member, seconds: float) -> Any:
    try:
        return ask()
    except torch.distributed.DistStoreError as error:
        raise RuntimeError(
            f"{own}: rank 0 did not come within {seconds:g} s (`join_seconds`): did it start?"
        ) from error
    except torch.distributed.DistNetworkError as error:
        raise RuntimeError(f"{own}: rank 0 ended before the run began; see its message") from error


# ---- the folder, and the way to the others ------------------------------------------------------


def _all_see(store: Any, members: list[Member], folder: Path) -> str | None:
    """All hosts must see the run's folder: checkpoints are written and read by all ranks."""
    keys = [f"sees{member.rank}" for member in members[1:]]
    store.wait(keys, timedelta(seconds=2 * FOLDER_SECONDS))
    blind = [m for m, key in zip(members[1:], keys, strict=True) if store.get(key) != b"1"]
    if not blind:
        return None
    hosts = ", ".join(sorted({member.host for member in blind}))
    return (
        f"{hosts}: {folder.resolve()} is not the folder that rank 0 on {members[0].host} writes to: "
        "set `save` to a folder on a file system that all hosts share"
    )


def _look(store: Any, own: Member, token: Path) -> None:
    end = time.monotonic() + (FOLDER_SECONDS if token.parent.is_dir() else FOLDER_SECONDS / 3)
    while not (seen := token.exists()) and time.monotonic() < end:
        time.sleep(0.1)
    store.set(f"sees{own.rank}", "1" if seen else "0")
    fault = json.loads(_from_rank_0(lambda: store.get("folder"), own, 2 * FOLDER_SECONDS))
    store.set(f"informed{own.rank}", "")
    if fault is not None:
        raise ConfigError(fault)


def _check_links(links: Links, own: Member, interface: str) -> None:
    for rank, found in links.cut_off().items():
        raise RuntimeError(
            f"{own} cannot reach rank {rank} on {found['host']}, though both reach rank 0: "
            f"{found['is']}. Open the ports between the hosts, or name the interface that leads there "
            f"in {' or '.join(interfaces.VARIABLES.values())} (now {interface})"
        )
