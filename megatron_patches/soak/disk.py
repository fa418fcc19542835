"""A small file system of its own, so that a disk can really be full."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

BYTES = 128 << 20
BALLAST = "ballast"


def mounted(place: Path, image: Path) -> str:
    """Mount a small ext4 on `place`, kept in the file `image`; returns why not, empty for done.

    A file system that is in `image` already is mounted with what it holds.
    """
    place.mkdir(parents=True, exist_ok=True)
    if os.path.ismount(place):
        return ""
    if os.name != "posix" or os.geteuid() != 0:
        return "only root may mount a file system"
    missing = [program for program in ("mkfs.ext4", "mount", "umount") if not shutil.which(program)]
    if missing:
        return f"{missing[0]} is not installed"
    if not image.is_file():
        with open(image, "wb") as stream:
            stream.truncate(BYTES)
        # No part reserved for root: full shall mean full.
        made = _done(["mkfs.ext4", "-q", "-F", "-m", "0", str(image)])
        if made:
            image.unlink()
            return made
    return _done(["mount", "-o", "loop", str(image), str(place)])


def unmount(place: Path) -> None:
    if os.path.ismount(place):
        _done(["umount", str(place)])


def _done(command: list[str]) -> str:
    """Empty for success, else what the program said, in a line."""
    ran = subprocess.run(command, capture_output=True, text=True)
    said = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
    return f"{command[0]}: {said[0]}" if ran.returncode else ""


def fill(place: Path, spare: int) -> int:
    """Leave `spare` bytes free at most; returns how many are.

    Written, not only reserved: nothing of the file system's own may be given back later.
    """
    block = bytes(1 << 16)
    with open(place / BALLAST, "ab", buffering=0) as stream:
        try:
            while free(place) > spare:
                stream.write(block[: max(4096, min(len(block), free(place) - spare))])
                os.fsync(stream.fileno())
        except OSError as error:
            if error.errno != errno.ENOSPC:  # full is what was wanted
                raise
    return free(place)


def empty(place: Path) -> None:
    (place / BALLAST).unlink(missing_ok=True)
    os.sync()  # ext4 gives the blocks back with the next commit


def free(place: Path) -> int:
    status = os.statvfs(place)
    return status.f_bavail * status.f_frsize
