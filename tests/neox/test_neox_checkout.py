"""Finding the checkout and its commit."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from neox_tools import STUB

from megatron_patches.config import ConfigError
from megatron_patches.neox import KNOWN_COMMITS, SEAMS, Checkout, find, install


def git(home, *arguments: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(home), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(home) -> str:
    git(home, "init", "-q")
    git(home, "add", "train.py")
    git(home, "commit", "-q", "-m", "one")
    return git(home, "rev-parse", "HEAD")


def test_nothing_named(clean):
    with pytest.raises(ConfigError, match="NEOX_HOME is not set") as caught:
        find()
    assert KNOWN_COMMITS[0][:8] in str(caught.value)


def test_no_such_folder(clean, monkeypatch, tmp_path):
    monkeypatch.setenv("NEOX_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere: no such folder"):
        find()


@pytest.mark.parametrize("file", ["deepy.py", "megatron/training.py"])
def test_not_a_checkout(clean, copy, file):
    (copy / file).unlink()
    with pytest.raises(ConfigError, match=f"not a GPT-NeoX checkout, it has no {file};"):
        find(copy)


def test_the_argument_comes_before_the_environment(clean, monkeypatch, copy):
    monkeypatch.setenv("NEOX_HOME", str(copy))
    assert find().home == copy
    assert find(STUB).home == STUB


def test_the_home_folder_is_expanded(clean, monkeypatch, copy):
    monkeypatch.setenv("HOME", str(copy.parent))
    monkeypatch.setenv("NEOX_HOME", "~/neox")
    assert find().home == copy


def test_a_commit_that_was_not_tried_is_told(clean, copy, capsys):
    head = commit(copy)
    found = find(copy)
    assert (found.commit, found.known) == (head, False)
    install(home=copy, launcher=True)
    told = capsys.readouterr().err
    assert head[:8] in told and KNOWN_COMMITS[0][:8] in told
    assert f"signatures of {len(SEAMS)} places were compared and fit" in told


def test_a_known_commit_is_not_told(clean, monkeypatch, copy, capsys):
    monkeypatch.setattr("megatron_patches.neox.checkout.KNOWN_COMMITS", (commit(copy),))
    assert find(copy).known
    install(home=copy, launcher=True)
    assert capsys.readouterr().err == ""


def test_the_commit_of_a_repository_around_it_says_nothing(clean, copy, tmp_path):
    outer = tmp_path / "outer"
    shutil.copytree(copy, outer)
    assert commit(outer) == find(outer).commit
    inner = outer / "inside"
    shutil.copytree(copy, inner)
    assert find(inner) == Checkout(inner, "unknown")


def test_without_git(clean, monkeypatch, copy, tmp_path):
    commit(copy)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find(copy).commit == "unknown"
