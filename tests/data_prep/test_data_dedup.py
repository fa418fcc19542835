"""Exact duplicates: found by hash, counted, in a bounded memory."""

import hashlib
import random
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
from prepare_tools import run, write_jsonl

from data_prep.indexed import IndexedDataset
from data_prep.seen import Seen


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(2**48 - 3, 2**48 + 3), max_size=200))
def test_equals_a_python_set(keys):
    seen, known = Seen(), set()
    for key in keys:
        assert seen.add(key.to_bytes(8, "big") + b"rest") == (key not in known)
        known.add(key)


def test_at_most_16_bytes_a_document_besides_the_shelves():
    count, generator = 400_000, random.Random(0)
    tracemalloc.start()
    seen = Seen()
    for _ in range(count):
        seen.add(generator.randbytes(8))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 16 * count + 6_000_000, size / count


def test_the_option_counts_and_its_opposite_keeps(tmp_path, capsys):
    records = [{"text": f"text {i % 30}"} for i in range(100)] + [{"text": "text 1 "}]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    base = ["jsonl", "--input", source, "--tokenizer", "byte", "--split", "1", "--output"]
    for name, flags, documents in (
        ("default", [], 31),
        ("on", ["--deduplicate"], 31),
        ("off", ["--keep-duplicates"], 101),
    ):
        code, _, log = run(capsys, *base, tmp_path / name, *flags)
        sidecar = IndexedDataset(tmp_path / name / "train").sidecar
        assert code == 0 and sidecar["documents"] == documents
        assert sidecar["dropped"]["duplicates"] == 101 - documents
        assert f"{101 - documents} duplicates" in log


def test_a_duplicate_never_crosses_the_splits(tmp_path, capsys):
    records = [{"text": f"text {i % 200}"} for i in range(600)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    assert run(capsys, "jsonl", "--input", source, "--tokenizer", "byte", "--keep-duplicates",
               "--output", tmp_path / "o")[0] == 0  # fmt: skip
    texts = {}
    for split in ("train", "valid", "test"):
        data = IndexedDataset(tmp_path / "o" / split)
        for i in range(len(data)):
            key = hashlib.sha256(data.get(i).tobytes()).digest()
            assert texts.setdefault(key, split) == split
