"""Random documents, every writer, random damage: exactly the documents, or a DataError.

What the bytes cannot show is left out, and is only this: a flipped bit where the format has no
checksum (plain .jsonl and .txt, texts in a bare .tar, arrow, parquet), and a cut exactly between
two lines of a plain .jsonl, two zstd frames or two gzip members. `--sha256` is for those.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.errors import DataError
from data_prep.reading import Reading, expand, read

# The same few seconds of examples in every run; FUZZ_EXAMPLES=20000 searches anew, and longer.
_ASKED = os.environ.get("FUZZ_EXAMPLES")
FUZZ = settings(
    max_examples=int(_ASKED or 300),
    deadline=timedelta(seconds=10),  # a hang is a failure
    derandomize=_ASKED is None,
    database=None,
)

TEXT = st.text(min_size=1, max_size=60)
DOCUMENTS = st.lists(TEXT, min_size=1, max_size=12)


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data)


def gz(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=1, mtime=0)


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def raw_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": t}, ensure_ascii=False).encode() + b"\r\n" for t in texts)


def dat(texts: list[str]) -> bytes:
    return b"".join(b"%016d%b" % (len(t.encode()), t.encode()) for t in texts)


def tar(*members: tuple[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def plain(texts: list[str]) -> list[str]:
    """As texts in files: a mark at the start belongs to the file, and a NUL makes no text."""
    return [f"x{text}".replace("\0", "") for text in texts]


def tar_of_texts(texts: list[str]) -> bytes:
    return tar(*((f"{'ü' * (i * 30)}{i}.tex", t.encode()) for i, t in enumerate(plain(texts))))


def owt2(texts: list[str]) -> bytes:
    half = len(texts) // 2
    parts = [part for part in (texts[:half], texts[half:]) if part]
    return tar(*((f"2005-{i:02}.jsonl.zst", zst(lines(part))) for i, part in enumerate(parts)))


Writer = Callable[[list[str]], bytes]
WRITERS: dict[str, Writer] = {
    ".jsonl": lines,
    ".json": lambda texts: json.dumps(texts, indent=1).encode(),
    ".jsonl.zst": lambda texts: zst(lines(texts)),
    ".jsonl.gz": lambda texts: gz(raw_lines(texts)),
    ".json.gz": lambda texts: gz(json.dumps([{"text": t} for t in texts]).encode()),
    ".json.zst": lambda texts: zst(json.dumps(texts, ensure_ascii=False).encode()),
    ".dat.zst": lambda texts: zst(dat(texts)),
    ".tar": tar_of_texts,
    ".tar.gz": lambda texts: gz(tar_of_texts(texts)),
    ".tar.zst": lambda texts: zst(tar_of_texts(texts)),
    ".jsonl.zst.tar": owt2,
}
JOINABLE = [ending for ending in WRITERS if ending not in (".json", ".json.gz", ".json.zst")]
# Everything in them is under a checksum, or is syntax, or is padding.
CHECKED = [ending for ending in WRITERS if ending not in (".jsonl", ".json", ".tar")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def expected(ending: str, texts: list[str]) -> list[str]:
    return plain(texts) if ending.startswith(".tar") else texts


def result(folder: Path, ending: str, data: bytes, on_bad_line: str = "stop") -> list[str] | None:
    """The documents, None for a DataError that names the file in one line; all else fails."""
    path = folder / f"a{ending}"
    path.write_bytes(data)
    try:
        return [d.text for d in read(expand([path]), Reading(on_bad_line=on_bad_line))]
    except DataError as error:
        assert str(error).startswith(str(path)) and "\n" not in str(error)
        return None


@FUZZ
@given(ending=st.sampled_from(sorted(WRITERS)), texts=DOCUMENTS)
def test_what_is_written_is_read(folder: Path, ending: str, texts: list[str]) -> None:
    assert result(folder, ending, WRITERS[ending](texts)) == expected(ending, texts)


@FUZZ
@given(ending=st.sampled_from(sorted(WRITERS)), texts=DOCUMENTS, at=st.floats(0, 1))
def test_a_cut_is_an_error(folder: Path, ending: str, texts: list[str], at: float) -> None:
    data = WRITERS[ending](texts)
    cut = int(at * (len(data) - 1))
    found = result(folder, ending, data[:cut])
    if found is None:
        return
    if ending == ".jsonl":  # between two lines: not to be seen
        assert data[:cut] and (data[cut - 1 : cut] == b"\n" or data[cut : cut + 1] == b"\n")
        assert found == texts[: len(found)]
    else:  # only what follows the end of the archive, or of the array, may go
        assert not data[cut:].strip(b"\0")
        assert found == expected(ending, texts)


@FUZZ
@given(
    ending=st.sampled_from(CHECKED),
    texts=DOCUMENTS,
    at=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_is_an_error_or_harmless(
    folder: Path, ending: str, texts: list[str], at: float, bit: int
) -> None:
    data = bytearray(WRITERS[ending](texts))
    data[int(at * len(data))] ^= 1 << bit
    assert result(folder, ending, bytes(data)) in (None, expected(ending, texts))


@FUZZ
@given(
    ending=st.sampled_from([".jsonl", ".json", ".tar"]),
    texts=DOCUMENTS,
    at=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_a_flipped_bit_without_a_checksum_costs_no_other_document(
    folder: Path, ending: str, texts: list[str], at: float, bit: int
) -> None:
    data = bytearray(WRITERS[ending](texts))
    data[int(at * len(data))] ^= 1 << bit
    found, wanted = result(folder, ending, bytes(data)), expected(ending, texts)
    if found is not None:
        # One text may have changed, may have become blank, or a line end may have cut it in two.
        assert sum(text in found for text in set(wanted)) >= len(set(wanted)) - 2


@FUZZ
@given(ending=st.sampled_from(JOINABLE), parts=st.lists(DOCUMENTS, min_size=2, max_size=4))
def test_files_joined_end_to_end(folder: Path, ending: str, parts: list[list[str]]) -> None:
    data = b"".join(WRITERS[ending](part) for part in parts)
    assert result(folder, ending, data) == [t for part in parts for t in expected(ending, part)]


@FUZZ
@given(
    ending=st.sampled_from([".json", ".json.gz", ".json.zst"]),
    parts=st.lists(DOCUMENTS, min_size=2, max_size=3),
)
def test_arrays_joined_end_to_end_are_an_error(
    folder: Path, ending: str, parts: list[list[str]]
) -> None:
    assert result(folder, ending, b"".join(WRITERS[ending](part) for part in parts)) is None


@FUZZ
@given(
    ending=st.sampled_from(sorted(WRITERS)),
    data=st.binary(max_size=1200),
    on_bad_line=st.sampled_from(["stop", "skip"]),
)
def test_noise_is_an_error_or_text(
    folder: Path, ending: str, data: bytes, on_bad_line: str
) -> None:
    result(folder, ending, data, on_bad_line)


@FUZZ
@given(
    ending=st.sampled_from(sorted(WRITERS)),
    texts=DOCUMENTS,
    noise=st.binary(min_size=1, max_size=600),
    at=st.floats(0, 1),
)
def test_noise_in_the_middle_of_a_checked_file(
    folder: Path, ending: str, texts: list[str], noise: bytes, at: float
) -> None:
    data = WRITERS[ending](texts)
    cut = int(at * len(data))
    found = result(folder, ending, data[:cut] + noise + data[cut:], "skip")
    if ending in CHECKED and found is not None:
        assert found == expected(ending, texts)
