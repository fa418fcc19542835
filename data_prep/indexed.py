"""The one home of the ``.bin/.idx`` format of GPT-NeoX and Megatron ("mmap"): writer and reader.

``.bin`` holds token ids back to back in one dtype, no header; ``.idx`` says where each sequence
lies (its layout and checks are in `index`); a JSON sidecar says where the tokens came from.

Shapes: N sequences, D entries of the document index, T tokens.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import DataError
from data_prep.files import json_bytes, sha256_file, staged
from data_prep.index import SIZE_LIMIT, Index, put_index, read_index, write_index

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

_SIDECAR_FORMAT = "data_prep sidecar 1"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """uint16 below 65,500 entries, else int32: the rule of GPT-NeoX and megatron-core."""
    if not 0 < vocab_size <= 2**31:
        raise DataError(f"vocab_size {vocab_size} is not between 1 and 2**31")
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


def with_suffix(prefix: str | Path, suffix: str) -> Path:
    """``prefix`` + ``suffix``; unlike Path.with_suffix it keeps dots of the prefix."""
    return Path(f"{prefix}{suffix}")


def write_indexed(
    prefix: str | Path,
    documents: Iterable[np.ndarray | Sequence[int]],
    *,
    vocab_size: int,
    sidecar: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write ``prefix.bin``, ``prefix.json`` and, last, ``prefix.idx``; one sequence per document.

    ``documents`` are 1-D integer ids with 0 <= id < ``vocab_size``; memory is flat in tokens (only
    the sizes are kept). ``sidecar`` is copied into the JSON; a callable is called after the last
    document. Returns the sidecar as written. Any failure, DataError included, leaves nothing.
    """
    bin_path, json_path, idx_path = (with_suffix(prefix, s) for s in (".bin", ".json", ".idx"))
    if idx_path.exists() and not overwrite:
        raise DataError(f"{idx_path} exists; choose another output or overwrite on purpose")
    dtype = token_dtype(vocab_size)
    sizes = array("i")
    digest = hashlib.sha256()
    with staged(bin_path, json_path, idx_path) as (bin_stream, json_stream, idx_stream):
        for number, document in enumerate(documents):
            data = _checked(document, number, vocab_size, bin_path).astype(dtype).tobytes()
            bin_stream.write(data)
            digest.update(data)
            sizes.append(len(data) // dtype.itemsize)
        sizes_N = np.frombuffer(sizes, dtype="i4") if sizes else np.zeros(0, "i4")
        tokens = int(sizes_N.sum(dtype=np.int64))
        if not tokens:
            what = "no documents" if not len(sizes_N) else "only empty documents"
            raise DataError(f"{bin_path}: {what} to write; check the input and the filters")
        put_index(idx_stream, sizes_N, dtype)
        summary = {
            **(sidecar() if callable(sidecar) else sidecar),
            "format": _SIDECAR_FORMAT,
            "version": _version(),
            "documents": len(sizes_N),
            "tokens": tokens,
            "dtype": dtype.name,
            "bin_sha256": digest.hexdigest(),
            "fingerprint": _fingerprint(dtype, sizes_N, digest.hexdigest()),
        }
        json_stream.write(json_bytes(summary))
    return summary


def _checked(document: Any, number: int, vocab_size: int, path: Path) -> np.ndarray:
    ids = np.asarray(document)
    if ids.size == 0:
        ids = ids.astype(np.int64)  # an empty list comes out as float64
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(
            f"{path}: document {number} is {ids.dtype} with {ids.ndim} dimensions, not a row of ids"
        )
    if len(ids) > SIZE_LIMIT:
        raise DataError(f"{path}: document {number} has {len(ids)} tokens, more than 2**31 - 1")
    # Casting would wrap silently: 70000 becomes 4464 in uint16.
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        bad = int(ids.max()) if int(ids.max()) >= vocab_size else int(ids.min())
        raise DataError(
            f"{path}: document {number} holds id {bad}, outside the vocabulary of {vocab_size}; "
            "the tokenizer and vocab_size do not belong together"
        )
    return ids


def _fingerprint(dtype: np.dtype[Any], sizes_N: np.ndarray, bin_sha256: str) -> str:
    digest = hashlib.sha256(f"{dtype.name} {bin_sha256} ".encode())
    digest.update(np.ascontiguousarray(sizes_N, dtype="<i4"))
    return digest.hexdigest()[:16]


def _version() -> str:
    try:
        return metadata.version("kerple-extrapolation")
    except metadata.PackageNotFoundError:
        return "source"


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

        The hash of ``.bin`` is the sidecar's when there is one (whose sizes agree), so that opening
        hundreds of gigabytes stays cheap; `verify` reads everything.
        """
        if self.sidecar is None:
            return _fingerprint(self.dtype, self.sizes, self._bin_sha256())
        found = _fingerprint(self.dtype, self.sizes, self.sidecar["bin_sha256"])
        if found != self.sidecar["fingerprint"]:
            raise DataError(f"{self.prefix}.json belongs to other data than the .idx beside it")
        return found

    def verify(self) -> None:
        """Hash the whole ``.bin`` and compare with the sidecar; DataError when they differ."""
        if self.sidecar is None:
            raise DataError(f"{self.prefix}.json is missing: nothing to verify against")
        if self._bin_sha256() != self.sidecar["bin_sha256"]:
            raise DataError(f"{self.prefix}.bin is not what its sidecar describes; prepare anew")
        _ = self.fingerprint

    def _bin_sha256(self) -> str:
        return sha256_file(with_suffix(self.prefix, ".bin"))

    def _read_sidecar(self) -> dict[str, Any] | None:
        path = with_suffix(self.prefix, ".json")
        if not path.exists():
            return None
        try:
            sidecar = json.loads(path.read_bytes())
            wanted = (sidecar["documents"], sidecar["tokens"], sidecar["dtype"])
            if sidecar["format"] != _SIDECAR_FORMAT:
                raise KeyError("format")
            bytes.fromhex(sidecar["bin_sha256"]), sidecar["fingerprint"]
        except (ValueError, KeyError, TypeError) as error:
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
