"""How many rows the embedding has, and that no tokenizer stands in silently for the one configured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import standalone_tools as tools
from standalone_tools import TINY

from data_prep.errors import DataError
from data_prep.indexed import write_indexed
from data_prep.tokenizing import load_tokenizer
from megatron_patches.config import Config, ConfigError, from_mapping
from megatron_patches.standalone.build import tokenizer_size, vocabulary
from megatron_patches.standalone.texts import Request, open_text
from megatron_patches.standalone.train import train


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A prepared text of bytes, its tokenizer beside it."""
    tokenizer = load_tokenizer("byte")
    tokenizer.save(tmp_path)
    sidecar = {"tokenizer": tokenizer.describe()}
    ids = tokenizer.encode_array("some text")
    write_indexed(tmp_path / "train", [ids], vocab_size=tokenizer.vocab_size, sidecar=sidecar)
    return tmp_path


def of(text: Path, **keys: object) -> Config:
    own = {key: value for key, value in TINY.items() if key != "padded_vocab_size"}
    paths = {f"{part}_data_paths": [str(text / "train")] for part in ("train", "valid", "test")}
    return from_mapping({**own, **paths, **keys})


def test_the_tokenizer_of_the_text_decides(text):
    for keys in ({}, {"tokenizer_type": "HFTokenizer", "vocab_file": str(text / "tokenizer.json")}):
        assert tokenizer_size(of(text, **keys)) == 257
        assert vocabulary(of(text, **keys)) == 384  # the next multiple of 128


def test_a_file_that_is_not_there_is_no_silent_default(text):
    with pytest.raises(
        ConfigError, match="`vocab_file` .*nosuch.json: no such file; the tokenizer"
    ):
        tokenizer_size(of(text, vocab_file="nosuch.json"))


def test_the_word_for_gpt2_is_not_taken_for_another_tokenizer(text):
    # GPT-NeoX would build 50,304 rows of it, or read the file as GPT-2's and stop.
    for keys in ({}, {"vocab_file": str(text / "tokenizer.json")}):
        with pytest.raises(ConfigError, match="`tokenizer_type` .*257 entries.* write HFTokenizer"):
            tokenizer_size(of(text, tokenizer_type="GPT2BPETokenizer", **keys))


def test_a_given_number_of_rows_holds_the_whole_tokenizer(text):
    assert vocabulary(of(text, padded_vocab_size=257)) == 257
    with pytest.raises(
        ConfigError, match="`padded_vocab_size` .*256: the tokenizer has 257 entries"
    ):
        vocabulary(of(text, padded_vocab_size=256))
    # Text that names no tokenizer says nothing.
    (text / "train.json").unlink()
    assert vocabulary(of(text, padded_vocab_size=256)) == 256


@pytest.mark.parametrize(("bad", "part"), [(99, "train"), (-100, "train"), (64, "valid")])
def test_tokens_that_the_model_has_no_row_for(tmp_path, bad, part):
    """torch leaves a label of -100 out of the loss; on a GPU the others end in an assertion without names."""
    tools.write_text(tmp_path / "text")
    documents = [np.full(900, 1 + n, dtype=np.int32) for n in range(8)]
    for document in documents:
        document[::100] = bad
    path = tmp_path / "text" / part
    (path.with_suffix(".json")).unlink()
    write_indexed(
        path, [np.abs(d) for d in documents], vocab_size=70000, sidecar={}, overwrite=True
    )
    np.concatenate(documents).tofile(path.with_suffix(".bin"))
    path.with_suffix(".json").unlink()  # which holds a checksum
    config = tools.tiny(tmp_path / "text", tmp_path / "run", eval_iters=1)
    where = "samples 0 to 3 of the training text" if part == "train" else "the validation text"
    with pytest.raises(DataError, match=f"{where}: token {bad} is outside the model's vocabulary"):
        train(config)


@pytest.mark.parametrize("protocol", ["nonoverlap", "paper"])
def test_a_token_of_any_file_of_a_text_blames_no_other(tmp_path, protocol):
    for name, value in (("a", 1), ("b", 99)):
        write_indexed(tmp_path / name, [np.full(200, value)], vocab_size=100, sidecar={})
    both = [str(tmp_path / name) for name in "ab"]
    config = tools.tiny(tmp_path, tmp_path / "run", valid_data_paths=both)
    with pytest.raises(DataError, match="/a, .*/b: token 99 is outside the model's vocabulary"):
        open_text(config, Request((16,), protocol=protocol), 0, 64).at(16)
