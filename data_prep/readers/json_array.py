"""The elements of one JSON array, each as soon as it is there: lm_dataformat's .json.zst."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from data_prep.errors import DataError
from data_prep.readers.base import DOCUMENT_LIMIT, BadRecord

# An error this near to the end of what is there may only mean that the rest is still to come.
_UNSURE = 16


def array_elements(
    blocks: Iterable[bytes],
    name: str,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Iterator[Any]:
    """The elements of the array that the file is. DataError for damage and for a cut.

    ``pairs`` makes each object of its keys and values; a BadRecord of it is a DataError.
    """
    text = _Ahead(blocks, name, pairs)
    if text.sign() != "[":
        raise DataError(f"{name}: no JSON array")
    text.at += 1
    number = 0
    if text.sign() == "]":
        text.at += 1
    else:
        sign = ","
        while sign == ",":
            number += 1
            yield text.value(f"{name}[{number}]")
            sign = text.sign()
            text.at += 1
        if sign != "]":
            what = f"{sign!r} where , or ] belongs" if sign else "cut short"
            raise DataError(f"{name}: {what} after element {number}; get the file anew")
    if text.sign():
        raise DataError(f"{name}: there is more after the end of the array; get the file anew")


class _Ahead:
    """Decoded text with a position; as much is held as the element at hand needs."""

    def __init__(self, blocks: Iterable[bytes], name: str, pairs: Any) -> None:
        self._blocks, self._name = iter(blocks), name
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder(object_pairs_hook=pairs)
        self._text, self._ended, self._bytes = "", False, 0
        self.at = 0

    def sign(self) -> str:
        """The next character that is no space, "" at the end; the position is before it."""
        while True:
            while self.at < len(self._text) and self._text[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self._text):
                return self._text[self.at]
            if not self._more():
                return ""

    def value(self, where: str) -> Any:
        """The value at the position. An attempt is repeated when the text has doubled: linear."""
        self.sign()
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self.at)
            except json.JSONDecodeError as error:
                inside = error.pos + _UNSURE < len(self._text)
                definite = inside and not error.msg.startswith("Unterminated")
                if definite or not self._more():
                    what = "not JSON" if definite else "cut short, or not JSON"
                    raise DataError(f"{where}: {what} ({error.msg}); get the file anew") from None
            except BadRecord as bad:
                raise DataError(f"{where}: {bad}; correct it") from None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON ({error})") from None
            else:
                # A number at the end of what is there may go on.
                if end < len(self._text) or not self._more():
                    self.at = end
                    return value

    def _more(self) -> bool:
        """At least twice as much of the rest; False when nothing came."""
        rest = self._text[self.at :]
        pieces, length = [rest], len(rest)
        while not self._ended and length < 2 * len(rest) + 1:
            block = next(self._blocks, None)
            self._ended = block is None
            pieces.append(self._decoded(block or b""))
            length += len(pieces[-1])
        if length > DOCUMENT_LIMIT:
            raise DataError(f"{self._name}: an element of more than {DOCUMENT_LIMIT} characters")
        self._text, self.at = "".join(pieces), 0
        return length > len(rest)

    def _decoded(self, block: bytes) -> str:
        try:
            text = self._decoder.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._name}: not UTF-8 near byte {self._bytes + error.start}; get the file anew"
            ) from None
        self._bytes += len(block)
        return text
