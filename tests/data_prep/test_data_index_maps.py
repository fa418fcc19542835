"""Opening large data: what is computed once, what is never written, what concurrent jobs share."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from prepare_tools import ROOT

from data_prep import stamps
from data_prep.files import sha256_file
from data_prep.index import put_index
from data_prep.indexed import IndexedDataset, write_indexed
from data_prep.stamps import stamped_sha256


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A pair of another tool (no sidecar) that counts as large; how often it is hashed."""
    monkeypatch.setattr(stamps, "WORTH_A_STAMP", 10)
    monkeypatch.delenv(stamps.CACHE, raising=False)
    write_indexed(tmp_path / "d" / "x", [[1, 2, 3]] * 50, vocab_size=300, sidecar={})
    (tmp_path / "d" / "x.json").unlink()
    return tmp_path / "d" / "x"


@pytest.fixture
def hashed(monkeypatch):
    times = []

    def counting(path):
        times.append(path)
        return sha256_file(path)

    monkeypatch.setattr(stamps, "sha256_file", counting)
    return times


def test_the_second_start_hashes_nothing_and_changed_data_are_hashed_anew(large, hashed):
    first = IndexedDataset(large).fingerprint
    assert IndexedDataset(large).fingerprint == first and len(hashed) == 1
    assert [p.name for p in large.parent.iterdir() if p.name.startswith(".")] == (
        [".x.bin.sha256.json"]
    )
    path = large.with_name("x.bin")
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    before = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # an old time hides nothing
    assert IndexedDataset(large).fingerprint != first and len(hashed) == 2


def test_small_files_and_files_with_a_sidecar_leave_no_stamp(tmp_path):
    write_indexed(tmp_path / "x", [[1, 2, 3]], vocab_size=300, sidecar={})
    first = IndexedDataset(tmp_path / "x").fingerprint
    (tmp_path / "x.json").unlink()
    assert IndexedDataset(tmp_path / "x").fingerprint == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"key": [1, 2, 3], "sha256": "0"}'])
def test_a_damaged_or_foreign_stamp_is_replaced(large, hashed, content):
    large.with_name(".x.bin.sha256.json").write_text(content)
    found = stamped_sha256(large.with_name("x.bin"))
    assert found == sha256_file(large.with_name("x.bin")) and len(hashed) == 1
    assert stamped_sha256(large.with_name("x.bin")) == found and len(hashed) == 1


def test_a_read_only_folder_uses_the_cache_folder_or_says_that_it_cannot(
    large, hashed, tmp_path, monkeypatch, capsys
):
    write_json = stamps.write_json

    def read_only(target, content):  # tests may run as root, whom permissions do not stop
        if target.parent == large.parent:
            raise PermissionError(target)
        write_json(target, content)

    monkeypatch.setattr(stamps, "write_json", read_only)
    path = large.with_name("x.bin")
    found = stamped_sha256(path)
    assert "could not be kept" in capsys.readouterr().err
    monkeypatch.setenv(stamps.CACHE, str(tmp_path / "cache"))
    assert stamped_sha256(path) == found
    assert "read-only; its hash is kept in" in capsys.readouterr().err
    assert stamped_sha256(path) == found and len(hashed) == 2
    assert capsys.readouterr().err == ""


def test_jobs_started_together_hash_once(large, tmp_path):
    script = (
        "import sys, time\n"
        "from data_prep import stamps\n"
        "stamps.WORTH_A_STAMP = 10\n"
        "original = stamps.sha256_file\n"
        "def slow(path):\n"
        "    open(sys.argv[2], 'a').write('hashed\\n')\n"
        "    time.sleep(1)\n"
        "    return original(path)\n"
        "stamps.sha256_file = slow\n"
        "from data_prep.indexed import IndexedDataset\n"
        "print(IndexedDataset(sys.argv[1]).fingerprint)\n"
    )
    log = tmp_path / "log"
    jobs = [
        subprocess.Popen([sys.executable, "-c", script, str(large), str(log)], cwd=ROOT,
                         stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]  # fmt: skip
    printed = {job.communicate()[0] for job in jobs}
    assert len(printed) == 1 and all(job.returncode == 0 for job in jobs)
    assert log.read_text().count("hashed") == 1


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_three_million_documents_open_within_a_second_and_copy_nothing(tmp_path):
    """10 billion tokens as far as opening goes: a real index, and a sparse .bin of 20 GB."""
    sizes = np.random.RandomState(0).randint(1, 6666, 3_000_000).astype("i4")
    with open(tmp_path / "x.idx", "wb") as stream:
        put_index(stream, sizes, np.dtype("<u2"))
    with open(tmp_path / "x.bin", "wb") as stream:
        stream.truncate(2 * int(sizes.sum(dtype=np.int64)))
    start, before = time.process_time(), resident()
    data = IndexedDataset(tmp_path / "x")
    seconds = time.process_time() - start
    assert len(data.tokens) > 9_900_000_000 and seconds < 1, seconds
    for array in (data.sizes, data.pointers, data.document_index, data.tokens):
        assert isinstance(array.base, np.memmap) or isinstance(array, np.memmap)
    # Pages of the mapped index count as resident; a copy would come on top of its 60 MB.
    assert resident() - before < 100_000_000
    assert not data.get(2_999_999).any()


def test_memory_is_flat_in_tokens(tmp_path):
    import tracemalloc

    document = np.arange(100_000, dtype=np.int32) % 300
    tracemalloc.start()
    start = time.monotonic()
    write_indexed(tmp_path / "x", (document for _ in range(200)), vocab_size=300, sidecar={})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert IndexedDataset(tmp_path / "x").tokens.size == 20_000_000
    assert peak < 4_000_000, (peak, time.monotonic() - start)
