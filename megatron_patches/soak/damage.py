"""Damage to a run's files: to a step, and to `latest`. Each returns what it did, in a few words."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path, random.Random], str]


def _states(step: Path, chance: random.Random) -> Path:
    return chance.choice(sorted(step.glob("*.pt")))


def flip_a_bit(step: Path, chance: random.Random) -> str:
    """Anywhere in a file; torch loads most such files without a word."""
    file = _states(step, chance)
    place, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
    with open(file, "r+b") as stream:
        stream.seek(place)
        old = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([old ^ 1 << bit]))
    return f"{file.name}: bit {bit} of byte {place}"


def truncate(step: Path, chance: random.Random) -> str:
    file = _states(step, chance)
    size = file.stat().st_size
    left = chance.choice([0, size - 1, chance.randrange(size)])
    os.truncate(file, left)
    return f"{file.name}: {left} of {size} bytes"


def lose_a_file(step: Path, chance: random.Random) -> str:
    file = _states(step, chance)
    file.unlink()
    return file.name


def add_a_file(step: Path, chance: random.Random) -> str:
    """A rank's file that no rank wrote."""
    file = _states(step, chance)
    added = file.with_name(file.name.replace("mp_rank_00", "mp_rank_01"))
    shutil.copy(file, added)
    return added.name


def spoil_the_manifest(step: Path, chance: random.Random) -> str:
    file = step / "manifest.json"
    file.write_bytes(chance.randbytes(chance.randrange(200)))
    return file.name


def lose_the_step(step: Path, chance: random.Random) -> str:
    shutil.rmtree(step)
    return step.name


def garbage_in_latest(step: Path, chance: random.Random) -> str:
    content = chance.choice([b"", b"global_step999999", chance.randbytes(50), b"../../etc"])
    (step.parent / "latest").write_bytes(content)
    return repr(content[:20])


def lose_latest(step: Path, chance: random.Random) -> str:
    (step.parent / "latest").unlink()
    return "latest"


TO_A_STEP: tuple[Damage, ...] = (
    flip_a_bit,
    truncate,
    lose_a_file,
    add_a_file,
    spoil_the_manifest,
    lose_the_step,
)
TO_LATEST: tuple[Damage, ...] = (garbage_in_latest, lose_latest)
WHILE_WRITING: tuple[Damage, ...] = (flip_a_bit, truncate, lose_a_file)
