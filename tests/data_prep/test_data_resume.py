"""A killed preparation goes on from its last finished shard, and its result has the same bytes."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import zstandard
from prepare_tools import ALL, ROOT, TEXTS, make_source, quiet, tree

from data_prep import shards
from data_prep.errors import DataError
from data_prep.indexed import IndexedDataset
from data_prep.pool import WorkerDied
from data_prep.prepare import prepare
from data_prep.writing import write_in_shards, write_indexed

# Runs the command with small shards and kills the process at the nth call of a function.
SCRIPT = """
import importlib, os, signal, sys
from data_prep import finished, shards
from data_prep.__main__ import main

shards.SHARD_BYTES = 4000
where, nth = sys.argv[1], int(sys.argv[2])

def kill_at(owner, name, nth):
    original, calls = getattr(owner, name), 0
    def counted(*a, **k):
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*a, **k)
    setattr(owner, name, counted)

if where == "moving":
    complete = finished.complete
    def moving(staging, folder):
        if (staging / "prepared.json").exists():
            kill_at(os, "replace", nth)
        return complete(staging, folder)
    finished.complete = moving
elif where != "nowhere":
    module, *path = where.split(".")
    owner = importlib.import_module("data_prep." + module)
    for name in path[:-1]:
        owner = getattr(owner, name)
    kill_at(owner, path[-1], nth)
sys.exit(main(sys.argv[3:]))
"""


OPTIONS = ("--tokenizer", "train", "--vocab-size", "400", "--workers", "1")


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A source, and what comes of it without a kill."""
    folder = tmp_path_factory.mktemp("unbroken")
    source, whole = make_source(folder), folder / "whole"
    assert run_killed(source, whole, "nowhere", 1, *OPTIONS).returncode == 0
    return source, result(whole)


def run_killed(source, out, where, nth=1, *options):
    command = [sys.executable, "-c", SCRIPT, where, str(nth), "jsonl", "--input", str(source)]
    command += ["--output", str(out), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def result(folder):
    """Everything but times: of the archive the texts, of prepared.json all but the seconds."""
    files = {name: data for name, data in tree(folder).items() if "documents/" not in name}
    prepared = json.loads(files.pop("prepared.json"))
    del prepared["seconds"]
    return files, prepared


@pytest.mark.parametrize(
    "where, nth, continued",
    [
        ("archive.ArchiveWriter.add", 50, False),
        ("work.Work.keep_reading", 1, False),
        ("preparation.train_bpe", 1, True),
        ("shards.Shards.add", 100, True),
        ("shards.Shards.finish", 2, True),
        ("shards._to_disk", 5, True),
        ("shards._to_disk", 6, True),
        ("writing.put_index", 1, True),
        ("writing.put_index", 2, True),
        ("shards.Shards.publish", 2, True),
        ("finished.publish", 1, True),
        ("moving", 1, True),
        ("moving", 5, True),
    ],
)
def test_killed_and_started_again_equals_unbroken(unbroken, tmp_path, where, nth, continued):
    (source, whole), out = unbroken, tmp_path / "out"
    killed = run_killed(source, out, where, nth, *OPTIONS)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (out / "prepared.json").exists()
    again = run_killed(source, out, "nowhere", 1, *OPTIONS)
    assert again.returncode == 0, again.stderr
    # What moves files into place only ends there; all else says that it continues.
    assert ("continuing an interrupted" in again.stderr) == (continued and where != "moving")
    assert ("put the last files" in again.stderr) == (where == "moving")
    assert result(out) == whole
    assert sorted(p.name for p in out.iterdir()) == sorted(ALL)
    assert sum(len(IndexedDataset(out / n)) for n in ("train", "valid", "test")) == len(TEXTS)


def test_what_is_finished_is_not_tokenized_again(source, tmp_path):
    out = tmp_path / "out"
    options = ("--tokenizer", "byte", "--split", "1")
    assert run_killed(source, out, "shards.Shards.finish", 4, *options).returncode < 0
    journal = (out / ".partial-work" / "train.shards").read_text().splitlines()
    assert len(journal) == 3
    documents = json.loads(journal[-1])["documents"]
    again = run_killed(source, out, "nowhere", 1, *options)
    assert f"train: continues after {documents} documents" in again.stderr


def test_killed_after_the_documents_were_dropped(source, tmp_path):
    out, options = tmp_path / "out", ["--tokenizer", "byte", "--no-keep-documents"]
    assert run_killed(source, out, "finished.publish", 1, *options).returncode < 0
    again = run_killed(source, out, "nowhere", 1, *options)
    assert again.returncode == 0, again.stderr
    assert sorted(p.name for p in out.iterdir()) == sorted(set(ALL) - {"documents"})


@pytest.mark.parametrize(
    "change, message",
    [
        ("options", "other options (append_eod: True -> False)"),
        ("input", "other or changed input files"),
    ],
)
def test_other_options_or_inputs_keep_the_work_unless_forced(source, tmp_path, change, message):
    out, options = tmp_path / "out", ["--tokenizer", "byte", "--split", "1"]
    assert run_killed(source, out, "shards.Shards.finish", 2, *options).returncode < 0
    if change == "input":
        source.write_bytes(zstandard.compress(b'{"text": "now another one"}\n' * 3))
    options += ["--no-append-eod"] if change == "options" else []
    before = tree(out)
    again = run_killed(source, out, "nowhere", 1, *options)
    assert again.returncode == 1 and message in again.stderr and "--force" in again.stderr
    assert tree(out) == before
    forced = run_killed(source, out, "nowhere", 1, *options, "--force")
    assert forced.returncode == 0 and f"{message}; starting anew" in forced.stderr


def test_a_reading_that_was_cut_starts_anew_and_says_so(source, tmp_path):
    out, options = tmp_path / "out", ["--tokenizer", "byte", "--split", "1"]
    assert run_killed(source, out, "archive.ArchiveWriter.add", 2, *options).returncode < 0
    again = run_killed(source, out, "nowhere", 1, *options)
    assert again.returncode == 0 and "had not read all its input; starting anew" in again.stderr


def test_an_input_that_cannot_be_read_keeps_the_work(source, tmp_path, monkeypatch):
    def broken(*_args):
        raise PermissionError(13, "Permission denied", str(source))

    out, options = tmp_path / "out", ["--tokenizer", "byte", "--split", "1"]
    assert run_killed(source, out, "shards.Shards.finish", 2, *options).returncode < 0
    before = tree(out)
    os.utime(source)
    monkeypatch.setattr("data_prep.finished.sha256_file", broken)
    with pytest.raises(PermissionError):
        prepare("jsonl", out, inputs=[source], tokenizer="byte", split="1", say=quiet)
    assert tree(out) == before


def test_a_mistyped_sum_keeps_the_work(source, tmp_path):
    out, options = tmp_path / "out", ["--tokenizer", "byte", "--split", "1"]
    assert run_killed(source, out, "shards.Shards.finish", 2, *options).returncode < 0
    before = tree(out)
    again = run_killed(source, out, "nowhere", 1, *options, "--sha256", "0" * 64)
    assert again.returncode == 1 and "given by --sha256" in again.stderr and tree(out) == before
    again = run_killed(source, out, "nowhere", 1, *options)
    assert again.returncode == 0 and "continuing an interrupted" in again.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("disk full"), WorkerDied("gone")])
def test_what_is_not_the_datas_fault_keeps_the_work(source, tmp_path, monkeypatch, error):
    def broken(*_args, **_kwargs):
        raise error

    out, said = tmp_path / "out", []
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.preparation.encode_all", broken)
        with pytest.raises(type(error)):
            prepare("jsonl", out, inputs=[source], tokenizer="byte", say=said.append)
    assert [p.name for p in out.iterdir()] == [".partial-work"]
    assert "the same command continues" in said[-1]
    prepare("jsonl", out, inputs=[source], tokenizer="byte", say=said.append)
    assert any("continuing" in line for line in said)
    assert sorted(p.name for p in out.iterdir()) == sorted(ALL)


def test_the_datas_fault_leaves_nothing(source, tmp_path):
    with pytest.raises(DataError, match="too short"):
        prepare("jsonl", tmp_path / "o", inputs=[source], tokenizer="byte",
                min_split_tokens=10**9, say=quiet)  # fmt: skip
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("damage", ["tokens", "sizes", "journal", "cut"])
def test_a_damaged_shard_is_made_again(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(shards, "SHARD_BYTES", 100)
    documents = [np.arange(i % 60) for i in range(40)]

    def stop_at(first):
        yield from documents[first:30]
        raise KeyboardInterrupt

    prefix, calls = tmp_path / "x", []
    with pytest.raises(KeyboardInterrupt):
        write_in_shards(prefix, stop_at, vocab_size=300, sidecar={}, say=quiet)
    path = tmp_path / f"x.{'shards' if damage == 'journal' else damage.replace('cut', 'tokens')}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data if damage != "cut" else data[:500])

    def from_(first):
        calls.append(first)
        return iter(documents[first:])

    found = write_in_shards(prefix, from_, vocab_size=300, sidecar={}, say=quiet)
    wanted = write_indexed(tmp_path / "y", documents, vocab_size=300, sidecar={})
    assert found == wanted and calls[0] < 30
    for suffix in ("bin", "idx", "json"):
        assert (tmp_path / f"x.{suffix}").read_bytes() == (tmp_path / f"y.{suffix}").read_bytes()
    assert sorted(p.name for p in tmp_path.glob("x.*")) == ["x.bin", "x.idx", "x.json"]
