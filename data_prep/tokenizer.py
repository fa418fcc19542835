"""The one class of tokenizers: ids of texts, texts of ids, and the file that a data folder carries.

Its content is the bytes of a tokenizer.json, so there is one fingerprint (sha256 of those bytes, first
16 hex digits); GPT-2's and the bytes are no exception (see `tokenizing`). T: tokens of a text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import bytebpe
from data_prep.bytebpe import EOD
from data_prep.errors import DataError
from data_prep.files import staged

# Of the tokenizer.json made from GPT-2's encoder.json (sha256 196139668be6...) and vocab.bpe
# (1ce1664773c5...). Over the meaning: other packages carry the same vocabulary, spaced otherwise.
GPT2_FINGERPRINT = "c9c1848c204159d7"
# tiktoken 0.14 panics at about a million whitespace characters in a row; stay far below.
_RUN = 1 << 15
_MOST_IDS = 2**31  # ids are stored as int32 at the widest
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # in a data folder, one of them


@contextmanager
def no_panic(origin: str) -> Iterator[None]:
    """DataError where a library in Rust panics, which is no Exception and passes all handlers."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{origin} breaks the tokenizer's library: {error}"[:300]) from error


class Tokenizer:
    """Text to ids and back. ``type`` is gpt2, byte or bpe; ``eod`` the id of ``<|endoftext|>``.

    ``json_bytes`` is the content of the file ``file_name``.
    """

    file_name = TOKENIZER_FILES[0]
    eod: int | None

    def __init__(
        self, json_bytes: bytes, origin: str, table: dict[bytes, int] | None = None
    ) -> None:
        """``table``: the outcome of the proof in bytebpe.ranks, where it is known already."""
        from tokenizers import Tokenizer as Backend

        self.json_bytes, self.origin, self._given_table = json_bytes, origin, table
        self.fingerprint = hashlib.sha256(json_bytes).hexdigest()[:16]
        try:
            self._content: dict[str, Any] = json.loads(json_bytes)
            changed = _steady(self._content)
            with no_panic(origin):
                text = json.dumps(self._content) if changed else json_bytes.decode()
                self._backend = Backend.from_str(text)
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception
            what = "is empty" if not json_bytes.strip() else f"cannot be read: {error}"
            raise DataError(
                f"{origin} {what}; a tokenizer.json of Hugging Face is wanted"
            ) from error
        # A stored truncation would cut every document; a literal <|endoftext|> is ordinary text.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self.eod = self._backend.token_to_id(EOD)
        largest = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if not 0 <= largest < _MOST_IDS:
            what = "has an empty vocabulary" if largest < 0 else f"has the id {largest}"
            raise DataError(
                f"{origin} {what}; 1 to {_MOST_IDS} ids from 0 on can be stored: give another "
                "tokenizer.json, or number its vocabulary anew"
            )
        self.vocab_size = largest + 1

    @cached_property
    def type(self) -> str:
        if self.json_bytes == bytebpe.byte_tokenizer_json():
            return "byte"
        return "gpt2" if self.fingerprint == GPT2_FINGERPRINT else "bpe"

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without an EOD; special strings in it are ordinary text."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of ``text`` as int32 [T]."""
        if self.type == "byte":  # nothing to merge, so nothing to search
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)
        if self._fast is None or _has_long_blank(text):
            ids = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        else:
            ids = self._fast.encode_ordinary(text)
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, special tokens spelt out; a cut character becomes U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def byte_counts(self) -> np.ndarray | None:
        """Bytes of text behind each id, int64 [vocab_size]; 0 for special ids.

        None for a tokenizer whose ids do not spell the text byte for byte.
        """
        found = bytebpe.spelled_bytes(self._content)
        if found is None:
            return None
        counts = np.zeros(self.vocab_size, dtype=np.int64)
        counts[list(found)] = list(found.values())
        return counts

    def save(self, folder: Path) -> None:
        """Write it into a data folder, under its one name there."""
        with staged(folder / self.file_name) as (stream,):
            stream.write(self.json_bytes)

    def describe(self) -> dict[str, Any]:
        """What the sidecar records."""
        return {
            "type": self.type,
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            "eod": self.eod,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.json_bytes, self.origin, self._table)

    @cached_property
    def _table(self) -> dict[bytes, int] | None:
        proven = self.fingerprint == GPT2_FINGERPRINT  # by a test; it takes a second
        return self._given_table or bytebpe.ranks(self._content, proven)

    @cached_property
    def _fast(self) -> Any:
        """tiktoken's encoder, where the ids are proven equal (see bytebpe.ranks), else None."""
        table = self._table
        if table is None:
            return None
        import tiktoken

        # No special tokens at all: then no text can produce one.
        return tiktoken.Encoding(
            self.fingerprint, pat_str=bytebpe.PATTERN, mergeable_ranks=table, special_tokens={}
        )


def _steady(content: dict[str, Any]) -> bool:
    """Take out of a parsed tokenizer.json what would give a text other ids; whether anything was.

    An EOD that is added but not special (the library's `add_tokens`) would be found in texts, where
    it ends a document in the middle; a dropout, left from training, makes ids a matter of chance.
    """
    changed = False
    for token in content.get("added_tokens") or []:
        if token.get("content") == EOD and not token.get("special"):
            token["special"] = changed = True
    model = content.get("model") or {}
    if model.get("dropout"):
        model["dropout"], changed = None, True
    return changed


def _has_long_blank(text: str) -> bool:
    """Whether a run of 2 * _RUN blanks is possible: such a run covers two samples in a row."""
    samples = text[::_RUN]
    return any(
        a.isspace() and b.isspace() and text[i * _RUN : (i + 1) * _RUN].isspace()
        for i, (a, b) in enumerate(zip(samples, samples[1:], strict=False))
    )
