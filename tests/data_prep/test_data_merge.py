"""Merged pairs: every document where it was, one tokenizer, the widest dtype, nothing half-done."""

import json

import numpy as np
import pytest
from prepare_tools import GOLDEN, quiet, run, tree, write_jsonl

from data_prep.errors import DataError, UsageError
from data_prep.index import put_index
from data_prep.indexed import IndexedDataset, write_indexed
from data_prep.merging import merge
from data_prep.prepare import prepare

DOCUMENTS = {"a": [[1, 2], [], [3, 4, 5]], "b": [[6]], "c": [[7, 8], [9]]}


def make(folder, name, documents, tokenizer="t", vocab_size=300, **more):
    sidecar = {"tokenizer": {"fingerprint": tokenizer}, "text_bytes": 10, **more}
    write_indexed(folder / name, documents, vocab_size=vocab_size, sidecar=sidecar)
    return folder / name


def read_all(prefix):
    data = IndexedDataset(prefix)
    return [data.get(i).tolist() for i in range(len(data))]


@pytest.fixture
def prefixes(tmp_path):
    return [make(tmp_path, name, documents) for name, documents in DOCUMENTS.items()]


def test_equals_writing_all_documents_at_once(prefixes, tmp_path):
    merged = merge(prefixes, tmp_path / "m", say=quiet)
    everything = [document for documents in DOCUMENTS.values() for document in documents]
    write_indexed(tmp_path / "w", everything, vocab_size=300, sidecar={})
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"m.{suffix}").read_bytes() == (tmp_path / f"w.{suffix}").read_bytes()
    data = IndexedDataset(tmp_path / "m")
    data.verify()
    assert data.fingerprint == IndexedDataset(tmp_path / "w").fingerprint
    assert data.sidecar == merged and merged["text_bytes"] == 30
    assert [source["name"] for source in merged["merged"]] == ["a", "b", "c"]
    assert [source["documents"] for source in merged["merged"]] == [3, 1, 2]
    assert all(source["fingerprint"] for source in merged["merged"])
    assert str(tmp_path) not in json.dumps(merged)


def test_the_widest_dtype_wins(tmp_path):
    narrow = make(tmp_path, "n", [[1, 65000]], vocab_size=65499)
    wide = make(tmp_path, "w", [[2, 70000]], vocab_size=100_000)
    for order in ([narrow, wide], [wide, narrow]):
        target = tmp_path / f"m{order[0].name}"
        assert merge(order, target, say=quiet)["dtype"] == "int32"
        assert sorted(read_all(target)) == [[1, 65000], [2, 70000]]


def test_documents_of_several_sequences_stay_documents(tmp_path):
    """As other tools write them: two sequences, one document."""
    for name in ("a", "b"):
        sizes = np.array([2, 3], "i4")
        with open(tmp_path / f"{name}.idx", "wb") as stream:
            put_index(stream, sizes, np.dtype("<u2"), np.array([0, 2]))
        (tmp_path / f"{name}.bin").write_bytes(np.arange(5, dtype="<u2").tobytes())
    prefixes = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(DataError, match="no sidecar says which tokenizer"):
        merge(prefixes, tmp_path / "m", say=quiet)
    merge(prefixes, tmp_path / "m", unknown_tokenizer=True, say=quiet)
    data = IndexedDataset(tmp_path / "m")
    assert data.document_index.tolist() == [0, 2, 4] and len(data) == 4
    assert "tokenizer" not in data.sidecar


@pytest.mark.parametrize(
    "change, error, message",
    [
        ("tokenizer", DataError, "ids mean different text"),
        ("twice", UsageError, "named twice"),
        ("one", UsageError, "at least two"),
        ("exists", DataError, "such files already"),
        ("damaged", DataError, "cut short"),
        ("into itself", UsageError, "named twice"),
        ("foreign", DataError, "no sidecar"),
        ("folder", UsageError, "ends without a name, so its files would be hidden ones"),
        ("ending", UsageError, "m.bin is a prefix: leave '.bin' away"),
    ],
)
def test_refusals_leave_everything_as_it_was(prefixes, tmp_path, change, error, message):
    target = tmp_path / "m"
    if change == "tokenizer":
        prefixes.append(make(tmp_path, "d", [[1]], tokenizer="other"))
    elif change == "twice":
        prefixes.append(tmp_path / "." / "a")
    elif change == "one":
        del prefixes[1:]
    elif change == "exists":
        target = make(tmp_path, "m", [[1]])
    elif change == "damaged":
        (tmp_path / "b.bin").write_bytes(b"")
    elif change == "into itself":
        target = prefixes[0]
    elif change == "folder":
        target = f"{tmp_path}/m/"
    elif change == "ending":
        target = tmp_path / "m.bin"
    else:
        (tmp_path / "a.json").unlink()
    before = tree(tmp_path)
    with pytest.raises(error, match=message):
        merge(prefixes, target, unknown_tokenizer=change == "foreign", say=quiet)
    assert tree(tmp_path) == before


def test_a_failure_while_writing_leaves_nothing(prefixes, tmp_path, monkeypatch):
    def broken(*_args):
        raise OSError("disk full")

    before = tree(tmp_path)
    monkeypatch.setattr("data_prep.merging.put_index", broken)
    with pytest.raises(OSError, match="disk full"):
        merge(prefixes, tmp_path / "m", say=quiet)
    assert tree(tmp_path) == before


def test_the_command_and_the_tokenizer_beside_the_result(tmp_path, capsys):
    folders = []
    for name in "ab":
        source = write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in "123"])
        folders.append(tmp_path / name)
        prepare("jsonl", folders[-1], inputs=[source], tokenizer="byte", split="1", say=quiet)
    target = tmp_path / "both" / "train"
    code, shown, log = run(capsys, "merge", *(f / "train" for f in folders), "--output", target)
    assert code == 0 and "6 documents, 24 tokens of uint16 from 2 files" in shown, log
    code, shown, _ = run(capsys, "inspect", target)
    assert code == 0 and "a 1" in shown and "at the end of 6 of 6 documents" in shown
    assert IndexedDataset(target).sidecar["split"] == "train"
    code, _, log = run(capsys, "merge", target, GOLDEN / "nowhere", "--output", tmp_path / "x")
    assert code == 1 and "nowhere" in log
