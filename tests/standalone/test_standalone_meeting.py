"""How ranks meet: interfaces, doors, and what is said when one is missing or means another run."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest
import standalone_launching as launching
import torch
import yaml

from megatron_patches.config import ConfigError
from megatron_patches.standalone import interfaces, members, rendezvous, store
from megatron_patches.standalone.arguments import guarded
from megatron_patches.standalone.heartbeat import Heartbeat
from megatron_patches.standalone.links import Links, Peer
from megatron_patches.standalone.placement import PlaceError, Placement

# ---- interfaces ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_an_interface_that_is_not_here(backend):
    key = interfaces.VARIABLES[backend]
    with pytest.raises(
        ConfigError, match=rf"{key}='ib7' names no network.*there are .*lo \(127"
    ) as e:
        interfaces.asked_for(backend, {key: "ib7"})
    assert all(name in str(e.value) for name in interfaces.addresses())
    assert interfaces.asked_for(backend, {}) is None
    assert interfaces.asked_for("mpi", {key: "ib7"}) is None


@pytest.mark.parametrize(
    ("backend", "value", "found"),
    [
        ("gloo", "eth0", "eth0"),
        ("gloo", "ib0,eth0", "eth0"),
        ("gloo", "eth", None),
        ("nccl", "eth", "eth0"),
        ("nccl", "=eth", None),
        ("nccl", "=eth0", "eth0"),
        ("nccl", "^lo", "eth0"),
        ("nccl", "^lo,eth", None),
        ("nccl", "^=lo", "eth0"),
    ],
)
def test_interfaces_are_named_in_the_backends_way(monkeypatch, backend, value, found):
    monkeypatch.setattr(
        interfaces, "addresses", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]}
    )
    env = {interfaces.VARIABLES[backend]: value}
    if found is None:
        with pytest.raises(ConfigError, match="names no network interface"):
            interfaces.asked_for(backend, env)
    else:
        assert interfaces.asked_for(backend, env) == found


def test_the_way_to_this_host():
    name, own = interfaces.toward("127.0.0.1")
    assert own == "127.0.0.1" and own in interfaces.addresses()[name]


# ---- doors -----------------------------------------------------------------------------------


def test_refused_is_ended_and_silence_is_cut_off(monkeypatch):
    """A listening socket, a closed one on a host that is there, and an address that leads nowhere."""
    links, closed = Links("127.0.0.1"), launching.free_port()
    monkeypatch.setattr("megatron_patches.standalone.links.SECONDS", 0.5)
    nowhere = Peer(3, "far", 9, "192.0.2.1", 80)  # TEST-NET-1: no host has it
    peers = [Peer(1, "here", 7, "127.0.0.1", links.door), Peer(2, "near", 8, "127.0.0.2", closed)]
    links.know([*peers, nowhere], own="127.0.0.9")
    original = socket.create_connection

    def connect(address, seconds):
        if address[0] == "192.0.2.1":
            raise TimeoutError
        return original(address, seconds)

    monkeypatch.setattr(socket, "create_connection", connect)
    found = links.cut_off()
    assert list(found) == [3] and found[3]["host"] == "far" and found[3]["process"] == 9
    assert "192.0.2.1 does not answer" in found[3]["is"] and "no answer for 0.5 s" in found[3]["is"]
    links.know(peers, own="127.0.0.1")
    assert [peer.rank for peer in links.peers] == [2] and not links.cut_off()
    links.know(peers[:1], own="127.0.0.1")
    assert links._door.fileno() == -1  # nobody else needs it


# ---- meeting: real stores, one thread a rank -----------------------------------------------------


@pytest.fixture
def together(config, monkeypatch):
    """together({rank: (size, changes)}, ...) -> rank -> what `meet` returned or raised."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces.toward("127.0.0.1")[0])

    def meet(*ranks: tuple[int, int, dict], port: int | None = None, address="127.0.0.1"):
        port = port or launching.free_port()
        found: dict[int, object] = {}

        def one(index: int, rank: int, size: int, changes: dict) -> None:
            made = config("meeting", **{"join_seconds": 2, **changes})
            try:
                place = Placement("RANK/WORLD_SIZE", rank, size, rank, address, port)
                found[index] = rendezvous.meet(made, place, "gloo")
            except (ConfigError, RuntimeError) as error:
                found[index] = error

        threads = [threading.Thread(target=one, args=(i, *r)) for i, r in enumerate(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [found[i] for i in range(len(ranks))]

    return meet


def test_ranks_meet(together):
    """On one host: each counts all those that share its cores, and no door stays open."""
    for meeting in together((0, 3, {}), (1, 3, {}), (2, 3, {})):
        assert isinstance(meeting, rendezvous.Meeting), meeting
        assert meeting.sharing == 3 and meeting.links.peers == []


def test_a_rank_that_never_comes(together):
    begun = time.monotonic()
    found = together((0, 4, {}), (1, 4, {}))
    assert time.monotonic() - begun < 20
    for error in found:
        assert type(error) is RuntimeError
        assert "2 of 4 ranks did not come within 2 s (`join_seconds`): rank 2, 3;" in str(error)
        assert f"the others are on {socket.gethostname()}" in str(error)


def test_rank_0_that_never_comes(together):
    port = launching.free_port()
    (error,) = together((1, 2, {"join_seconds": 1}), port=port)
    assert type(error) is RuntimeError
    assert f"rank 1 on {socket.gethostname()}: rank 0 was not found at 127.0.0.1:{port}" in str(
        error
    )
    assert "for 1 s (`join_seconds`)" in str(error)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 8)])
def test_hosts_that_disagree_about_the_number_of_processes(together, sizes):
    for error in together((0, sizes[0], {}), (1, sizes[1], {})):
        assert type(error) in (ConfigError, PlaceError)
        assert f"started as one of {sizes[0]} processes" in str(error)
        assert f"as one of {sizes[1]}" in str(error)


def test_a_rank_beyond_those_that_rank_0_expects(together):
    first, second, third = together((0, 2, {}), (1, 2, {}), (2, 3, {}))
    assert isinstance(first, rendezvous.Meeting) and isinstance(second, rendezvous.Meeting)
    assert "rank 2 on" in str(third) and "one of 3 processes, rank 0 as one of 2" in str(third)


def test_hosts_with_different_configurations(together):
    """`log_interval` is in no hash of the model, but ranks that log at other steps wait for ever."""
    for error in together((0, 2, {}), (1, 2, {"log_interval": 3, "pos_emb": "alibi"})):
        assert type(error) is ConfigError
        assert "`log_interval` is 1 and 3; `pos_emb` is 'kerple_log' and 'alibi'" in str(error)


def test_two_processes_of_the_same_number(together):
    found = together((0, 3, {}), (1, 3, {}), (1, 3, {}))
    assert any("two processes call themselves rank 1 of 3" in str(error) for error in found)
    assert "rank 2;" in str(found[0])


def test_processes_that_torchrun_starts_again(config, monkeypatch):
    """Its agents' store outlives them, and each agent counts its restarts alone: 1 here, 0 there."""
    port = launching.free_port()
    agents = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert agents.port == port
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces.toward("127.0.0.1")[0])
    processes = iter(range(1, 99))
    monkeypatch.setattr(
        rendezvous, "introduce", lambda *a: replace(members.introduce(*a), process=next(processes))
    )
    found: list[object] = []

    def one(rank: int, size: int) -> None:
        try:
            place = Placement("torchrun", rank, size, rank, "127.0.0.1", port)
            meeting = rendezvous.meet(config("again", join_seconds=20), place, "gloo")
            if rank == 0:
                meeting.store.set("said", f"by rank 0 of {size}")
            found.append(meeting.store.get("said").decode())
        except (ConfigError, RuntimeError) as error:
            found.append(error)

    def attempt(*ranks: int) -> None:
        """In the order in which they come."""
        size = len(ranks)
        threads = [threading.Thread(target=one, args=(rank, size)) for rank in ranks]
        for thread in threads:
            thread.start()
            time.sleep(0.3)
        for thread in threads:
            thread.join(60)
        assert found == [f"by rank 0 of {size}"] * size
        found.clear()

    attempt(0, 1)
    attempt(1, 0)  # rank 1 finds the old verdict, and does not believe it
    attempt(2, 1, 0)  # nor one for another number of processes


@pytest.mark.parametrize("said", ["", "[]", '{"rank": 1}', '{"rank": 1, "colour": 2}'])
def test_a_rank_of_other_code(together, monkeypatch, said):
    original = rendezvous.json.dumps
    monkeypatch.setattr(
        rendezvous.json, "dumps", lambda x: said if x.get("rank") == 1 else original(x)
    )
    (error, _) = together((0, 2, {}), (1, 2, {}))
    assert type(error) is ConfigError
    assert "calls itself rank 1 is no process of this version" in str(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_in_use(together, monkeypatch, rank):
    """By something else than a run: a socket that takes connections and says nothing."""
    monkeypatch.setattr(store, "GRACE", 0.5)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        (error,) = together((rank, 2, {"join_seconds": 1}), port=port)
    assert type(error) is RuntimeError
    if rank == 0:
        assert f"port {port} is in use on {socket.gethostname()}" in str(error)
        assert "--set master_port=N" in str(error) and "MASTER_PORT" in str(error)
    else:
        assert f"what listens at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT) is not" in str(error)
        assert "it takes connections and says nothing for 1.5 s" in str(error)


def test_a_name_without_an_address(together):
    (error,) = together((1, 2, {}), address="no-such-host.invalid")
    assert type(error) is PlaceError
    assert "MASTER_ADDR=no-such-host.invalid cannot be resolved there" in str(error)


def test_a_process_says_itself_what_is_wrong_where_it_runs(monkeypatch, capsys):
    """Rank 0 speaks for all of them only where all of them know."""
    monkeypatch.setenv("RANK", "1")

    def wrong(kind: type[Exception]):
        def main() -> int:
            raise kind("wrong here")

        return main

    assert guarded(wrong(PlaceError), debug=False) == 2
    assert capsys.readouterr().err == "error: wrong here\n"
    assert guarded(wrong(ConfigError), debug=False) == 2
    assert capsys.readouterr().err == ""


def test_a_host_that_is_cut_off_comes_before_what_the_files_say(tmp_path):
    """Its file goes on changing in a folder that is still reached, or stands still in one that is not."""
    cut = {1: {"process": 5, "host": "node2", "is": "cut off, 10.0.0.2 does not answer node1"}}
    heart = Heartbeat(tmp_path, 0, 2, 0.1, lambda *_: "", cut_off=lambda: cut)
    heart.beat(7, "backward pass")
    (line,) = heart.gone()
    assert line.startswith("rank 1 (process 5 on node2) is cut off, 10.0.0.2 does not answer node1")
    cut.clear()
    (line,) = heart.gone()
    assert "stopped, or its machine is gone" in line or "without a sign of life" in line


def member(rank: int, **changes: object) -> members.Member:
    own = {"rank": rank, "size": 2, "launcher": "srun", "host": f"node{rank}", "process": 1}
    where = {
        "address": f"10.0.0.{rank}",
        "door": 1,
        "cores": "0 1",
        "torch": "2.13.0",
        "config": "{}",
    }
    return members.Member(**{**own, **where, **changes})


def test_addresses_that_only_their_own_host_can_use():
    assert members.lone_loopback([member(0), member(1)]) is None
    assert members.lone_loopback([member(r, address="127.0.0.1") for r in (0, 1)]) is None
    shown = members.lone_loopback([member(0, address="127.0.1.1"), member(1)])
    assert shown and shown.startswith("rank 0 on node0 would be reached at 127.0.1.1")


def test_what_hosts_may_not_differ_in():
    assert members.disagreement(member(0), member(1)) is None
    shown = members.disagreement(member(0), member(1, torch="2.9.1"))
    assert shown == "rank 0 on node0 has torch 2.13.0, rank 1 on node1 has 2.9.1: install the same"
    many = member(1, config=yaml.safe_dump(dict.fromkeys("abcde", 1)))
    assert "`c` is None and 1 and 2 more keys" in str(members.disagreement(member(0), many))
