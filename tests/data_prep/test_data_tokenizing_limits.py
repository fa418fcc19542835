"""Tokenizers and texts made to be slow or large: refused or worked around, by rules not by luck."""

import json
import os
import random

import pytest

from data_prep import bytebpe, tokenizing
from data_prep.bytebpe import EOD
from data_prep.errors import DataError
from data_prep.pieces import _literal_eod, _varint
from data_prep.tokenizer import Tokenizer
from data_prep.tokenizing import load_tokenizer, train_bpe


def doubling(times):
    """A vocabulary whose longest token is ``=`` 2**times times, EOD last."""
    vocab = {character: byte for byte, character in enumerate(bytebpe.byte_characters())}
    merges = [("=" * 2**n, "=" * 2**n) for n in range(times)]
    vocab.update({left + right: 256 + n for n, (left, right) in enumerate(merges)})
    return bytebpe.tokenizer_json({**vocab, EOD: len(vocab)}, merges)


@pytest.mark.parametrize(("times", "fast"), [(8, True), (9, False)])
def test_a_long_token_takes_the_slow_path_without_a_proof(times, fast, monkeypatch):
    proofs = []
    proof = bytebpe._last_pair
    monkeypatch.setattr(bytebpe, "_last_pair", lambda *a: proofs.append(a[0]) or proof(*a))
    assert bytebpe.LONGEST_PROVEN == 2**8
    tokenizer = Tokenizer(doubling(times), "made up")
    text = "a" + "=" * 1027
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer._fast is not None, bool(proofs)) == (fast, fast)


def test_many_long_tokens_are_not_proven_either(monkeypatch):
    content = json.loads(doubling(8))
    squares = 256 + sum(4**n for n in range(1, 9))
    monkeypatch.setattr(bytebpe, "_MOST_WORK", squares)
    assert bytebpe.ranks(content) is not None
    monkeypatch.setattr(bytebpe, "_MOST_WORK", squares - 1)
    assert bytebpe.ranks(content) is None


def library_bpe(texts, size):
    """As trained by the library alone, words uncut."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOD],
        initial_alphabet=bytebpe.byte_characters(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    model = json.loads(backend.to_str())["model"]
    return bytebpe.tokenizer_json(model["vocab"], model["merges"])


def test_training_sees_long_words_in_pieces_and_others_whole():
    most = bytebpe.LONGEST_TRAINED
    whole = ["word " * 20, "=" * most, "é" * (most // 2), "żółć\n\n\tx"]
    assert train_bpe(whole, 400).json_bytes == library_bpe(whole, 400)

    long = ["=" * 8000, "word " * 20]
    tokenizer = train_bpe(long, 400)
    longest = max(len(bytebpe._spelled(token)) for token in tokenizer._content["model"]["vocab"])
    assert longest == most and tokenizer._fast is not None
    assert tokenizer.json_bytes != library_bpe(long, 400)
    # The text itself is not cut: the library's own ids for the whole of it, and back.
    text = "=" * 8000
    ids = tokenizer._backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == text


def test_no_word_of_the_trainer_is_longer_than_stated(monkeypatch):
    from tokenizers import Tokenizer as Backend

    seen = []

    class Watched:
        """The trainer's front: what it would learn from, cut by its own pre-tokenizer."""

        def __init__(self, model):
            self.backend = Backend(model)

        def train_from_iterator(self, texts, trainer):
            cut = self.backend.pre_tokenizer.pre_tokenize_str
            seen.extend(word for text in texts for word, _ in cut(text))
            self.backend.train_from_iterator(["abc"], trainer)

        def __setattr__(self, name, value):
            if name == "pre_tokenizer":
                self.backend.pre_tokenizer = value
            else:
                super().__setattr__(name, value)

        def to_str(self):
            return self.backend.to_str()

        from_str = staticmethod(Backend.from_str)

    monkeypatch.setattr("tokenizers.Tokenizer", Watched)
    draw = random.Random(1)
    unbroken = "".join(draw.choice("=-") for _ in range(100_000))
    train_bpe([unbroken, "\n" * 1000, "é" * 1000, "a b"], 300)
    assert max(map(len, seen)) == bytebpe.LONGEST_TRAINED
    letters = bytebpe.byte_characters()
    spelled = "".join(letters[byte] for byte in f"{unbroken}{chr(10) * 1000}".encode())
    assert "".join(seen).startswith(spelled)


def write_vocabulary(path, vocab):
    content = json.loads(bytebpe.byte_tokenizer_json())
    content["model"]["vocab"], content["added_tokens"] = vocab, []
    path.write_text(json.dumps(content))
    return path


def test_an_empty_vocabulary(tmp_path):
    path = write_vocabulary(tmp_path / "t.json", {})
    with pytest.raises(DataError, match=r"t\.json has an empty vocabulary; .*give another"):
        load_tokenizer(path)


@pytest.mark.parametrize("largest", [2**31, 2**32 - 1])
def test_an_id_too_large_to_store_is_found_at_load(tmp_path, largest):
    path = write_vocabulary(tmp_path / "t.json", {"a": 0, "b": largest})
    with pytest.raises(DataError, match=rf"t\.json has the id {largest}; .*number its vocabulary"):
        load_tokenizer(path)
    path = write_vocabulary(tmp_path / "t.json", {"a": 0, "b": 2**31 - 1})
    assert load_tokenizer(path).vocab_size == 2**31


@pytest.mark.parametrize("name", ["tokenizer.json", "a.model"])
def test_a_file_above_the_limit_is_not_read(tmp_path, name):
    path = tmp_path / name
    path.touch()
    os.truncate(path, tokenizing._FILE_LIMIT + 1)  # takes no room on the disk
    with pytest.raises(DataError, match=rf"{name} has 209,715,201 bytes, .* at most 209,715,200"):
        load_tokenizer(path)
    if name == "tokenizer.json":
        with pytest.raises(DataError, match="has 209,715,201 bytes"):
            load_tokenizer(tmp_path)


def test_numbers_of_a_model_have_ten_bytes_at_most(tmp_path):
    assert _varint(b"\xff" * 9 + b"\x01", 0) == (2**64 - 1, 10)
    assert _varint(b"x\x96\x01y", 1) == (150, 3)
    with pytest.raises(DataError, match="a number at byte 0 has more than 10 bytes"):
        _literal_eod(b"\xff" * 400_000)
    with pytest.raises(DataError, match="a number at byte 1 has more than 10 bytes"):
        _literal_eod(b"\x08" + b"\xff" * 400_000)


def test_a_model_of_one_endless_number_is_named(tmp_path):
    pytest.importorskip("sentencepiece", reason="sentencepiece is an optional package")
    path = tmp_path / "a.model"
    path.write_bytes(b"\xff" * 400_000)
    with pytest.raises(DataError, match=r"a\.model cannot be read: a number at byte 0 has more"):
        load_tokenizer(path)


def test_an_end_of_document_that_is_added_but_not_special_stays_text_in_texts():
    """As `add_tokens` of the library leaves it: the literal would end a document in its middle."""
    trained = train_bpe(["a text of several words"] * 3, 280)
    content = json.loads(trained.json_bytes)
    content["added_tokens"][0]["special"] = False
    tokenizer = Tokenizer(json.dumps(content).encode(), "added")
    for text in (EOD, f"a{EOD}b", f"{EOD}{EOD} end"):
        assert tokenizer.encode(text) == trained.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eod == trained.eod and tokenizer.byte_counts()[tokenizer.eod] == 0
    assert json.loads(tokenizer.json_bytes) == content  # the file that the data carry is as given


def test_a_dropout_left_from_training_does_not_draw_the_ids():
    trained = train_bpe(["a text of several words"] * 3, 280)
    content = json.loads(trained.json_bytes)
    content["model"]["dropout"] = 0.9
    tokenizer = Tokenizer(json.dumps(content).encode(), "dropping")
    text = "a text of several words, all of them known"
    assert [tokenizer.encode(text) for _ in range(5)] == [trained.encode(text)] * 5
    assert [tokenizer._backend.encode(text).ids for _ in range(5)] == [trained.encode(text)] * 5
