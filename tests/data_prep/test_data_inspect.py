"""`inspect`: counts, decoded documents, verification."""

import os
import subprocess
import sys

import pytest
from prepare_tools import (
    GOLDEN,
    ROOT,
    TEXTS,
    foreign_pair,
    make_source,
    quiet,
    run,
    write_jsonl,
)

from data_prep.indexed import IndexedDataset
from data_prep.prepare import prepare


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path)


def test_inspect(source, tmp_path, capsys):
    out = tmp_path / "out"
    prepare("jsonl", out, inputs=[source], tokenizer="byte", say=quiet)
    code, shown, _ = run(capsys, "inspect", out / "train", "--documents", 1)
    data = IndexedDataset(out / "train")
    assert code == 0 and data.fingerprint in shown and "verified" in shown
    assert f"{len(data)} documents" in shown and f"{len(data.tokens)} tokens" in shown
    assert f"at the end of {len(data)} of {len(data)} documents" in shown
    assert "document 0" in shown and TEXTS[0].splitlines()[0][:8] in shown
    code, shown, _ = run(capsys, "inspect", GOLDEN / "c_eod_text_document")
    assert code == 0 and "another tool" in shown and "give --tokenizer" in shown
    code, shown, _ = run(
        capsys, "inspect", GOLDEN / "c_eod_text_document", "--tokenizer", GOLDEN / "tok_c.json"
    )
    assert code == 0 and "quick brown fox" in shown
    with open(out / "train.bin", "r+b") as stream:
        stream.write(b"\x07")
    code, _, log = run(capsys, "inspect", out / "train")
    assert code == 1 and "not what its sidecar describes" in log
    assert run(capsys, "inspect", out / "nowhere")[0] == 1


@pytest.mark.parametrize("wrong", [-1, 257, 60_000, 2**40])
def test_ids_of_another_tokenizer_are_named_and_not_decoded(tmp_path, capsys, wrong):
    """Of another tool's file nobody knows the tokenizer; -1 is what some of them pad with."""
    foreign_pair(tmp_path / "x", [ord("a"), wrong])
    code, shown, log = run(capsys, "inspect", tmp_path / "x", "--tokenizer", "byte")
    assert code == 0 and f"it has 257 entries, and the id {wrong} is here" in shown, log
    foreign_pair(tmp_path / "x", [ord("a"), ord("b")])
    assert run(capsys, "inspect", tmp_path / "x", "--tokenizer", "byte")[1].endswith("\nab\n")


def test_a_document_cannot_drive_the_terminal(tmp_path, capsys):
    text = "a\x1b]0;title\x07\x9b2J\rb\tc\nd é"
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": text}])
    prepare("jsonl", tmp_path / "o", inputs=[source], tokenizer="byte", split="1", say=quiet)
    code, shown, _ = run(capsys, "inspect", tmp_path / "o" / "train")
    assert code == 0 and "a\\x1b]0;title\\x07\\x9b2J\\rb\tc\nd é" in shown
    assert not set(shown) & set("\x1b\x07\x9b\r")


def test_a_terminal_without_utf8(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "żółć"}])
    prepare("jsonl", tmp_path / "o", inputs=[source], tokenizer="byte", split="1", say=quiet)
    command = [sys.executable, "-m", "data_prep", "inspect", str(tmp_path / "o" / "train")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "\\u017c" in done.stdout, done.stderr
