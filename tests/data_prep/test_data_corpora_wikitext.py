"""WikiText-103: cut at articles, its own splits, and refusals of what is not it."""

import json

import pytest
from prepare_tools import run

from data_prep.indexed import IndexedDataset
from data_prep.splits import NAMES
from data_prep.tokenizing import load_tokenizer

ARTICLE = (
    " \n = Lobster = \n \n Text of 7 @.@ 2 kg , sea @-@ food . \n = not a title = \n \n"
    " = = Part = = \n \n More <unk> . \n \n"
)
OTHER = " = Crab = \n \n = = Only = = \n \n Crabs . \n"


@pytest.fixture
def wikitext(tmp_path):
    folder = tmp_path / "wikitext-103"
    folder.mkdir()
    for split in NAMES:
        text = (ARTICLE + OTHER).replace("Lobster", f"Lobster of {split}")
        (folder / f"wiki.{split}.tokens").write_text(text.replace("Crab", f"Crab {split}"))
    return folder


def test_wikitext_is_cut_at_articles_and_keeps_its_own_splits(wikitext, tmp_path, capsys):
    out = tmp_path / "o"
    code, _, log = run(capsys, "wikitext103", "--input", wikitext, "--output", out,
                       "--tokenizer", "byte")  # fmt: skip
    assert code == 0, log
    tokenizer = load_tokenizer("byte")
    for split in NAMES:
        data = IndexedDataset(out / split)
        texts = [tokenizer.decode(data.get(i)[:-1]) for i in range(len(data))]
        article = ARTICLE.replace("Lobster", f"Lobster of {split}").removeprefix(" \n")
        assert texts == [article, OTHER.replace("Crab", f"Crab {split}")]
        assert data.sidecar["split"] == split
        assert data.sidecar["options"]["split"] == "published"
    files = json.loads((out / "prepared.json").read_text())["inputs"]
    assert [entry["name"] for entry in files] == [f"wiki.{split}.tokens" for split in NAMES]


def test_wikitext_of_one_file_and_by_hash(wikitext, tmp_path, capsys):
    base = ["wikitext103", "--input", wikitext / "wiki.valid.tokens", "--tokenizer", "byte"]
    assert run(capsys, *base, "--output", tmp_path / "a")[0] == 0
    assert not (tmp_path / "a" / "train.bin").exists()
    assert len(IndexedDataset(tmp_path / "a" / "valid")) == 2
    assert run(capsys, *base, "--split", "1", "--output", tmp_path / "b")[0] == 0
    assert len(IndexedDataset(tmp_path / "b" / "train")) == 2


@pytest.mark.parametrize(
    "change, message",
    [
        ("both", "not both"),
        ("name", "name must be one of"),
        ("absent", "no such file, and no folder"),
        ("before", ":1: text before the first article"),
        ("bytes", ":2: not UTF-8"),
    ],
)
def test_wikitext_refuses_what_is_not_it(wikitext, tmp_path, capsys, change, message):
    file = wikitext / "wiki.train.tokens"
    inputs = [wikitext]
    if change == "both":
        file.rename(wikitext / "wiki.train.raw")
    elif change == "name":
        inputs = [file.rename(wikitext / "train.txt")]
    elif change == "absent":
        inputs = [tmp_path / "nowhere"]
    elif change == "before":
        file.write_text("hello\n" + ARTICLE)
    else:
        file.write_bytes(b" = A = \n\xff\n")
    out = tmp_path / "o"
    code, _, log = run(capsys, "wikitext103", "--input", *inputs, "--output", out,
                       "--tokenizer", "byte")  # fmt: skip
    assert code in (1, 2) and message in log and not out.exists()
