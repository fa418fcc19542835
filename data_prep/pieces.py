"""SentencePiece's ``.model`` files, NeoX's ``SPMTokenizer``; needs the package sentencepiece."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from data_prep.bytebpe import EOD
from data_prep.errors import DataError, UsageError
from data_prep.tokenizer import TOKENIZER_FILES, Tokenizer

_USER_DEFINED, _CONTROL = 4, 3  # types of a piece in sentencepiece_model.proto


class PieceTokenizer(Tokenizer):
    """``type`` is spm; ``json_bytes`` are those of the ``.model``, as the fingerprint is theirs.

    ``eod`` is the piece ``<|endoftext|>``, None without one (NeoX would take the unknown piece).
    Decoding gives the text back as far as the model's normalisation kept it.
    """

    file_name = TOKENIZER_FILES[1]
    type = "spm"

    def __init__(self, json_bytes: bytes, origin: str) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise UsageError(
                f"{origin} needs the package sentencepiece: pip install sentencepiece"
            ) from error
        self.json_bytes, self.origin = json_bytes, origin
        self.fingerprint = hashlib.sha256(json_bytes).hexdigest()[:16]
        if not json_bytes:  # the library would take it for no argument
            raise DataError(f"{origin} is empty; a SentencePiece .model is wanted")
        try:
            self._pieces = SentencePieceProcessor(model_proto=_literal_eod(json_bytes))
        except Exception as error:  # the library raises what it likes
            raise DataError(
                f"{origin} cannot be read: {error}; a SentencePiece .model is wanted"
            ) from error
        self.vocab_size = self._pieces.get_piece_size()
        found = self._pieces.piece_to_id(EOD)
        self.eod = found if self._pieces.id_to_piece(found) == EOD else None

    def encode_array(self, text: str) -> np.ndarray:
        """Ids of ``text`` as int32 [T]."""
        return np.array(self._pieces.encode(text), dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ``ids``, the end of a document spelt out."""
        parts: list[str] = []
        run: list[int] = []
        for i in map(int, ids):
            if i == self.eod:
                parts += [self._pieces.decode(run), EOD]
                run = []
            else:
                run.append(i)
        return "".join([*parts, self._pieces.decode(run)])

    def byte_counts(self) -> None:
        """None: a model normalises texts, and puts a blank before them."""
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return PieceTokenizer, (self.json_bytes, self.origin)


def _literal_eod(model: bytes) -> bytes:
    """The model with ``<|endoftext|>`` as a control piece, so that text never becomes one.

    Declared as user-defined (the usual way to add it) a literal string in a document would turn
    into the id. The type is one byte of the piece's message; ids and all else stay as they are.
    """
    data = bytearray(model)
    for field, start, stop in _fields(model, 0, len(model)):
        if field != 1:
            continue
        parts = {number: (a, b) for number, a, b in _fields(model, start, stop)}
        name, kind = parts.get(1), parts.get(3)
        if name and kind and model[slice(*name)] == EOD.encode():
            if model[kind[0]] == _USER_DEFINED:
                data[kind[0]] = _CONTROL
            break
    return bytes(data)


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(number, first, past last) of the fields of a protocol-buffer message's content."""
    while at < end:
        key, at = _varint(data, at)
        if key & 7 == 0:  # a number
            start, (_, at) = at, _varint(data, at)
        elif key & 7 == 2:  # bytes or a message
            length, start = _varint(data, at)
            at = start + length
        else:  # eight or four bytes; nothing else is in use
            start, at = at, at + {1: 8, 5: 4}[key & 7]
        yield key >> 3, start, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at ``at`` and what comes after it; DataError past the 10 bytes of 64 bits."""
    value = 0
    for place in range(10):
        byte = data[at + place]
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value, at + place + 1
    raise DataError(f"a number at byte {at} has more than 10 bytes")
