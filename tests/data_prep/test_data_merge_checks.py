"""Merging vouches for its sources: damage, foreign tokenizers and broken sidecars are refused."""

import hashlib
import json
import struct

import pytest
from prepare_tools import quiet, run, tree

from data_prep.errors import DataError
from data_prep.files import locked
from data_prep.indexed import write_indexed
from data_prep.merging import merge

TOKENIZER = b"the tokenizer of the data"


def make(folder, name, change=None):
    folder.mkdir(exist_ok=True)
    fingerprint = hashlib.sha256(TOKENIZER).hexdigest()[:16]
    sidecar = {"tokenizer": {"fingerprint": fingerprint}, "text_bytes": 10, **(change or {})}
    write_indexed(folder / name, [[1, 2], [3], [4, 5]], vocab_size=300, sidecar=sidecar)
    return folder / name


@pytest.fixture
def prefixes(tmp_path):
    return [make(tmp_path / name, "train") for name in "ab"]


def test_a_flipped_byte_of_a_source_is_not_laundered(prefixes, tmp_path):
    path = prefixes[1].with_name("train.bin")
    path.write_bytes(bytes([9]) + path.read_bytes()[1:])
    before = tree(tmp_path)
    with pytest.raises(DataError, match="b/train.bin is not what its sidecar describes"):
        merge(prefixes, tmp_path / "out" / "m", say=quiet)
    assert tree(tmp_path) == before and not (tmp_path / "out").exists()


def test_a_damaged_document_index_of_a_source_is_refused(prefixes, tmp_path):
    path = prefixes[0].with_name("train.idx")
    data = path.read_bytes()
    path.write_bytes(data[:-24] + struct.pack("<3q", 0, 2, 3))  # was 1, 2, 3
    with pytest.raises(DataError, match="a/train.idx has a damaged document index"):
        merge(prefixes, tmp_path / "out" / "m", say=quiet)
    assert not (tmp_path / "out").exists()


def test_a_foreign_tokenizer_beside_any_input_or_the_output_is_refused(prefixes, tmp_path):
    target = tmp_path / "out" / "m"
    for folder in ("a", "b", "out"):
        path = tmp_path / folder / "tokenizer.json"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"another one")
        with pytest.raises(DataError, match=f"{folder}/tokenizer.json is .*, not the tokenizer"):
            merge(prefixes, target, say=quiet)
        assert not target.with_name("m.idx").exists()
        path.unlink()


def test_the_tokenizer_is_found_beside_any_input(prefixes, tmp_path):
    prefixes[1].with_name("tokenizer.model").write_bytes(TOKENIZER)
    merge(prefixes, tmp_path / "out" / "m", say=quiet)
    names = ["m.bin", "m.idx", "m.json", "tokenizer.model"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == names
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == TOKENIZER


def test_two_tokenizers_are_not_chosen_from_on_somebodys_word(prefixes, tmp_path):
    for prefix, content in zip(prefixes, (b"one", b"two"), strict=True):
        prefix.with_name("train.json").unlink()
        prefix.with_name("tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match="another tokenizer than"):
        merge(prefixes, tmp_path / "out" / "m", unknown_tokenizer=True, say=quiet)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokenizer": {"type": "byte"}}, "a/train.json gives its tokenizer no fingerprint"),
        ({"text_bytes": "10"}, "a/train.json: text_bytes is '10', not a number"),
    ],
)
def test_a_broken_sidecar_is_one_line(tmp_path, capsys, change, message):
    prefixes = [make(tmp_path / "a", "train", change), make(tmp_path / "b", "train")]
    code, _, log = run(capsys, "merge", *prefixes, "--output", tmp_path / "out" / "m")
    assert code == 1 and message in log and log.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_failed_merge_leaves_no_folder_and_no_tokenizer(prefixes, tmp_path, monkeypatch):
    def broken(*_args):
        raise OSError(28, "No space left on device")

    prefixes[0].with_name("tokenizer.json").write_bytes(TOKENIZER)
    monkeypatch.setattr("data_prep.merging.put_index", broken)
    with pytest.raises(OSError, match="free some space.*out"):
        merge(prefixes, tmp_path / "out" / "m", say=quiet)
    assert not (tmp_path / "out").exists()


def test_leftovers_of_a_killed_merge_go_at_the_next_start(prefixes, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".m.bin.partial-1-ab").write_bytes(b"half")
    (out / ".other.bin.partial-1-ab").write_bytes(b"not of this merge")
    merge(prefixes, out / "m", say=quiet)
    assert sorted(p.name for p in out.iterdir()) == (
        [".other.bin.partial-1-ab", "m.bin", "m.idx", "m.json"]
    )


def test_a_merge_waits_for_nobody_and_removes_nothing_of_others(prefixes, tmp_path):
    out = tmp_path / "out"
    with locked(out):
        with pytest.raises(DataError, match="or a merge; wait for it"):
            merge(prefixes, out / "m", say=quiet)
        assert out.is_dir()
    assert not out.exists()
    assert json.dumps(merge(prefixes, out / "m", say=quiet))
