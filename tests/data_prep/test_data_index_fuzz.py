"""Damaged pairs of any kind: DataError that names the file, or the same data; never a crash."""

import json
import resource
import struct
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep.errors import DataError
from data_prep.indexed import IndexedDataset, write_indexed

SIZES = [3, 0, 5, 1, 7]
HEADER = struct.Struct("<9sQBQQ")
QUICK = settings(
    deadline=2000, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("fuzz") / "x"
    documents = [np.arange(size) + 10 * size for size in SIZES]
    write_indexed(prefix, documents, vocab_size=300, sidecar={"tokenizer": {"fingerprint": "t"}})
    return {
        suffix: prefix.with_name(f"x.{suffix}").read_bytes() for suffix in ("bin", "idx", "json")
    }


@contextmanager
def little_memory():
    """A count believed without a look at the file would ask for terabytes: refuse at 1 GB more."""
    with open("/proc/self/statm") as stream:
        used = int(stream.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def opened(folder, files):
    """The whole content where it opens, else None after a DataError that names one of the files."""
    for suffix, data in files.items():
        (folder / f"x.{suffix}").write_bytes(data)
    try:
        with little_memory():
            data = IndexedDataset(folder / "x")
            found = [data.get(i).tolist() for i in range(len(data))]
            _ = data.fingerprint
            data.verify()
            return found
    except DataError as error:
        assert any(f"x.{suffix}" in str(error) for suffix in files), error
        return None


def content(good):
    tokens = np.frombuffer(good["bin"], "<u2")
    ends = np.cumsum(SIZES)
    return [tokens[end - size : end].tolist() for end, size in zip(ends, SIZES, strict=True)]


@QUICK
@given(data=st.data())
def test_cut_and_extended_files(good, tmp_path, data):
    suffix = data.draw(st.sampled_from(sorted(good)))
    whole = good[suffix]
    cut = data.draw(st.integers(0, len(whole) - 1))
    more = data.draw(st.binary(min_size=1, max_size=40))
    changed = data.draw(st.sampled_from([whole[:cut], whole + more]))
    found = opened(tmp_path, {**good, suffix: changed})
    # Blanks around the JSON are the one change that changes nothing.
    same = suffix == "json" and changed.strip() == whole.strip() and found == content(good)
    assert found is None or same


@QUICK
@given(data=st.data())
def test_flipped_bits_are_found(good, tmp_path, data):
    suffix = data.draw(st.sampled_from(["bin", "idx"]))
    changed = bytearray(good[suffix])
    at = data.draw(st.integers(0, len(changed) - 1))
    changed[at] ^= 1 << data.draw(st.integers(0, 7))
    assert opened(tmp_path, {**good, suffix: bytes(changed)}) is None


@QUICK
@given(data=st.data())
def test_any_header_over_the_same_arrays(good, tmp_path, data):
    """Wrong magic, version, dtype code and counts up to 2**64 - 1."""
    number = st.integers(0, 2**64 - 1) | st.integers(0, 12)
    header = HEADER.pack(
        data.draw(st.sampled_from([b"MMIDIDX\0\0", b"TNTIDX\0\0\0", b"\0" * 9])),
        data.draw(st.just(1) | number),
        data.draw(st.integers(0, 255)),
        data.draw(st.just(len(SIZES)) | number),
        data.draw(st.just(len(SIZES) + 1) | number),
    )
    found = opened(tmp_path, {**good, "idx": header + good["idx"][HEADER.size :]})
    assert found is None or header == good["idx"][: HEADER.size]


@QUICK
@given(data=st.data())
def test_any_sizes_offsets_and_documents_without_a_sidecar(good, tmp_path, data):
    """What opens must be consistent: nothing is read outside the .bin."""
    (tmp_path / "x.json").unlink(missing_ok=True)
    count = data.draw(st.integers(0, 6))
    numbers = st.integers(0, 8) | st.integers(-(2**31), 2**31 - 1)
    wide = st.integers(0, 40) | st.integers(-(2**63), 2**63 - 1)
    sizes = data.draw(st.lists(numbers, min_size=count, max_size=count))
    true = (np.cumsum(sizes, dtype=np.int64) - np.array(sizes, np.int64)) * 2
    pointers = data.draw(st.just(true.tolist()) | st.lists(wide, min_size=count, max_size=count))
    documents = data.draw(st.just(list(range(count + 1))) | st.lists(wide, max_size=8))
    idx = HEADER.pack(b"MMIDIDX\0\0", 1, 8, count, len(documents))
    idx += np.array(sizes, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    idx += np.array(documents, "<i8").tobytes()
    files = {"idx": idx, "bin": good["bin"]}
    for suffix, raw in files.items():
        (tmp_path / f"x.{suffix}").write_bytes(raw)
    try:
        with little_memory():
            found = IndexedDataset(tmp_path / "x")
            texts = [found.get(i).tolist() for i in range(len(found))]
    except DataError as error:
        assert "x.idx" in str(error) or "x.bin" in str(error)
        return
    tokens = np.frombuffer(good["bin"], "<u2").tolist()
    assert [token for text in texts for token in text] == tokens
    assert found.document_index[0] == 0 and found.document_index[-1] == len(found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@QUICK
@given(data=st.data())
def test_any_value_in_the_sidecar(good, tmp_path, data):
    sidecar = json.loads(good["json"])
    key = data.draw(st.sampled_from(sorted(sidecar)))
    sidecar[key] = data.draw(JSON)
    found = opened(tmp_path, {**good, "json": json.dumps(sidecar).encode()})
    assert found is None or found == content(good)


def test_a_deeply_nested_sidecar(good, tmp_path):
    assert opened(tmp_path, {**good, "json": b"[" * 200_000}) is None
