"""Damage to files: of any bytes, and of what their format means, checksums made right again.

A damage that a checksum finds tests the checksum alone. So containers are opened, a part is changed,
and they are closed again, as somebody would who means harm.
"""

from __future__ import annotations

import gzip
import io
import pickletools
import random
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable

import zstandard
from fuzz_text import changed_csv, changed_json, changed_lines, changed_yaml
from fuzz_values import NAMES, NUMBERS, TOKENS

MOST_BYTES = 4 << 20


def changed(name: str, data: bytes, draw: random.Random) -> bytes:
    """`data`, the content of a file called `name`, with one change; at times the same again."""
    format_of = next((change for end, change in _FORMATS.items() if name.endswith(end)), None)
    if format_of is None or draw.random() < 0.25:
        return changed_bytes(data, draw)
    try:
        return format_of(data, draw)[:MOST_BYTES]
    except Exception:  # an earlier change has broken the format
        return changed_bytes(data, draw)


# ---- any bytes -------------------------------------------------------------------------------


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """A flipped bit, a cut, a splice, a number of the kind that is believed, or a known token."""
    return draw.choice(_BYTES)(data, draw, draw.randrange(len(data) + 1))[:MOST_BYTES]


def _flip(data: bytes, draw: random.Random, at: int) -> bytes:
    copy = bytearray(data or b"\0")
    for _ in range(draw.choice((1, 1, 2, 8))):
        copy[draw.randrange(len(copy))] ^= 1 << draw.randrange(8)
    return bytes(copy)


def _overwrite(data: bytes, draw: random.Random, at: int) -> bytes:
    token = draw.choice(TOKENS)
    return data[:at] + token + data[at + len(token) :]


def _number(data: bytes, draw: random.Random, at: int) -> bytes:
    size = draw.choice((1, 2, 4, 8))
    at -= at % draw.choice((1, size))
    value = (draw.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, draw.choice(("little", "big")))
    return data[:at] + value + data[at + size :]


def _repeat(data: bytes, draw: random.Random, at: int) -> bytes:
    part = data[at : at + draw.choice((1, 8, 64, 512))]
    return data[:at] + part * draw.choice((2, 3, 50)) + data[at:]


def _drop(data: bytes, draw: random.Random, at: int) -> bytes:
    return data[:at] + data[at + draw.choice((1, 2, 8, 64, 512)) :]


def _splice(data: bytes, draw: random.Random, at: int) -> bytes:
    return data[:at] + data[draw.randrange(len(data) + 1) :]


_BYTES: tuple[Callable[[bytes, random.Random, int], bytes], ...] = (
    *(_flip, _flip, _overwrite, _number, _number, _repeat, _drop, _splice),
    lambda data, draw, at: data[:at],
    lambda data, draw, at: data[:at] + draw.choice(TOKENS) + data[at:],
    lambda data, draw, at: data[:at] + draw.randbytes(draw.choice((1, 4, 30))) + data[at:],
)


# ---- containers ------------------------------------------------------------------------------


def _gzip(data: bytes, draw: random.Random, inner: str = "") -> bytes:
    return gzip.compress(changed(inner, gzip.decompress(data), draw), 1, mtime=0)


def _zstd(data: bytes, draw: random.Random, inner: str = "") -> bytes:
    whole = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    if draw.random() < 0.1:  # a window that asks for more memory than the data
        log = draw.choice((27, 30, 31))
        settings = zstandard.ZstdCompressionParameters(window_log=log, write_content_size=False)
        stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()
        return stream.compress(whole) + stream.flush()
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(
        changed(inner, whole, draw)
    )


def _zip(data: bytes, draw: random.Random, own: str = "") -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    at = draw.randrange(len(members))
    if own:  # what matters in a file of torch is the pickle
        at = next(i for i, (name, _) in enumerate(members) if name.endswith(own))
    name, content = members[at]
    kind = draw.random()
    if kind < 0.1:
        name = draw.choice(NAMES)
    elif kind < 0.15:
        members.append(members[at])
    elif kind < 0.2:
        members.pop(at)
    if members and kind >= 0.2 or kind < 0.1:
        members[at] = (name, changed(name, content, draw) if kind >= 0.1 else content)
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w") as archive:
        warnings.simplefilter("ignore")  # of a name that is there twice
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content)
    return stream.getvalue()


def _tar(data: bytes, draw: random.Random) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        members = [(info, (archive.extractfile(info) or io.BytesIO()).read()) for info in archive]
    info, content = members[draw.randrange(len(members))]
    kind = draw.random()
    if kind < 0.3:
        info.name = draw.choice(NAMES)
    elif kind < 0.5:
        info.type = draw.choice((b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"S", b"x", b"L", b"?"))
        info.linkname = draw.choice(NAMES)
    elif kind < 0.6:
        members += [(info, content)] * draw.choice((1, 3))
    elif kind < 0.8:
        content = changed(info.name, content, draw)
        members = [(i, content if i is info else c) for i, c in members]
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=draw.choice((0, 1, 2))) as archive:
        for item, bytes_of in members:
            item.size = len(bytes_of)
            archive.addfile(item, io.BytesIO(bytes_of))
    return stream.getvalue() if kind < 0.9 else _tar_size(stream.getvalue(), draw)


def _tar_size(data: bytes, draw: random.Random) -> bytes:
    """Another size in the first header, its checksum right."""
    header = bytearray(data[:512])
    header[124:136] = draw.choice((b"77777777777\0", b"\x80" + b"\xff" * 11, b"00000000001\0"))
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + data[512:]


def _pickle(data: bytes, draw: random.Random) -> bytes:
    """Another class, number or text in a pickle, which stays one; or any bytes of it."""
    places = [
        (opcode.name, str(argument), at)
        for opcode, argument, at in pickletools.genops(data)
        if at is not None
        and opcode.name in ("GLOBAL", "BININT", "BININT1", "BININT2", "BINUNICODE")
    ]
    name, argument, at = draw.choice(places)
    if name == "GLOBAL":
        new = draw.choice(_CLASSES)
        old = b"c" + argument.replace(" ", "\n", 1).encode() + b"\n"
    elif name == "BINUNICODE":
        text = draw.choice(TOKENS)
        new = b"X" + struct.pack("<I", len(text)) + text
        old = data[at : at + 5 + len(argument.encode())]
    else:
        value = draw.choice(NUMBERS) % (1 << 31)
        new = b"J" + struct.pack("<i", value)
        old = data[at : at + {"BININT": 5, "BININT1": 2, "BININT2": 3}[name]]
    return data[:at] + new + data[at + len(old) :]


_CLASSES = (
    *(
        b"cos\nsystem\n",
        b"cbuiltins\neval\n",
        b"csubprocess\nPopen\n",
        b"ccollections\nOrderedDict\n",
    ),
    *(b"ctorch.nn.modules.linear\nLinear\n", b"ctorch._utils\n_rebuild_parameter\n"),
    *(b"cnumpy.core.multiarray\n_reconstruct\n", b"ctorch\nFloatStorage\n", b"ctorch\nload\n"),
    *(b"ctorch._utils\n_rebuild_sparse_tensor\n", b"ctorch._utils\n_rebuild_qtensor\n"),
    *(b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n", b"ctorch\nSize\n", b"ctorch\ndevice\n"),
    *(b"c_codecs\nencode\n", b"ctorch._tensor\n_rebuild_from_type_v2\n", b"ctorch\nbfloat16\n"),
)


def _safetensors(data: bytes, draw: random.Random) -> bytes:
    """Another header, its length right."""
    (length,) = struct.unpack("<Q", data[:8])
    header = changed_json(data[8 : 8 + length], draw)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


_FORMATS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".pt": lambda data, draw: _zip(data, draw, own="data.pkl" if draw.random() < 0.8 else ""),
    "data.pkl": _pickle,
    ".safetensors": _safetensors,
    ".tar.gz": lambda data, draw: _gzip(data, draw, ".tar"),
    ".tar.zst": lambda data, draw: _zstd(data, draw, ".tar"),
    ".jsonl.gz": lambda data, draw: _gzip(data, draw, ".jsonl"),
    ".jsonl.zst": lambda data, draw: _zstd(data, draw, ".jsonl"),
    ".json.gz": lambda data, draw: _gzip(data, draw, ".json"),
    ".json.zst": lambda data, draw: _zstd(data, draw, ".json"),
    ".gz": _gzip,
    ".zst": _zstd,
    ".zip": _zip,
    ".tar": _tar,
    ".jsonl": changed_lines,
    ".json": changed_json,
    ".yml": changed_yaml,
    ".csv": changed_csv,
}
