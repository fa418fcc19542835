"""Several ``.bin/.idx`` pairs into one, documents one after another and their borders kept.

(NeoX's own merge tool keeps the sizes and loses the documents.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import DataError, UsageError
from data_prep.files import json_bytes, staged
from data_prep.index import put_index
from data_prep.indexed import IndexedDataset, with_suffix
from data_prep.progress import Say, stage, to_stderr
from data_prep.tokenizing import TOKENIZER_FILES
from data_prep.writing import summary_of

_BLOCK = 1 << 22  # tokens copied at once


def merge(
    prefixes: Sequence[str | Path],
    output: str | Path,
    *,
    unknown_tokenizer: bool = False,
    say: Say = to_stderr,
) -> dict[str, Any]:
    """Write the documents of ``prefixes`` in their order to ``output``; the sidecar is returned.

    All must come from one tokenizer by their sidecars; files without one only, and all of them,
    with ``unknown_tokenizer``. The widest dtype wins. DataError leaves nothing; memory is flat.
    """
    if len(prefixes) < 2:
        raise UsageError("merge needs at least two PREFIXes")
    if len({Path(f"{prefix}.bin").resolve() for prefix in (*prefixes, output)}) <= len(prefixes):
        raise UsageError("a prefix is named twice; its documents would be counted twice")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    tokenizer = _common_tokenizer(datasets, unknown_tokenizer)
    dtype = np.result_type(*(data.dtype for data in datasets)).newbyteorder("<")
    paths = [with_suffix(output, suffix) for suffix in (".bin", ".json", ".idx")]
    if any(path.exists() for path in paths):
        raise DataError(f"{output}: there are such files already; choose another --output")
    digest = hashlib.sha256()
    total = sum(data.tokens.nbytes for data in datasets)
    with staged(*paths) as (bin_stream, json_stream, idx_stream):
        with stage("merging", total, say) as advance:
            done = 0
            for data in datasets:
                for start in range(0, len(data.tokens), _BLOCK):
                    block = data.tokens[start : start + _BLOCK]
                    raw = block.astype(dtype).tobytes()
                    bin_stream.write(raw)
                    digest.update(raw)
                    done += block.nbytes
                    advance(done)
        sizes_N = np.concatenate([data.sizes for data in datasets])
        index_D = _document_index(datasets)
        sidecar = _sidecar(datasets, tokenizer)
        summary = summary_of(sidecar, sizes_N, dtype, digest.hexdigest(), paths[0])
        put_index(idx_stream, sizes_N, dtype, index_D)
        json_stream.write(json_bytes(summary))
        _copy_tokenizer(datasets, Path(output))
    return summary


def _common_tokenizer(datasets: list[IndexedDataset], unknown: bool) -> dict[str, Any] | None:
    found = [(data.sidecar or {}).get("tokenizer") for data in datasets]
    without = [data for data, tokenizer in zip(datasets, found, strict=True) if not tokenizer]
    if without and not (unknown and len(without) == len(datasets)):
        raise DataError(
            f"{without[0].prefix}: no sidecar says which tokenizer made it; merge only files of one "
            "tokenizer, with --unknown-tokenizer if you know that none of these has a sidecar and "
            "all have the same"
        )
    if without:
        return None
    first = found[0]
    assert first is not None
    for data, tokenizer in zip(datasets, found, strict=True):
        assert tokenizer is not None
        if tokenizer["fingerprint"] != first["fingerprint"]:
            raise DataError(
                f"{data.prefix} was prepared with tokenizer {tokenizer['fingerprint']}, "
                f"{datasets[0].prefix} with {first['fingerprint']}: their ids mean different text"
            )
    return dict(first)


def _document_index(datasets: list[IndexedDataset]) -> np.ndarray:
    """0 and, for each document, the number of sequences up to its end."""
    parts, sequences = [np.zeros(1, dtype=np.int64)], 0
    for data in datasets:
        parts.append(np.asarray(data.document_index[1:]) + sequences)
        sequences += len(data)
    return np.concatenate(parts)


def _sidecar(datasets: list[IndexedDataset], tokenizer: dict[str, Any] | None) -> dict[str, Any]:
    sources = []
    for data in datasets:
        about = data.sidecar or {}
        entry = {"name": data.prefix.name, "documents": len(data), "tokens": len(data.tokens)}
        entry["fingerprint"] = data.fingerprint
        keys = ("corpus", "split", "text_bytes", "sources", "options_sha256")
        sources.append({**entry, **{key: about[key] for key in keys if key in about}})
    content: dict[str, Any] = {"corpus": "merged", "merged": sources}
    if tokenizer:
        content["tokenizer"] = tokenizer
    if all("text_bytes" in source for source in sources):
        content["text_bytes"] = sum(source["text_bytes"] for source in sources)
    splits = {source.get("split") for source in sources}
    if len(splits) == 1 and splits != {None}:
        content["split"] = splits.pop()
    return content


def _copy_tokenizer(datasets: list[IndexedDataset], output: Path) -> None:
    """Beside the data, so that it can be decoded; an existing one must be the same."""
    for name in TOKENIZER_FILES:
        given, target = datasets[0].prefix.with_name(name), output.with_name(name)
        if not given.is_file():
            continue
        content = given.read_bytes()
        if not target.exists():
            with staged(target) as (stream,):
                stream.write(content)
        elif target.read_bytes() != content:
            raise DataError(f"{target} is another tokenizer than {given}: choose another --output")
