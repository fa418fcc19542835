"""The .bin/.idx format: NeoX's bytes, every damage named, nothing half-written."""

import json
import os
import pickle
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import DataError
from data_prep.indexed import (
    IndexedDataset,
    read_index,
    token_dtype,
    write_index,
    write_indexed,
)

GOLDEN = Path(__file__).parents[1] / "goldens" / "neox_data"
GOLDEN_NAMES = ("a_text_document", "c_eod_text_document", "c_noeod_text_document")
DOCUMENTS = [[1, 2], [], [3, 4, 5], [6]]


@pytest.fixture
def prefix(tmp_path):
    write_indexed(tmp_path / "x", DOCUMENTS, vocab_size=300, sidecar={"corpus": "test"})
    return tmp_path / "x"


def write_files(tmp_path, idx: bytes, bin_: bytes = b"\0" * 12) -> Path:
    (tmp_path / "x.idx").write_bytes(idx)
    (tmp_path / "x.bin").write_bytes(bin_)
    return tmp_path / "x"


def index_bytes(sizes, *, code=8, version=1, magic=b"MMIDIDX\0\0", documents=None, pointers=None):
    width = {8: 2, 4: 4}.get(code, 4)
    ends = np.cumsum(sizes, dtype=np.int64) * width
    pointers = ends - np.array(sizes) * width if pointers is None else np.array(pointers)
    documents = range(len(sizes) + 1) if documents is None else documents
    return (
        struct.pack("<9sQBQQ", magic, version, code, len(sizes), len(documents))
        + np.array(sizes, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.array(list(documents), "<i8").tobytes()
    )


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_reads_and_rewrites_the_files_of_neox_byte_by_byte(name, tmp_path):
    data = IndexedDataset(GOLDEN / name)
    assert data.sidecar is None and data.dtype == np.uint16
    write_indexed(
        tmp_path / "x", (data.get(i) for i in range(len(data))), vocab_size=500, sidecar={}
    )
    for suffix in (".bin", ".idx"):
        theirs = (GOLDEN / f"{name}{suffix}").read_bytes()
        assert (tmp_path / f"x{suffix}").read_bytes() == theirs
    again = IndexedDataset(tmp_path / "x")
    assert again.fingerprint == data.fingerprint
    again.verify()


def test_sizes_of_the_golden_are_those_neox_reported():
    assert IndexedDataset(GOLDEN / "c_eod_text_document").sizes.tolist() == (
        [32, 43, 145, 31, 1549, 77, 30, 2, 356, 306, 388]
    )


def test_round_trip(prefix):
    data = IndexedDataset(prefix)
    assert [data.get(i).tolist() for i in range(len(data))] == DOCUMENTS
    assert data.sizes.tolist() == [2, 0, 3, 1] and data.sizes.dtype == np.int32
    assert data.pointers.tolist() == [0, 4, 4, 10] and data.pointers.dtype == np.int64
    assert data.document_index.tolist() == [0, 1, 2, 3, 4]
    assert data.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert data.get(2, 1).tolist() == [4, 5] and data.get(2, 1, 1).tolist() == [4]
    assert data.sidecar["corpus"] == "test" and data.sidecar["documents"] == 4
    assert pickle.loads(pickle.dumps(data)).tokens.tolist() == data.tokens.tolist()


def test_get_is_a_copy_that_outlives_the_dataset(prefix):
    ids = IndexedDataset(prefix).get(0)
    ids[0] = 7  # a read-only view of the file would refuse, and one of a closed file would crash
    assert IndexedDataset(prefix).get(0).tolist() == [1, 2]


@pytest.mark.parametrize("i, offset, length", [(4, 0, None), (-1, 0, None), (2, 4, None)])
def test_get_outside_is_an_index_error(prefix, i, offset, length):
    with pytest.raises(IndexError):
        IndexedDataset(prefix).get(i, offset, length)


@pytest.mark.parametrize("offset, length", [(0, 4), (-1, 1), (2, -1), (3, 1)])
def test_get_a_wrong_part_is_an_index_error(prefix, offset, length):
    with pytest.raises(IndexError):
        IndexedDataset(prefix).get(2, offset, length)


@pytest.mark.parametrize("vocab, dtype", [(50257, "u2"), (65499, "u2"), (65500, "i4")])
def test_dtype_by_vocabulary(vocab, dtype, tmp_path):
    assert token_dtype(vocab) == np.dtype(dtype)
    write_indexed(tmp_path / "x", [[vocab - 1]], vocab_size=vocab, sidecar={})
    data = IndexedDataset(tmp_path / "x")
    assert data.tokens.tolist() == [vocab - 1] and data.dtype == np.dtype(dtype)


@pytest.mark.parametrize(
    "document, message",
    [
        ([300], "holds id 300"),
        ([-1], "holds id -1"),
        ([2**63], "id 9223372036854775808"),
        ([1.0], "float64"),
        ([[1, 2]], "2 dimensions"),
        ([True], "bool"),
        (["a"], "not a row of ids"),
    ],
)
def test_bad_ids_are_refused_and_leave_nothing(document, message, tmp_path):
    with pytest.raises(DataError, match=message):
        write_indexed(tmp_path / "x", [[1], document], vocab_size=300, sidecar={})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_nothing_to_write_is_an_error_and_leaves_nothing(documents, tmp_path):
    with pytest.raises(DataError, match="documents to write"):
        write_indexed(tmp_path / "x", documents, vocab_size=300, sidecar={})
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_documents_leaves_nothing(tmp_path):
    def documents():
        yield [1, 2, 3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_indexed(tmp_path / "x", documents(), vocab_size=300, sidecar={})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_overwrite_keeps_the_old_files(prefix):
    before = {p.name: p.read_bytes() for p in prefix.parent.iterdir()}
    with pytest.raises(DataError, match="exists"):
        write_indexed(prefix, [[1]], vocab_size=300, sidecar={})
    with pytest.raises(DataError, match="holds id"):
        write_indexed(prefix, [[1], [999]], vocab_size=300, sidecar={}, overwrite=True)
    assert {p.name: p.read_bytes() for p in prefix.parent.iterdir()} == before
    write_indexed(prefix, [[9]], vocab_size=300, sidecar={}, overwrite=True)
    assert IndexedDataset(prefix).tokens.tolist() == [9]


def test_a_killed_writer_leaves_nothing_that_looks_finished(tmp_path):
    script = (
        "import sys, time\n"
        "from data_prep.indexed import write_indexed\n"
        "def documents():\n"
        "    yield list(range(200)) * 10000\n"
        "    print('started', flush=True)\n"
        "    time.sleep(60)\n"
        "write_indexed(sys.argv[1], documents(), vocab_size=300, sidecar={})\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "x")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout.readline() == b"started\n"
        os.kill(process.pid, signal.SIGKILL)
    names = [p.name for p in tmp_path.iterdir()]
    assert names and all(name.startswith(".x.") and ".partial-" in name for name in names)
    with pytest.raises(DataError, match="missing"):
        IndexedDataset(tmp_path / "x")


def test_offsets_pass_2_to_31(tmp_path):
    sizes = [1_500_000_000] * 3
    write_index(tmp_path / "x.idx", sizes, np.uint16)
    index = read_index(tmp_path / "x.idx")
    assert index.pointers.tolist() == [0, 3_000_000_000, 6_000_000_000]
    write_index(tmp_path / "y.idx", sizes, np.int32)
    assert read_index(tmp_path / "y.idx").pointers.tolist() == [0, 6 * 10**9, 12 * 10**9]
    with pytest.raises(DataError, match="between 0 and"):
        write_index(tmp_path / "z.idx", [2**31], np.uint16)


@pytest.mark.parametrize("cut", [0, 1, 8, 9, 17, 18, 26, 33, 34, 40, 50, 80, 100, -8, -1])
def test_a_cut_index_is_an_error(prefix, cut):
    path = prefix.with_name("x.idx")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"x\.idx"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("cut", [0, 1, 2, 7, -2, -1])
def test_a_cut_bin_is_an_error(prefix, cut):
    path = prefix.with_name("x.bin")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"x\.bin is cut short"):
        IndexedDataset(prefix)


def test_a_longer_bin_is_an_error(prefix):
    with open(prefix.with_name("x.bin"), "ab") as stream:
        stream.write(b"\0\0")
    with pytest.raises(DataError, match="longer than the index says"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    "idx, message",
    [
        (index_bytes([2, 4], magic=b"TNTIDX\0\0\0"), "old lazy/cached format"),
        (b"PK\3\4" + b"\0" * 60, "not a Megatron"),
        (index_bytes([2, 4], version=2), "version 2"),
        (index_bytes([2, 4], code=6), "floating-point"),
        (index_bytes([2, 4], code=99), "unknown type"),
        (index_bytes([]), "no documents"),
        (index_bytes([2, 4]) + b"\0\0", "multimodal"),
        (index_bytes([2, 4]) + b"\0", "cut short or damaged"),
        (index_bytes([2, 4], documents=[0]), "merge tool"),
        (index_bytes([2, 4], documents=[0, 1]), "does not cover"),
        (index_bytes([2, 4], documents=[0, 3, 2]), "does not cover"),
        (index_bytes([2, 4], pointers=[0, 2]), "offset of sequence 1"),
        (index_bytes([-2, 8]), "negative size"),
        (index_bytes([0, 0]), "longer than"),
    ],
)
def test_each_foreign_or_damaged_index_has_its_own_message(idx, message, tmp_path):
    with pytest.raises(DataError, match=message):
        IndexedDataset(write_files(tmp_path, idx))


def test_a_document_may_have_several_sequences(tmp_path):
    data = IndexedDataset(write_files(tmp_path, index_bytes([2, 4], documents=[0, 2])))
    assert len(data) == 2 and data.document_index.tolist() == [0, 2]


@pytest.mark.parametrize(
    "given, message",
    [
        ("x,y", "one prefix"),
        ("x.bin", "give the path without"),
        ("x.idx", "give the path without"),
        ("nowhere", "correct the path"),
    ],
)
def test_wrong_paths_are_explained(prefix, given, message):
    with pytest.raises(DataError, match=message):
        IndexedDataset(prefix.with_name(given))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_missing_half_is_named(prefix, suffix):
    prefix.with_name(f"x{suffix}").unlink()
    with pytest.raises(DataError, match=rf"x\{suffix} is missing while .* is there"):
        IndexedDataset(prefix)


def test_a_sidecar_of_other_data_is_refused(prefix):
    sidecar = json.loads(prefix.with_name("x.json").read_text())
    prefix.with_name("x.json").write_text(json.dumps({**sidecar, "tokens": 7}))
    with pytest.raises(DataError, match="describes 4 documents, 7 tokens"):
        IndexedDataset(prefix)
    prefix.with_name("x.json").write_text("[]")
    with pytest.raises(DataError, match="not a sidecar"):
        IndexedDataset(prefix)


def test_changed_tokens_are_found(prefix):
    data = bytearray(prefix.with_name("x.bin").read_bytes())
    data[0] ^= 1
    prefix.with_name("x.bin").write_bytes(data)
    with pytest.raises(DataError, match="not what its sidecar describes"):
        IndexedDataset(prefix).verify()
    prefix.with_name("x.json").unlink()
    assert IndexedDataset(prefix).fingerprint  # computed, from the changed bytes


def test_read_only_folder_and_many_readers(prefix):
    before = sorted(os.listdir(prefix.parent))
    readers = [IndexedDataset(prefix) for _ in range(8)]
    assert len({reader.fingerprint for reader in readers}) == 1
    assert sorted(os.listdir(prefix.parent)) == before
