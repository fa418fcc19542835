"""Bits per byte: of the text that was scored, not of the file that it comes from."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from test_standalone_evaluate import PROTOCOLS, quiet

from data_prep.bytebpe import EOD, tokenizer_json
from data_prep.indexed import IndexedDataset, write_indexed
from data_prep.tokenizer import Tokenizer
from data_prep.tokenizing import load_tokenizer, tokenizer_beside, train_bpe
from megatron_patches.standalone import evaluate
from megatron_patches.standalone.evaluate import Evaluation, Request
from megatron_patches.standalone.text_bytes import bits_per_byte, byte_counts, scored_bytes
from megatron_patches.standalone.windows import Window

TEXTS = ["def f(x):\n\treturn x", "Ärger, λ und 漢字", "🙂" * 3, "    \n\n  a", EOD + "!", ""]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(TEXTS * 5, 300)


@pytest.mark.parametrize("name", ["byte", "gpt2", "bpe"])
def test_ids_of_a_text_have_its_bytes(name, bpe):
    tokenizer = bpe if name == "bpe" else load_tokenizer(name)
    counts = tokenizer.byte_counts()
    assert counts.shape == (tokenizer.vocab_size,) and counts[tokenizer.eod] == 0
    for text in TEXTS:
        assert counts[tokenizer.encode_array(text)].sum() == len(text.encode()), text


def test_added_tokens_count_as_they_are_written():
    content = json.loads(load_tokenizer("gpt2").json_bytes)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": 50257, "content": "    ", **flags})
    tokenizer = Tokenizer(json.dumps(content).encode(), "blanks")
    ids = tokenizer.encode_array("    é")
    assert 50257 in ids and tokenizer.byte_counts()[ids].sum() == 6


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
    ],
)
def test_ids_that_do_not_spell_the_text_have_no_bytes(change, bpe):
    content = json.dumps({**json.loads(bpe.json_bytes), **change})
    assert Tokenizer(content.encode(), "changed").byte_counts() is None


def test_only_the_tokenizer_of_the_files_counts(tmp_path, bpe):
    about = {"tokenizer": {"fingerprint": bpe.fingerprint, "vocab_size": bpe.vocab_size}}
    write_indexed(
        tmp_path / "text", [bpe.encode_array("ab")], vocab_size=bpe.vocab_size, sidecar=about
    )
    dataset = IndexedDataset(tmp_path / "text")
    assert tokenizer_beside(dataset.prefix) is None and byte_counts([dataset]) is None
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json({"a": 0, "b": 1, EOD: 2}, []))
    assert byte_counts([dataset]) is None
    bpe.save(tmp_path)
    assert (byte_counts([dataset]) == bpe.byte_counts()).all()


def test_bytes_are_those_of_the_scored_targets():
    counts = np.array([0, 1, 10, 100])
    tokens = np.array([3, 1, 2, 3, 0, 2])
    # Targets of the first window: 1, 2, 3; of the second, from its position 1 on: 0, 2.
    assert scored_bytes(tokens, [Window(0, 3, 0), Window(2, 3, 1)], counts) == 111 + 10
    assert bits_per_byte(2.0 * math.log(2), 5, 20) == pytest.approx(0.5)
    assert bits_per_byte(2.0, 5, 0) is None and bits_per_byte(2.0, 5, None) is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_row_divides_by_the_bytes_of_what_it_scored(trained, protocol, monkeypatch):
    monkeypatch.setattr(evaluate, "byte_counts", lambda datasets: np.arange(1000))
    asked = Request((32, 64), protocol=protocol, max_tokens=400, **PROTOCOLS[protocol])
    evaluation = Evaluation(trained, asked)
    for row in evaluation.run(None, quiet):
        windows, text = evaluation.text.plan.windows(row.eval_length), evaluation.text.tokens
        size = sum(
            int(text[window.start + position + 1])  # an id spells as many bytes as it says
            for window in windows
            for position in range(window.score_from, window.length)
        )
        assert row.bits_per_byte == pytest.approx(row.loss * row.tokens / math.log(2) / size)
