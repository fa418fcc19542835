"""What is fuzzed: sound inputs, the reader that gets them damaged, and what it may answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from fuzz_change import changed

Files: TypeAlias = dict[str, bytes]  # the files of one input by their name in its folder


class Refused(Exception):
    """A command line ended with this exit code and printed this."""

    def __init__(self, code: Any, said: str) -> None:
        super().__init__(f"exit code {code}: {said}")
        self.code, self.said = code, said


@dataclass(frozen=True)
class Target:
    """A reader and its inputs.

    Attributes:
        name: of the target and of its folder of seeds.
        reads: what the table says is read.
        bases: makes the sound inputs, each of which must be accepted.
        read: the reader; returns something that can be compared.
        refusals: the project's own classes of errors that it may raise.
        sealed: every byte is under a checksum: what is accepted must give what a base gives.
        judge: a complaint about what was accepted, None: nothing to say against it.
        attacks: makes known attacks by name. Each must be refused, unless its name starts with
            "harmless": then it must do no harm.
        kept: files that are not changed.
        stays: files that may be changed but are there in every input.
        memory: bytes that a reading may take, above what the process has when it begins.
        share: cases in a test, relative to the others; below 1 for slow readers.
    """

    name: str
    reads: str
    bases: Callable[[], Sequence[Files]]
    read: Callable[[Path], Any]
    refusals: tuple[type[Exception], ...]
    sealed: bool = False
    judge: Callable[[Any], str | None] = lambda _: None
    attacks: Callable[[], Mapping[str, Files]] = dict
    kept: frozenset[str] = frozenset()
    stays: frozenset[str] = frozenset()
    memory: int = 1 << 30
    share: float = 1.0
    _made: dict[str, Any] = field(default_factory=dict, compare=False)

    def sound(self) -> Sequence[Files]:
        """The bases, made once."""
        if "bases" not in self._made:
            self._made["bases"] = self.bases()
        made: Sequence[Files] = self._made["bases"]
        return made

    def known(self) -> Mapping[str, Files]:
        """The attacks, made once."""
        if "attacks" not in self._made:
            self._made["attacks"] = self.attacks()
        made: Mapping[str, Files] = self._made["attacks"]
        return made

    def case(self, seed: int, number: int) -> Files:
        """Damaged input `number` of `seed`, always the same."""
        draw = random.Random(f"{seed}/{self.name}/{number}")
        files = dict(draw.choice(self.sound()))
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            _change_one(files, self, draw)
        return files


def _change_one(files: Files, target: Target, draw: random.Random) -> None:
    names = sorted(set(files) - target.kept)
    if not names:  # all were removed
        return
    name, kind = draw.choice(names), draw.random()
    if kind < 0.02 and name not in target.stays:
        del files[name]
    elif kind < 0.04:
        files[name] = files[draw.choice(names)]
    else:
        files[name] = changed(name, files[name], draw)


def write(files: Files, folder: Path) -> None:
    """The input as files of `folder`, which is made."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_folder(folder: Path) -> Files:
    """The reverse of `write`."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
