"""The one home of the ``.bin/.idx`` format of GPT-NeoX and Megatron ("mmap"): the reader.

``.bin`` holds token ids back to back in one dtype, no header; ``.idx`` says where each sequence
lies (its layout and checks are in `index`); a JSON sidecar says where the tokens came from. The
writer, in `writing`, is offered here, too.

Shapes: N sequences, D entries of the document index, T tokens.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import DataError
from data_prep.files import sha256_file
from data_prep.index import Index, read_index, write_index
from data_prep.stamps import stamped_sha256
from data_prep.writing import (
    SIDECAR_FORMAT,
    fingerprint_of,
    token_dtype,
    with_suffix,
    write_indexed,
)

__all__ = [
    "DataError",
    "Index",
    "IndexedDataset",
    "read_index",
    "token_dtype",
    "with_suffix",
    "write_index",
    "write_indexed",
]


class IndexedDataset:
    """Read-only, memory-mapped tokens: no locks, no writing, safe to open many times at once.

    ``prefix`` is the path without ``.bin`` or ``.idx``. ``sizes`` int32 [N], ``pointers`` int64
    [N], ``document_index`` int64 [D], ``tokens`` [T] in ``dtype`` and ``sidecar`` (dict, or None
    when the files came from another tool). Raises DataError when a file is missing, foreign or
    damaged, or when the sidecar belongs to other data. Pickles as its path.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        bin_path, idx_path = with_suffix(prefix, ".bin"), with_suffix(prefix, ".idx")
        for path, other in ((idx_path, bin_path), (bin_path, idx_path)):
            if not path.is_file():
                raise DataError(_missing(prefix, path, other))
        index = read_index(idx_path)
        self.dtype, self.sizes, self.pointers = index.dtype, index.sizes, index.pointers
        self.document_index = index.document_index
        last = int(self.pointers[-1]) + int(self.sizes[-1]) * self.dtype.itemsize
        length = bin_path.stat().st_size
        if length != last:
            fault = "cut short" if length < last else "longer than the index says"
            raise DataError(
                f"{bin_path} is {fault}: {length} bytes, while {idx_path.name} describes {last}; "
                "the two files do not belong together, prepare them anew"
            )
        if not length:
            raise DataError(f"{bin_path} holds no tokens; prepare the data again")
        self.tokens = np.memmap(bin_path, dtype=self.dtype, mode="r")
        self.sidecar = self._read_sidecar()

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedDataset, (self.prefix,)

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Ids [length] of sequence ``i`` from ``offset`` on, as a copy that outlives the dataset.

        ``length`` None means to the end. IndexError when a number lies outside the sequence.
        """
        if not 0 <= i < len(self.sizes):
            raise IndexError(f"{self.prefix}: no sequence {i}; there are {len(self.sizes)}")
        size = int(self.sizes[i])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"{self.prefix}: [{offset}:{stop}] is not within {size} tokens of {i}")
        first = int(self.pointers[i]) // self.dtype.itemsize
        return np.array(self.tokens[first + offset : first + stop])

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over dtype, sizes and ``.bin``.

        The hash of ``.bin`` is the sidecar's when there is one (whose sizes agree), else that of
        the file's stamp, so that opening hundreds of gigabytes stays cheap; `verify` reads it all.
        """
        if self.sidecar is None:
            sha256 = stamped_sha256(with_suffix(self.prefix, ".bin"))
            return fingerprint_of(self.dtype, self.sizes, sha256)
        found = fingerprint_of(self.dtype, self.sizes, self.sidecar["bin_sha256"])
        if found != self.sidecar["fingerprint"]:
            raise DataError(f"{self.prefix}.json belongs to other data than the .idx beside it")
        return found

    def verify(self) -> None:
        """Hash the whole ``.bin`` and compare with the sidecar; DataError when they differ.

        What we write has a sequence a document; only merged files of others may have more.
        """
        if self.sidecar is None:
            raise DataError(f"{self.prefix}.json is missing: nothing to verify against")
        if sha256_file(with_suffix(self.prefix, ".bin")) != self.sidecar["bin_sha256"]:
            raise DataError(f"{self.prefix}.bin is not what its sidecar describes; prepare anew")
        _ = self.fingerprint
        foreign = "merged" in self.sidecar and "tokenizer" not in self.sidecar
        if not foreign and not np.array_equal(self.document_index, np.arange(len(self.sizes) + 1)):
            raise DataError(f"{self.prefix}.idx has a damaged document index; prepare anew")

    def _read_sidecar(self) -> dict[str, Any] | None:
        path = with_suffix(self.prefix, ".json")
        if not path.exists():
            return None
        try:
            sidecar: dict[str, Any] = json.loads(path.read_bytes())
            wanted = (sidecar["documents"], sidecar["tokens"], sidecar["dtype"])
            if sidecar["format"] != SIDECAR_FORMAT:
                raise KeyError("format")
            if not isinstance(sidecar.get("tokenizer", {}), dict):
                raise TypeError("tokenizer is not an object")
            if not isinstance(sidecar.get("tokenizer", {}).get("eod"), int | None):
                raise TypeError("the eod of the tokenizer is no id")
            bytes.fromhex(sidecar["bin_sha256"]), sidecar["fingerprint"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"{path} is not a sidecar of data_prep ({error}); move it away"
            ) from error
        if wanted != (len(self.sizes), len(self.tokens), self.dtype.name):
            raise DataError(
                f"{path} describes {wanted[0]} documents, {wanted[1]} tokens of {wanted[2]}, not "
                f"the {len(self.sizes)}, {len(self.tokens)} of {self.dtype.name} beside it"
            )
        return sidecar


def _missing(prefix: str | Path, path: Path, other: Path) -> str:
    text = str(prefix)
    if "," in text:
        return f"{text!r} holds a comma: a data path is one prefix, not several joined together"
    if text.endswith((".bin", ".idx")):
        return f"{path} is missing; give the path without {text[-4:]!r}: {text[:-4]}"
    if other.is_file():
        return f"{path} is missing while {other.name} is there: an interrupted preparation; redo it"
    return f"{path} is missing; prepare the data with python -m data_prep, or correct the path"
