"""Writing ``.bin/.idx`` and the sidecar: in one go, or in shards that survive a kill."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import DataError
from data_prep.files import json_bytes, staged
from data_prep.index import SIZE_LIMIT, put_index
from data_prep.shards import Shards

SIDECAR_FORMAT = "data_prep sidecar 1"
Document = np.ndarray | Sequence[int]


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
    documents: Iterable[Document],
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
            data = checked_ids(document, number, vocab_size, bin_path).astype(dtype).tobytes()
            bin_stream.write(data)
            digest.update(data)
            sizes.append(len(data) // dtype.itemsize)
        sizes_N = np.frombuffer(sizes, dtype="i4") if sizes else np.zeros(0, "i4")
        about = sidecar() if callable(sidecar) else sidecar
        summary = summary_of(about, sizes_N, dtype, digest.hexdigest(), bin_path)
        put_index(idx_stream, sizes_N, dtype)
        json_stream.write(json_bytes(summary))
    return summary


def write_in_shards(
    prefix: str | Path,
    documents_from: Callable[[int], Iterable[Document]],
    *,
    vocab_size: int,
    sidecar: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """As `write_indexed`, but a killed call leaves its finished shards, and the next continues.

    ``documents_from(n)`` gives the documents from number n on. For a folder that readers do not
    look at: while it runs, ``prefix.tokens`` and its journal lie there. A failure leaves them.
    """
    bin_path, json_path, idx_path = (with_suffix(prefix, s) for s in (".bin", ".json", ".idx"))
    dtype = token_dtype(vocab_size)
    with Shards(prefix, dtype, say) as shards:
        for number, document in enumerate(documents_from(shards.documents), shards.documents):
            shards.add(checked_ids(document, number, vocab_size, bin_path).astype(dtype))
        shards.finish()
        sizes_N = shards.sizes()
        summary = summary_of(sidecar, sizes_N, dtype, shards.digest.hexdigest(), bin_path)
        with staged(json_path, idx_path) as (json_stream, idx_stream):
            put_index(idx_stream, sizes_N, dtype)
            json_stream.write(json_bytes(summary))
        shards.publish(bin_path)
    return summary


def summary_of(
    sidecar: Mapping[str, Any],
    sizes_N: np.ndarray,
    dtype: np.dtype[Any],
    bin_sha256: str,
    path: Path,
) -> dict[str, Any]:
    """The sidecar with its counts; DataError where there is nothing to count."""
    tokens = int(sizes_N.sum(dtype=np.int64))
    if not tokens:
        what = "no documents" if not len(sizes_N) else "only empty documents"
        raise DataError(f"{path}: {what} to write; check the input and the filters")
    return {
        **sidecar,
        "format": SIDECAR_FORMAT,
        "version": version(),
        "documents": len(sizes_N),
        "tokens": tokens,
        "dtype": dtype.name,
        "bin_sha256": bin_sha256,
        "fingerprint": fingerprint_of(dtype, sizes_N, bin_sha256),
    }


def checked_ids(document: Any, number: int, vocab_size: int, path: Path) -> np.ndarray:
    """``document`` as a row of ids inside the vocabulary, else DataError."""
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


def fingerprint_of(dtype: np.dtype[Any], sizes_N: np.ndarray, bin_sha256: str) -> str:
    """16 hex digits over dtype, sizes and the hash of ``.bin``."""
    digest = hashlib.sha256(f"{dtype.name} {bin_sha256} ".encode())
    digest.update(np.ascontiguousarray(sizes_N, dtype="<i4").data)
    return digest.hexdigest()[:16]


def version() -> str:
    try:
        return metadata.version("kerple-extrapolation")
    except metadata.PackageNotFoundError:
        return "source"
