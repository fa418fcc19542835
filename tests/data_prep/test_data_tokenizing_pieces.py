"""SentencePiece models: the library's ids, one EOD that no text can produce, clear messages."""

import io
import sys

import numpy as np
import pytest
from prepare_tools import ROOT, TEXTS, foreign_pair, make_source, run

from data_prep.errors import DataError, UsageError
from data_prep.indexed import IndexedDataset
from data_prep.pool import encode_all
from data_prep.tokenizing import load_tokenizer

EOD = "<|endoftext|>"


def test_without_the_package_the_message_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UsageError, match="pip install sentencepiece"):
        load_tokenizer(tmp_path / "a.model")


@pytest.fixture(scope="module")
def spm():
    return pytest.importorskip("sentencepiece", reason="sentencepiece is an optional package")


def train(spm, **options):
    model = io.BytesIO()
    lines = (ROOT / "README.md").read_text().splitlines() + TEXTS
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in lines if line.strip()),
        model_writer=model, vocab_size=600, byte_fallback=True, minloglevel=2,
        hard_vocab_limit=False, **options,
    )  # fmt: skip
    return model.getvalue()


@pytest.fixture(scope="module", params=["user_defined_symbols", "control_symbols"])
def model(request, spm, tmp_path_factory):
    path = tmp_path_factory.mktemp("spm") / "a.model"
    path.write_bytes(train(spm, **{request.param: [EOD]}))
    return path


def test_ids_are_the_librarys_and_the_literal_is_text(spm, model):
    theirs = spm.SentencePieceProcessor(model_file=str(model))
    ours = load_tokenizer(model)
    assert ours.type == "spm" and ours.vocab_size == theirs.get_piece_size()
    assert ours.eod == theirs.piece_to_id(EOD)
    for text in ["Hello world", "def f(x):\n    return x", "żółć 😀 日本", ""]:
        assert ours.encode(text) == theirs.encode(text)
    for text in (EOD, f"a{EOD}b", f"{EOD}{EOD} end {EOD}"):
        assert ours.eod not in ours.encode(text) and ours.decode(ours.encode(text)) == text
    assert ours.decode([*ours.encode("Hello"), ours.eod, *ours.encode("you")]) == f"Hello{EOD}you"


def test_prepared_with_one_eod_a_document_and_carried_along(spm, model, tmp_path, capsys):
    out = tmp_path / "o"
    code, _, log = run(capsys, "jsonl", "--input", make_source(tmp_path), "--output", out,
                       "--tokenizer", model, "--split", "1")  # fmt: skip
    assert code == 0, log
    data = IndexedDataset(out / "train")
    eod = load_tokenizer(model).eod
    assert int((data.tokens == eod).sum()) == len(TEXTS) == len(data)
    assert (out / "tokenizer.model").read_bytes() == model.read_bytes()
    assert load_tokenizer(out).fingerprint == data.sidecar["tokenizer"]["fingerprint"]
    code, shown, _ = run(capsys, "inspect", out / "train")
    assert code == 0 and "document 0" in shown


def test_a_model_spells_no_text_byte_for_byte(spm, model):
    """An evaluation asks for the bytes behind each id, and then reports no bits per byte."""
    assert load_tokenizer(model).byte_counts() is None


def test_ids_of_another_tokenizer_are_named_and_not_decoded(spm, model, tmp_path, capsys):
    size = load_tokenizer(model).vocab_size
    foreign_pair(tmp_path / "x", [1, size])
    code, shown, _ = run(capsys, "inspect", tmp_path / "x", "--tokenizer", model)
    assert code == 0 and f"it has {size} entries, and the id {size} is here" in shown


def test_workers_give_the_same_ids(spm, model):
    tokenizer = load_tokenizer(model)
    alone = list(encode_all(tokenizer, TEXTS, workers=1, append_eod=True))
    pooled = list(encode_all(tokenizer, TEXTS, workers=2, append_eod=True))
    assert all(np.array_equal(a, b) for a, b in zip(alone, pooled, strict=True))


def test_a_model_without_eod_and_a_damaged_one(spm, tmp_path, capsys):
    """NeoX would take the unknown piece for the end of a document."""
    path = tmp_path / "a.model"
    path.write_bytes(train(spm))
    assert load_tokenizer(path).eod is None
    code, _, log = run(capsys, "jsonl", "--input", make_source(tmp_path), "--output",
                       tmp_path / "o", "--tokenizer", path)  # fmt: skip
    assert code == 2 and "has no <|endoftext|> to append" in log
    for content, message in ((b"", "is empty"), (b"\x0a\xffnot a model", "cannot be read")):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_tokenizer(path)
