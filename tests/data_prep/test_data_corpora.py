"""The corpora: what they say of themselves, and the local ones for real."""

import sys

import pytest
import zstandard
from prepare_tools import ROOT, quiet, run, write_jsonl

from data_prep import corpora
from data_prep.corpora import LocalCorpus, PublishedCorpus
from data_prep.corpora._base import Fetched
from data_prep.indexed import IndexedDataset
from data_prep.prepare import prepare
from data_prep.reading import Document
from data_prep.splits import digest_of
from data_prep.tokenizing import load_tokenizer


@pytest.mark.parametrize("corpus", ["openwebtext2", "github", "arxiv"])
def test_published_corpora_say_what_is_wanted_and_never_download(corpus, tmp_path, capsys):
    code, _, log = run(capsys, corpus, "--output", tmp_path / "o")
    assert code == 2 and "--input" in log and "sha256" in log and "licence" in log
    known = corpora.get(corpus)
    assert isinstance(known, PublishedCorpus)
    name = next(n for n in [*known.files, "any.jsonl.zst"] if n.endswith(".jsonl.zst"))
    path = tmp_path / name
    path.write_bytes(zstandard.compress(b'{"text": "abc"}\n'))
    code, _, log = run(
        capsys, corpus, "--output", tmp_path / "o", "--input", path, "--split", "1",
        "--tokenizer", "byte",
    )  # fmt: skip
    assert code == (1 if name in known.files else 0)
    assert ("not that of the published file" in log) == (name in known.files)


def test_every_file_of_the_folder_is_a_corpus():
    assert "local_code" in corpora.names() and len(corpora.names()) >= 6
    for name in corpora.names():
        known = corpora.get(name)
        assert known.about and known.licence
        if isinstance(known, PublishedCorpus):
            assert known.where and known.format and known.notes and known.files
        if isinstance(known, LocalCorpus):
            assert known.sources


def test_a_failing_source_names_the_alternative(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "out"
    code, _, log = run(capsys, "local_prose", "--output", out)
    assert code == 1 and "apt-get" in log and "--source sotu" in log and not out.exists()
    code, _, log = run(capsys, "local_prose", "--output", out, "--source", "sotu")
    assert code == 1 and "npm" in log and "--source anarchism" in log and not out.exists()


def test_local_code_small(tmp_path):
    """The real standard library with bytes as tokens: quick, and the counts are the files'."""
    prepared = prepare(
        "local_code", tmp_path / "o", tokenizer="byte", keep_documents=False, say=quiet
    )
    splits = prepared["splits"]
    assert splits["valid"]["tokens"] > 17 * 16384 and splits["test"]["tokens"] > 3 * 16384
    for split in splits.values():
        assert split["tokens"] == split["text_bytes"] + split["documents"]
    assert prepared["sources"]["python"] == ".".join(map(str, sys.version_info[:3]))
    data = IndexedDataset(tmp_path / "o" / "train")
    firsts = [digest_of(load_tokenizer("byte").decode(data.get(i)[:-1])) for i in range(5)]
    assert firsts == sorted(firsts)


def test_a_local_corpus_that_fails_midway_leaves_nothing(tmp_path, monkeypatch):
    def broken():
        for i in range(50):
            yield Document(f"text {i} " * 100, str(i))
        raise OSError("disk gone")

    corpus = LocalCorpus("a", "b", {"only": lambda scratch: Fetched(broken(), {})}, {})
    monkeypatch.setattr(corpora, "get", lambda name: corpus)
    with pytest.raises(OSError, match="disk gone"):
        prepare("made_up", tmp_path / "o", tokenizer="byte", say=quiet)
    assert list(tmp_path.iterdir()) == []


def test_without_input_and_output_it_says_where_and_how(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, log = run(capsys, "openwebtext2")
    assert code == 2 and "segyges/OpenWebText2" in log and "example  python -m data_prep" in log
    assert list(tmp_path.iterdir()) == []


def test_the_default_output_is_where_the_configurations_look(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "mine.jsonl", [{"text": "abc"}])
    code, shown, _ = run(capsys, "github", "--input", "mine.jsonl", "--split", "1",
                         "--tokenizer", "byte")  # fmt: skip
    assert code == 0 and "data/github: " in shown
    assert (tmp_path / "data" / "github" / "train.bin").is_file()
    config = (ROOT / "configs" / "dataset" / "github.yml").read_text()
    assert "data/github/train" in config
