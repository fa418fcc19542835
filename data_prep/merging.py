"""Several ``.bin/.idx`` pairs into one, documents one after another and their borders kept.

(NeoX's own merge tool keeps the sizes and loses the documents.)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import DataError, UsageError
from data_prep.files import clear_leftovers, json_bytes, locked, staged
from data_prep.index import put_index
from data_prep.indexed import IndexedDataset, with_suffix
from data_prep.progress import Say, stage, to_stderr
from data_prep.tokenizer import TOKENIZER_FILES
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
    if os.path.basename(output) in ("", ".", ".."):  # Path would drop the separator at the end
        raise UsageError(
            f"--output {output} ends without a name, so its files would be hidden ones; give a prefix "
            "such as FOLDER/train"
        )
    if Path(output).suffix in (".bin", ".idx"):  # the readers' own message names a path without it
        raise UsageError(f"--output {output} is a prefix: leave {Path(output).suffix!r} away")
    if len(prefixes) < 2:
        raise UsageError("merge needs at least two PREFIXes")
    if len({Path(f"{prefix}.bin").resolve() for prefix in (*prefixes, output)}) <= len(prefixes):
        raise UsageError("a prefix is named twice; its documents would be counted twice")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    tokenizer = _common_tokenizer(datasets, unknown_tokenizer)
    dtype = np.result_type(*(data.dtype for data in datasets)).newbyteorder("<")
    for data in datasets:
        _check_index(data)
    paths = [with_suffix(output, suffix) for suffix in (".bin", ".json", ".idx")]
    sidecar = _sidecar(datasets, tokenizer)
    carried = _tokenizer_files(datasets, tokenizer)
    with locked(paths[0].parent):
        clear_leftovers(*paths, *(paths[0].with_name(name) for name in TOKENIZER_FILES))
        if any(path.exists() for path in paths):
            raise DataError(f"{output}: there are such files already; choose another --output")
        beside = _to_publish(carried, tokenizer, paths[0].parent)
        return _write(datasets, dtype, sidecar, paths, beside, say)


def _write(
    datasets: list[IndexedDataset],
    dtype: np.dtype[Any],
    sidecar: dict[str, Any],
    paths: list[Path],
    beside: dict[Path, bytes],
    say: Say,
) -> dict[str, Any]:
    """One stage for all files: data, sidecar and tokenizer, and the index as their mark."""
    bin_path, json_path, idx_path = paths
    digest = hashlib.sha256()
    total = sum(data.tokens.nbytes for data in datasets)
    with staged(bin_path, json_path, *beside, idx_path) as streams:
        bin_stream, json_stream, *beside_streams, idx_stream = streams
        with stage("merging", total, say) as advance:
            done = 0
            for data in datasets:
                own = hashlib.sha256()
                for start in range(0, len(data.tokens), _BLOCK):
                    block = data.tokens[start : start + _BLOCK]
                    raw = block.astype(dtype).tobytes()
                    bin_stream.write(raw)
                    digest.update(raw)
                    own.update(np.ascontiguousarray(block).data)
                    done += block.nbytes
                    advance(done)
                _check_tokens(data, own.hexdigest())
        sizes_N = np.concatenate([data.sizes for data in datasets])
        index_D = _document_index(datasets)
        summary = summary_of(sidecar, sizes_N, dtype, digest.hexdigest(), bin_path)
        put_index(idx_stream, sizes_N, dtype, index_D)
        json_stream.write(json_bytes(summary))
        for stream, content in zip(beside_streams, beside.values(), strict=True):
            stream.write(content)
    return summary


def _check_index(data: IndexedDataset) -> None:
    """As `IndexedDataset.verify`: what we wrote has a sequence a document."""
    about = data.sidecar
    ours = about is not None and ("merged" not in about or "tokenizer" in about)
    if ours and not np.array_equal(data.document_index, np.arange(len(data) + 1)):
        raise DataError(f"{data.prefix}.idx has a damaged document index; prepare it anew")


def _check_tokens(data: IndexedDataset, sha256: str) -> None:
    """The merged sidecar vouches for what was copied, so it must be what the source's did."""
    if data.sidecar is not None and data.sidecar["bin_sha256"] != sha256:
        raise DataError(
            f"{data.prefix}.bin is not what its sidecar describes: nothing was merged; prepare it "
            "anew"
        )


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
        if not isinstance(tokenizer.get("fingerprint"), str):
            raise DataError(
                f"{data.prefix}.json gives its tokenizer no fingerprint: prepare this data anew"
            )
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
        if type(about.get("text_bytes", 0)) is not int:
            raise DataError(
                f"{data.prefix}.json: text_bytes is {about['text_bytes']!r}, not a number; prepare "
                "this data anew"
            )
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


def _tokenizer_files(
    datasets: list[IndexedDataset], tokenizer: dict[str, Any] | None
) -> dict[str, bytes]:
    """Name and content of the tokenizer that lies beside any of the data; each must be the one."""
    found: dict[str, bytes] = {}
    for folder in dict.fromkeys(data.prefix.parent for data in datasets):
        for path in (folder / name for name in TOKENIZER_FILES):
            if not path.is_file():
                continue
            content = path.read_bytes()
            _check_fingerprint(path, content, tokenizer)
            if found.setdefault(path.name, content) != content:
                raise DataError(
                    f"{path} is another tokenizer than that beside the data before it; move away "
                    "the one that did not make the data"
                )
    return found


def _to_publish(
    carried: dict[str, bytes], tokenizer: dict[str, Any] | None, folder: Path
) -> dict[Path, bytes]:
    """Those of ``carried`` that ``folder`` does not have; one that is there must be the same."""
    for path in (folder / name for name in TOKENIZER_FILES):
        if path.exists():
            content = path.read_bytes()
            _check_fingerprint(path, content, tokenizer)
            if carried.get(path.name, content) != content:
                raise DataError(
                    f"{path} is another tokenizer than that of the data: choose another --output"
                )
    missing = [name for name in carried if not (folder / name).exists()]
    return {folder / name: carried[name] for name in missing}


def _check_fingerprint(path: Path, content: bytes, tokenizer: dict[str, Any] | None) -> None:
    found = hashlib.sha256(content).hexdigest()[:16]
    if tokenizer and found != tokenizer["fingerprint"]:
        raise DataError(
            f"{path} is {found}, not the tokenizer {tokenizer['fingerprint']} that the sidecars "
            "name; move it away, or choose another --output if it lies there"
        )
