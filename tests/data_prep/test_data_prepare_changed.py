"""What changes under a preparation: inputs while they are read, results afterwards, other starts."""

import errno
import json
import os
import subprocess
import sys

import pytest
from prepare_tools import ALL, ROOT, make_source, quiet, run, tree, write_jsonl

from data_prep import finished
from data_prep.errors import DataError
from data_prep.files import locked
from data_prep.prepare import prepare
from data_prep.reading import read


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path)


@pytest.fixture
def done(source, tmp_path):
    """The arguments of a preparation, and its folder."""
    out = tmp_path / "out"
    prepare("jsonl", out, inputs=[source], tokenizer="byte", say=quiet)
    return ["jsonl", "--input", source, "--output", out, "--tokenizer", "byte"], out


@pytest.mark.parametrize("during", ["itself", "the next"])
def test_an_input_that_grows_while_the_input_is_read(tmp_path, monkeypatch, during):
    files = [
        write_jsonl(tmp_path / f"{n}.jsonl", [{"text": f"{n} {i}"} for i in range(5)]) for n in "ab"
    ]

    def growing(paths, *args, **options):
        yield from read(paths, *args, **options)
        if paths == [files[during == "the next"]]:
            with open(files[0], "a") as stream:
                stream.write('{"text": "late"}\n')

    with monkeypatch.context() as patch:
        patch.setattr("data_prep.preparation.read", growing)
        with pytest.raises(DataError, match="a.jsonl was changed while the input was read"):
            prepare("jsonl", tmp_path / "o", inputs=files, tokenizer="byte", split="1", say=quiet)
    assert not (tmp_path / "o").exists()
    found = prepare("jsonl", tmp_path / "o", inputs=files, tokenizer="byte", split="1", say=quiet)
    assert found["splits"]["train"]["documents"] == 11


@pytest.mark.parametrize("damage", ["cut", "flipped", "other", "tokenizer", "no tokenizer"])
def test_a_damaged_result_is_not_already_prepared(done, capsys, damage):
    arguments, out = done
    path = out / ("tokenizer.json" if "tokenizer" in damage else "valid.bin")
    data = path.read_bytes()
    if damage == "other":
        for suffix in ("bin", "idx", "json"):
            (out / f"valid.{suffix}").write_bytes((out / f"train.{suffix}").read_bytes())
    elif damage == "no tokenizer":
        path.unlink()
    else:
        path.write_bytes(data[:-2] if damage == "cut" else bytes([data[0] ^ 1]) + data[1:])
    before = tree(out)
    code, shown, log = run(capsys, *arguments)
    assert code == 1 and shown == "" and path.stem in log and "--force" in log
    assert tree(out) == before
    assert run(capsys, *arguments, "--force")[0] == 0 and run(capsys, *arguments)[0] == 0


def test_large_results_are_not_hashed_again(done, capsys, monkeypatch):
    arguments, out = done
    monkeypatch.setattr(finished, "_HASHED", 100)
    data = (out / "train.bin").read_bytes()
    (out / "train.bin").write_bytes(b"\1" + data[1:])
    assert len(data) > 100 and run(capsys, *arguments)[0] == 0
    (out / "train.bin").write_bytes(data[:-2])
    assert run(capsys, *arguments)[0] == 1


@pytest.mark.parametrize("where", [("inputs", 0, "size"), ("tokenizer", "type"), ("splits",)])
def test_a_damaged_mark_is_one_line(done, capsys, where):
    arguments, out = done
    content = json.loads((out / "prepared.json").read_text())
    inner = content
    for key in where[:-1]:
        inner = inner[key]
    inner.pop(where[-1])
    (out / "prepared.json").write_text(json.dumps(content))
    code, _, log = run(capsys, *arguments)
    assert code == 1 and "prepared.json is not readable" in log and log.count("\n") == 1


def test_a_name_that_is_not_utf8(tmp_path, capsys):
    path = os.fsencode(tmp_path) + b"/bad\xff.jsonl"
    with open(path, "wb") as stream:
        stream.write(b'{"text": "one"}\n{"text": "two"}\n')
    arguments = ["jsonl", "--input", os.fsdecode(path), "--output", tmp_path / "o", "--tokenizer"]
    code, _, log = run(capsys, *arguments, "byte", "--split", "1")
    assert code == 0, log
    prepared = json.loads((tmp_path / "o" / "prepared.json").read_bytes().decode())
    assert prepared["inputs"][0]["name"] == "bad\\udcff.jsonl"
    code, _, log = run(capsys, *arguments, "byte", "--split", "1")
    assert code == 0 and "nothing to do" in log


def test_a_full_disk_names_the_folder_and_what_to_do(source, tmp_path, capsys, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("data_prep.archive.ArchiveWriter.add", full)
    out = tmp_path / "out"
    code, _, log = run(capsys, "jsonl", "--input", source, "--output", out, "--tokenizer", "byte")
    assert code == 1 and str(out) in log and "free some space and repeat" in log


def test_a_file_of_somebody_named_like_work_stays(source, tmp_path):
    mine = tmp_path / "out" / ".partial-mine"
    mine.parent.mkdir()
    mine.write_text("mine")
    prepare("jsonl", mine.parent, inputs=[source], tokenizer="byte", say=quiet)
    assert mine.read_text() == "mine" and (mine.parent / "prepared.json").is_file()


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_force_checks_everything_before_it_removes_anything(done, tmp_path, capsys, kind):
    arguments, out = done
    if kind == "link":
        (out / "documents").rename(tmp_path / "elsewhere")
        (out / "documents").symlink_to(tmp_path / "elsewhere")
    else:
        (out / "valid.json").unlink()
        (out / "valid.json").mkdir()
    before = tree(out)
    code, _, log = run(capsys, *arguments, "--force")
    assert code == 1 and "move it, or choose another --output" in log and tree(out) == before
    with pytest.raises(DataError, match="not deleted"):  # made while the preparation ran
        finished.publish(tmp_path / "staging", out, {})
    assert tree(out) == before


def test_leftovers_of_a_kill_go_at_the_next_start(done, capsys):
    arguments, out = done
    (out / ".prepared.json.partial-1-ab").write_text("{")
    (out / ".train.bin.partial-1-ab").write_text("half")
    assert run(capsys, *arguments)[0] == 0
    assert sorted(p.name for p in out.iterdir()) == sorted(ALL)


def test_who_is_refused_does_not_remove_the_folder_of_the_other(source, tmp_path, monkeypatch):
    """Both find no folder; the other one makes and locks it a moment earlier."""
    out = tmp_path / "out"
    script = (
        "import sys; from pathlib import Path; from data_prep.files import locked\n"
        "with locked(Path(sys.argv[1])):\n print('locked', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(out)]
    pipe = subprocess.PIPE
    mkdir = type(out).mkdir
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe) as other:
        # Hold ours back: it must have looked before the other made the folder.
        def late(path, *args, **options):
            if path == out:
                assert other.stdout.readline() == b"locked\n"
            return mkdir(path, *args, **options)

        exists = type(out).exists
        monkeypatch.setattr(type(out), "exists", lambda path: path != out and exists(path))
        monkeypatch.setattr(type(out), "mkdir", late)
        with pytest.raises(DataError, match="another preparation"):
            prepare("jsonl", out, inputs=[source], tokenizer="byte", say=quiet)
        assert os.path.isdir(out)
        other.stdin.close()
    monkeypatch.undo()
    assert not out.exists()


def test_a_folder_that_was_removed_before_the_lock_is_made_anew(tmp_path, monkeypatch):
    out, opened = tmp_path / "out", []
    original = os.open

    def removing(path, *args, **options):
        handle = original(path, *args, **options)
        if path == out and not opened:
            out.rmdir()
        opened.append(path)
        return handle

    monkeypatch.setattr(os, "open", removing)
    with locked(out):
        assert out.is_dir() and opened == [out, out]
