"""lm_dataformat 0.0.20: what it writes we read; where its reader is right, ours gives the same.

Where its reader is wrong, a test shows both: a newer version that is right fails the test here.
"""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile

import lm_dataformat
import pytest
import zstandard
from jsonlines import InvalidLineError
from lm_dataformat import Archive, DatArchive, JSONArchive

from data_prep.errors import DataError
from data_prep.reading import Reading, expand, read

# It leaves its files open.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TEXTS = [f'document {i}: zażółć 😀 \u2028 \n\n \\ " end' for i in range(200)]


def frame(data):
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def tar_gz(*members, form=tarfile.USTAR_FORMAT):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz", format=form) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def ours(path, **options):
    return [document.text for document in read(expand([path]), Reading(**options))]


def theirs(path):
    return list(lm_dataformat.Reader(str(path)).stream_data())


def their_error(path):
    """What their reader raises, and what it gave before."""
    given = []
    with pytest.raises(Exception) as caught:  # noqa: B017, PT011
        given.extend(lm_dataformat.Reader(str(path)).stream_data())
    return caught.type, given


def write(path, data):
    path.write_bytes(data)
    return path


# ---- writing ----------------------------------------------------------------------------------


def test_archive(tmp_path):
    folder = tmp_path / "archive"
    archive = Archive(str(folder))
    for i, text in enumerate(TEXTS):
        archive.add_data(text, meta={"number": i})
        if i == 99:
            archive.commit("first")
    archive.commit("second")
    archive.fh.close()
    assert len(list(folder.glob("*.jsonl.zst"))) == 2
    assert (folder / "current_chunk_incomplete").stat().st_size == 0
    assert ours(folder) == TEXTS == theirs(folder)


def test_archive_that_was_never_committed(tmp_path):
    archive = Archive(str(tmp_path))
    for _ in range(3):
        archive.add_data("".join(map(chr, range(0x4E00, 0x9000))) * 20)
    archive.commit()
    archive.add_data("lost")
    archive.compressor.flush(zstandard.FLUSH_BLOCK)  # as happens when there is enough
    archive.fh.close()
    assert len(theirs(tmp_path)) == 3  # and not a word of the fourth
    with pytest.raises(DataError, match="current_chunk_incomplete: .* never committed"):
        ours(tmp_path)


@pytest.mark.parametrize("kind, ending", [(DatArchive, ".dat.zst"), (JSONArchive, ".json.zst")])
def test_the_other_archives(tmp_path, kind, ending):
    archive = kind(str(tmp_path))
    for i, text in enumerate(TEXTS):
        archive.add_data(text)
        if i == 99:
            archive.commit()
    archive.commit()
    assert [path.name.endswith(ending) for path in expand([tmp_path])] == [True, True]
    assert ours(tmp_path) == TEXTS == theirs(tmp_path)


def test_two_archives_in_one_folder_within_a_second_overwrite_each_other(tmp_path, monkeypatch):
    """Why our own archive gives each split a folder of its own, with one object."""
    monkeypatch.setattr(lm_dataformat.time, "time", lambda: 1000.5)
    for text in ("first", "second"):
        archive = Archive(str(tmp_path))
        archive.add_data(text)
        archive.commit()
        archive.fh.close()
    assert ours(tmp_path) == ["second"]


# ---- reading: the same ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, data",
    [
        ("a.jsonl", lines(TEXTS)),
        ("a.jsonl", b'{"text": ["one", "two"]}\n"bare"\n{"text": "last"}'),
        ("a.jsonl.zst", frame(lines(TEXTS))),
        ("a.jsonl.zst", frame(lines(TEXTS[:70])) + frame(lines(TEXTS[70:]))),
        ("a.jsonl.zst", frame(lines(["x" * 3_000_000, "y"]))),
        ("a.json.zst", frame(json.dumps(TEXTS).encode())),
        ("a.dat.zst", frame(b"".join(b"%016d%b" % (len(t), t) for t in (b"a", b"bcd")))),
        ("a.txt", b"a text\n"),
        ("a.tar.gz", tar_gz(*((f"{i}.tex", t.encode()) for i, t in enumerate(TEXTS)))),
    ],
)
def test_both_readers_give_the_same(tmp_path, name, data):
    path = write(tmp_path / name, data)
    assert ours(path) == theirs(path) and len(ours(path)) >= 1


# ---- reading: where it is wrong ---------------------------------------------------------------


def test_a_second_frame_cut_in_half(tmp_path):
    second = frame(lines(TEXTS[1:]))
    path = write(tmp_path / "a.jsonl.zst", frame(lines(TEXTS[:1])) + second[: len(second) // 2])
    assert theirs(path) == TEXTS[:1]  # silent
    with pytest.raises(DataError, match="a.jsonl.zst: cut short"):
        ours(path)


def test_no_bytes_at_all(tmp_path):
    path = write(tmp_path / "a.jsonl.zst", b"")
    assert theirs(path) == []  # silent
    with pytest.raises(DataError, match="a.jsonl.zst: cut short, it has no bytes"):
        ours(path)


def test_jsonl_gz(tmp_path):
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(lines(["a", "b"])))
    assert theirs(path) == ['{"text": "a"}\n', '{"text": "b"}\n']  # braces as text
    assert ours(path) == ["a", "b"]


def test_json_gz(tmp_path):
    path = write(tmp_path / "a.json.gz", gzip.compress(lines(["a", "b"])))
    assert theirs(path) == [{"text": "a"}, {"text": "b"}]
    assert ours(path) == ["a", "b"]


def test_openwebtext2s_tar(tmp_path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        data = frame(lines(TEXTS))
        info = tarfile.TarInfo("2005-06.jsonl.zst")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    path = write(tmp_path / "openwebtext2.jsonl.zst.tar", stream.getvalue())
    assert their_error(path) == (NameError, [])
    assert ours(path) == TEXTS


def test_a_broken_line(tmp_path):
    for broken in (b"{broken\n", b"\n", b'{"text": "\xff"}\n'):
        path = write(tmp_path / "a.jsonl.zst", frame(lines(["a"]) + broken + lines(["b", "c"])))
        assert their_error(path) == (InvalidLineError, ["a"])  # the rest is lost
        assert ours(path, on_bad_line="skip") == ["a", "b", "c"]
        if broken.strip():
            with pytest.raises(DataError, match="a.jsonl.zst:2: not "):
                ours(path)


def test_a_missing_key_and_null(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"content": "a"}\n{"text": "b"}\n')
    assert their_error(path) == (KeyError, [])
    assert ours(path, on_bad_line="skip") == ["b"]
    path = write(tmp_path / "a.jsonl", b'{"text": null}\n{"text": 3}\n{"text": "b"}\n')
    assert theirs(path) == [None, 3, "b"]  # as documents
    assert ours(path, on_bad_line="skip") == ["b"]


def test_a_member_that_is_not_utf8(tmp_path):
    path = write(tmp_path / "a.tar.gz", tar_gz(("a", b"a"), ("b", b"\xe9"), ("c", b"c")))
    assert their_error(path) == (UnicodeDecodeError, ["a"])  # the rest is lost
    assert ours(path, on_bad_line="skip") == ["a", "c"]


def test_a_long_name_in_a_pax_header(tmp_path):
    name = "ä" * 120
    path = write(tmp_path / "a.tar.gz", tar_gz((name, b"a"), form=tarfile.PAX_FORMAT))
    assert their_error(path) == (KeyError, [])
    assert ours(path) == ["a"]


def test_links_are_no_documents(tmp_path):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        info = tarfile.TarInfo("link")
        info.type, info.linkname = tarfile.SYMTYPE, "elsewhere"
        archive.addfile(info)
    path = write(tmp_path / "a.tar.gz", stream.getvalue())
    assert theirs(path) == []  # silent
    with pytest.raises(DataError, match="link: a link, not a regular file"):
        ours(path)


def test_a_tar_cut_between_two_members(tmp_path):
    whole = gzip.decompress(tar_gz(("a", b"a"), ("b", b"b")))
    path = write(tmp_path / "a.tar.gz", gzip.compress(whole[:1024]))
    error, given = their_error(path)
    assert (error, given) == (ValueError, ["a"])  # "invalid literal for int()"
    with pytest.raises(DataError, match="a.tar.gz: cut short"):
        ours(path)


def test_a_long_window(tmp_path):
    data = lines(["a"])
    header = zstandard.FRAME_HEADER + bytes([0, (28 - 10) << 3])
    path = write(
        tmp_path / "a.jsonl.zst", header + (1 | len(data) << 3).to_bytes(3, "little") + data
    )
    assert their_error(path) == (zstandard.ZstdError, [])
    assert ours(path) == ["a"]


def test_endings_it_does_not_know_are_left_out_of_a_folder(tmp_path):
    write(tmp_path / "a.jsonl", lines(["a"]))
    write(tmp_path / "b.json", lines(["b"]))
    assert theirs(tmp_path) == ["a"]  # silent
    assert ours(tmp_path) == ["a", "b"]
    write(tmp_path / "c.md", b"c")
    with pytest.raises(DataError, match="c.md: unknown ending"):
        ours(tmp_path)


@pytest.mark.slow
def test_its_threads_hang_on_a_damaged_file(tmp_path):
    """In a process of its own, ended after a while: nothing would end it otherwise."""
    path = write(tmp_path / "a.jsonl", lines(["a", "b"]) + b"broken\n")
    code = (
        "import sys, lm_dataformat, multiprocessing\n"
        "multiprocessing.set_start_method('fork')\n"
        "for text in lm_dataformat.Reader(sys.argv[1]).stream_data(threaded=True):\n"
        "    print(text, flush=True)\n"
        "print('end', flush=True)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    # A process group of its own: the process that it forks holds the pipe open as well.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=8)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
        assert b"end" not in process.stdout.read()
    with pytest.raises(DataError, match="a.jsonl:3: not JSON"):
        ours(path)
