"""Files of folders and globs: what cannot be read is an error that names it, never left out."""

import errno
import os
import socket

import pytest

from data_prep.errors import DataError
from data_prep.reading import Reading, expand, read

LINE = b'{"text": "a"}\n'


@pytest.fixture
def folder(tmp_path):
    """``a.jsonl`` and ``sub/b.jsonl``."""
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "a.jsonl").write_bytes(LINE)
    (tmp_path / "in" / "sub" / "b.jsonl").write_bytes(LINE)
    return tmp_path / "in"


def names(files):
    return [path.name for path in files]


def close(folder, monkeypatch):
    """Make a folder unreadable, for root too."""
    listing = os.scandir

    def refuse(path="."):
        if os.path.abspath(path) == str(folder):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", refuse)


def inputs(folder):
    return [folder, f"{folder}/**/*.jsonl", f"{folder.parent}/*/*/*.jsonl", f"{folder.parent}/i*"]


def test_a_readable_folder_and_globs_of_it(folder):
    found = [names(expand([given])) for given in inputs(folder)]
    assert found == [["a.jsonl", "b.jsonl"]] * 2 + [["b.jsonl"], ["a.jsonl", "b.jsonl"]]


@pytest.mark.parametrize("number", range(4))
def test_a_folder_that_cannot_be_listed(folder, monkeypatch, number):
    close(folder / "sub", monkeypatch)
    with pytest.raises(DataError, match="sub: this folder cannot be listed .* make it readable"):
        expand([inputs(folder)[number]])


def test_what_a_glob_does_not_list_may_be_closed(folder, monkeypatch):
    close(folder / "sub", monkeypatch)
    assert names(expand([f"{folder}/*.jsonl"])) == ["a.jsonl"]
    (folder / "sub").rename(folder / ".sub")
    close(folder / ".sub", monkeypatch)
    assert names(expand([folder])) == ["a.jsonl"]  # hidden: left out as said


@pytest.mark.parametrize("number", range(4))
def test_a_link_to_nothing(folder, number):
    (folder / "sub" / "c.jsonl").symlink_to(folder / "gone.jsonl")
    with pytest.raises(DataError, match=r"c.jsonl: a link to what cannot be reached .*restore"):
        expand([inputs(folder)[number]])


@pytest.mark.parametrize("pattern", ["*/b.jsonl", "**/b.jsonl"])
def test_a_link_to_a_folder_that_is_gone(folder, pattern):
    assert names(expand([folder / pattern])) == ["b.jsonl"]
    (folder / "other").symlink_to(folder / "gone")
    with pytest.raises(DataError, match="other: a link to what cannot be reached"):
        expand([folder / pattern])


def test_links_to_files_are_read_and_links_in_a_ring_refused(folder):
    (folder / "sub").rename(folder.parent / "elsewhere")
    (folder / "c.jsonl").symlink_to(folder.parent / "elsewhere" / "b.jsonl")
    assert names(expand([folder])) == ["a.jsonl", "c.jsonl"]
    (folder / "d.jsonl").symlink_to(folder / "d.jsonl")
    with pytest.raises(DataError, match=r"d.jsonl: a link to what cannot be reached"):
        expand([folder])


def test_a_pipe_is_refused_before_it_is_opened(folder):
    pipe = folder / "p.jsonl"
    os.mkfifo(pipe)
    for given in (pipe, folder, f"{folder}/*.jsonl"):
        with pytest.raises(DataError, match=r"p.jsonl: a pipe, not a regular file; write its"):
            expand([given])
    with pytest.raises(DataError, match=r"p.jsonl: a pipe"):
        list(read([pipe], Reading()))


def test_a_socket_is_refused(folder, monkeypatch):
    monkeypatch.chdir(folder)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.jsonl")
        with pytest.raises(DataError, match=r"s.jsonl: a socket, not a regular file"):
            expand([folder])
