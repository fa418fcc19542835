"""Known attacks that are not a few changed bytes: code in pickles, bombs, names that lead elsewhere."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from typing import Any

from fuzz_target import Files

ZEROS = (1 << 30) + (1 << 26)  # what bombs expand to: above a document's largest size


class Runs:
    """Unpickling it starts a program."""

    def __reduce__(self) -> Any:
        return os.system, ("echo fuzzed > fuzzed",)


class Evaluates:
    """Unpickling it evaluates text."""

    def __reduce__(self) -> Any:
        return eval, ("open('fuzzed', 'w')",)


def pickled(value: Any, *, names: dict[str, Any] | None = None) -> bytes:
    """`value` beside `names` as `torch.save` writes it."""
    import torch

    stream = io.BytesIO()
    torch.save({**(names or {}), "extra": value}, stream)
    return stream.getvalue()


def zip_of_zeros(name: str, size: int = 1 << 28) -> bytes:
    """A zip whose one member expands a thousand times."""
    stream, info = io.BytesIO(), zipfile.ZipInfo(name)
    info.compress_type = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(stream, "w") as archive, archive.open(info, "w") as member:
        for _ in range(size >> 20):
            member.write(bytes(1 << 20))
    return stream.getvalue()


def gzip_of_zeros(size: int = ZEROS) -> bytes:
    """One block of zeros, packed once and repeated: expands a thousand times."""
    mebibyte = bytes(1 << 20)
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(mebibyte) + packer.flush(zlib.Z_FULL_FLUSH)
    check = 0
    for _ in range(size >> 20):
        check = zlib.crc32(mebibyte, check)
    head = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
    return head + block * (size >> 20) + b"\x03\0" + struct.pack("<II", check, size & 0xFFFFFFFF)


def zstd_of(byte: bytes, size: int = ZEROS) -> bytes:
    """A frame of blocks that say "this byte, 131072 times": expands 30,000 times."""
    count, length = size >> 17, 1 << 17
    block = struct.pack("<I", 1 << 1 | length << 3)[:3] + byte
    last = struct.pack("<I", 1 | 1 << 1 | length << 3)[:3] + byte
    return struct.pack("<IBB", 0xFD2FB528, 0, 7 << 3) + block * (count - 1) + last


def zstd_window(log: int = 31) -> bytes:
    """A small frame that asks for a window of 2^log bytes."""
    header = struct.pack("<IBB", 0xFD2FB528, 0x00, (log - 10) << 3)
    return header + struct.pack("<I", 1 | 5 << 3)[:3] + b"hello"


def tar_with(*members: tuple[str, bytes, str]) -> bytes:
    """Members as (name, type, link); regular ones hold a few bytes."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            content = b"content" if kind == tarfile.REGTYPE else b""
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def tar_huge(name: str) -> bytes:
    """A member that claims eight exabytes."""
    header = bytearray(tar_with((name, tarfile.REGTYPE, ""))[:512])
    header[124:136] = b"\x80" + b"\0" * 3 + struct.pack(">Q", 1 << 62)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def tar_long_name(length: int = 1 << 40) -> bytes:
    """A header that says that the next member's name has a terabyte."""
    header = bytearray(tar_with(("././@LongLink", tarfile.GNUTYPE_LONGNAME, ""))[:512])
    header[124:136] = b"\x80" + b"\0" * 3 + struct.pack(">Q", length)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


def escapes(good: str) -> dict[str, bytes]:
    """Tar archives with one member each that leads elsewhere or is no file; `good` is a name taken."""
    step = good.rpartition("/")[0]
    return {
        "dots": tar_with((f"{step}/../../../outside/x", tarfile.REGTYPE, "")),
        "absolute": tar_with(("/outside/x", tarfile.REGTYPE, "")),
        "symlink": tar_with((good, tarfile.SYMTYPE, "../../outside/secret")),
        "symlink-folder": tar_with(
            (step, tarfile.SYMTYPE, "../../outside"), (good, tarfile.REGTYPE, "")
        ),
        "hardlink": tar_with((good, tarfile.LNKTYPE, "../../outside/secret")),
        "device": tar_with((good, tarfile.CHRTYPE, "")),
        "pipe": tar_with((good, tarfile.FIFOTYPE, "")),
        "huge": tar_huge(good),
        "long-name": tar_long_name(),
    }


def deep_json(depth: int = 200_000) -> bytes:
    return b"[" * depth + b"]" * depth


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header, which may say a wrong length."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def yaml_aliases(lines: int = 12) -> bytes:
    """Nine to the power of `lines` values."""
    text = 'a0: &a0 ["x", "x", "x", "x", "x", "x", "x", "x", "x"]\n'
    for n in range(1, lines):
        text += f"a{n}: &a{n} [" + ", ".join([f"*a{n - 1}"] * 9) + "]\n"
    return text.encode()


def yaml_attacks(good: bytes) -> dict[str, bytes]:
    """YAML files by name: code in tags, aliases, depth, repeated keys."""
    return {
        "python-object": good + b"save: !!python/object/apply:os.system ['echo x > fuzzed']\n",
        "python-name": good + b"save: !!python/name:os.system\n",
        "python-module": good + b"save: !!python/module:antigravity\n",
        "aliases": good + yaml_aliases(),
        "self-reference": good + b"save: &x [*x]\n",
        "merge": good + b"x: &x {a: 1}\n<<: *x\n",
        "twice": good + b"seed: 1\nseed: 2\n",
        "deep-list": good + b"save: " + b"[" * 100_000 + b"\n",
        "deep-mapping": good + b"save: " + b"{a: " * 50_000 + b"\n",
        "deep-blocks": good + b"save:\n" + b"".join(b" " * n + b"- \n" for n in range(1, 1500)),
        "long-number": good + b"seed: " + b"9" * 100_000 + b"\n",
        "long-line": good + b"save: " + b"x" * 8_000_000 + b"\n",
        "zero-byte": good + b"save: a\0b\n",
        "utf-16": b"\xff\xfe" + "seed: 1\n".encode("utf-16-le"),
    }


def with_file(base: Files, name: str, attacks: dict[str, bytes]) -> dict[str, Files]:
    """Each attack in place of one file of a sound input."""
    return {key: {**base, name: data} for key, data in attacks.items()}


def code_in_pickles(sound: dict[str, Any]) -> dict[str, bytes]:
    """Files of torch and bare pickles that run something when they are loaded with trust."""
    return {
        "system": pickled(Runs(), names=sound),
        "eval": pickled(Evaluates(), names=sound),
        "bare-pickle": pickle.dumps({**sound, "extra": Runs()}, protocol=2),
        "bare-eval": pickle.dumps({"module": Evaluates()}, protocol=4),
    }
