"""Targets: archives of text, prepared data, tokenizers."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fuzz_attacks as attacks
import fuzz_commands
import numpy as np
from fuzz_target import Files, Target, read_folder

from data_prep import bytebpe, finished, inspecting
from data_prep import sums as sums_of
from data_prep.errors import DataError
from data_prep.indexed import IndexedDataset, write_indexed
from data_prep.reading import Reading, expand, read
from data_prep.tokenizer import Tokenizer
from data_prep.tokenizing import load_tokenizer, train_bpe

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS / "data_prep"))
TEXTS = ["one line", "two\nlines", "\u00fcber caf\u00e9 \U0001f600 <tag/>", "x" * 300]


# ---- archives of text ------------------------------------------------------------------------


def _archives(endings: Sequence[str]) -> list[Files]:
    from test_data_fuzz_reading import WRITERS

    return [{f"a{ending}": WRITERS[ending](TEXTS)} for ending in endings]


def _texts(folder: Path) -> Any:
    reading = Reading(on_bad_line="stop")
    return [document.text for document in read(expand(sorted(folder.iterdir())), reading)]


def _plain() -> list[Files]:
    return [*_archives((".jsonl", ".json", ".tar")), {"a.txt": "\n".join(TEXTS).encode()}]


def _packed() -> list[Files]:
    return _archives(
        (".jsonl.zst", ".jsonl.gz", ".json.zst", ".json.gz", ".dat.zst", ".tar.gz", ".tar.zst",
         ".jsonl.zst.tar")
    )  # fmt: skip


def _attacks_of_archives() -> Mapping[str, Files]:
    found = {
        f"harmless-tar-{name}": {"a.tar": data} for name, data in attacks.escapes("a/b.txt").items()
    }
    line = b'{"text": "x"}\n'
    return {
        **found,
        "gzip-of-one-line": {"a.jsonl.gz": attacks.gzip_of_zeros()},
        "zstd-of-one-line": {"a.jsonl.zst": attacks.zstd_of(b"x")},
        "zstd-of-one-text": {"a.txt.zst": attacks.zstd_of(b"x")},
        "zstd-of-one-array": {"a.json.zst": attacks.zstd_of(b"[")},
        "zstd-window": {"a.jsonl.zst": attacks.zstd_window()},
        "dat-size": {"a.dat.zst": attacks.zstd_of(b"9", 1 << 20)},
        "deep-line": {"a.jsonl": b'{"text": ' + attacks.deep_json() + b"}\n" + line},
        "deep-array": {"a.json": attacks.deep_json()},
        "long-number": {"a.jsonl": b'{"text": ' + b"9" * 100_000 + b"}\n"},
        "harmless-repeated-key": {"a.jsonl": b"{" + b'"text": "x", ' * 9 + b'"a": 1}\n'},
    }


def _columns() -> Sequence[Files]:
    import pyarrow as pa
    from pyarrow import ipc, parquet

    table = pa.table({"text": TEXTS, "meta": [1, 2, 3, 4]})
    with tempfile.TemporaryDirectory() as folder:
        for name, packing in (("a.parquet", "snappy"), ("b.parquet", "zstd")):
            parquet.write_table(table, Path(folder) / name, compression=packing)
        with ipc.new_stream(str(Path(folder) / "c.arrow"), table.schema) as stream:
            stream.write_table(table)
        with ipc.new_file(str(Path(folder) / "d.arrow"), table.schema) as stream:
            stream.write_table(table)
        return [{name: data} for name, data in read_folder(Path(folder)).items()]


# ---- prepared data ---------------------------------------------------------------------------


def _pair(*, sidecar: bool) -> Files:
    documents = [np.arange(size) + size for size in (3, 0, 5, 1, 7)]
    about = {"tokenizer": {"fingerprint": "t", "eod": 0}, "text_bytes": 40, "corpus": "toy"}
    with tempfile.TemporaryDirectory() as folder:
        write_indexed(Path(folder) / "x", documents, vocab_size=300, sidecar=about)
        found = read_folder(Path(folder))
    return {n: d for n, d in found.items() if sidecar or not n.endswith(".json")}


def _indexed(folder: Path) -> Any:
    data = IndexedDataset(folder / "x")
    tokens = [data.get(i).tolist() for i in range(len(data))]
    if data.sidecar is not None:
        data.verify()
    return tokens, data.fingerprint


def _inspected(folder: Path) -> Any:
    return inspecting.report(str(folder / "x"))


def _attacks_of_pairs() -> dict[str, Files]:
    base = _pair(sidecar=False)
    header = base["x.idx"][:18]
    found = {}
    for name, count in (("2-62", 1 << 62), ("2-40", 1 << 40), ("all-ones", (1 << 64) - 1)):
        counts = int(count).to_bytes(8, "little")
        found[f"sequences-{name}"] = {**base, "x.idx": header + counts + base["x.idx"][26:]}
        rest = base["x.idx"][34:]
        both = header + base["x.idx"][18:26] + counts + rest
        found[f"documents-{name}"] = {**base, "x.idx": both}
    found["sidecar-deep"] = {**base, "x.json": attacks.deep_json()}
    return found


def _prepared() -> Sequence[Files]:
    mark = {
        "options": {"tokenizer": "byte"},
        "options_sha256": "0" * 64,
        "inputs": [{"name": "a", "size": 1, "mtime_ns": 2, "sha256": "0" * 64}],
        "splits": {"train": dict.fromkeys(("documents", "tokens", "text_bytes"), 1)},
        "tokenizer": {"type": "byte", "fingerprint": "t", "vocab_size": 257},
    }
    mark["splits"]["train"]["fingerprint"] = "f"  # type: ignore[index]
    sums = f"{'0' * 64}  a.jsonl\n{'1' * 64} *b.jsonl\n".encode()
    return [{"prepared.json": json.dumps(mark).encode(), "SHA256SUMS": sums}]


def _marks(folder: Path) -> Any:
    listing = folder / "SHA256SUMS"
    files = [folder / "a.jsonl", folder / "b.jsonl"]
    found = sums_of.Sums.of([str(listing)], files, {}) if listing.exists() else None
    return finished.load(folder), found and dict(found.wanted)


# ---- tokenizers ------------------------------------------------------------------------------


def _tokenizers() -> Sequence[Files]:
    trained = train_bpe(TEXTS * 5, 280)
    byte = bytebpe.byte_tokenizer_json()
    return [{"tokenizer.json": trained.json_bytes}, {"tokenizer.json": byte}]


def _tokenized(folder: Path) -> Any:
    words = load_tokenizer(folder)
    return _used(words)


def _used(words: Tokenizer) -> Any:
    ids = [words.encode(text) for text in TEXTS[:3]]
    assert all(0 <= i < words.vocab_size for found in ids for i in found), "an id beyond the table"
    return words.fingerprint, ids, [words.decode(found) for found in ids]


def _pieces() -> Sequence[Files]:
    import io

    import sentencepiece

    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=stream,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=3,
    )
    return [{"tokenizer.model": stream.getvalue()}]


def _attacks_of_tokenizers() -> dict[str, Files]:
    sound = json.loads(bytebpe.byte_tokenizer_json())
    huge = {**sound, "model": {**sound["model"], "vocab": {"a": 1 << 62}}}
    slow = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "deep": {"tokenizer.json": attacks.deep_json()},
        "empty": {"tokenizer.json": b""},
        "huge-id": {"tokenizer.json": json.dumps(huge).encode()},
        "harmless-no-merges": {"tokenizer.json": json.dumps({**sound, "model": {"type": "BPE",
                          "vocab": {}, "merges": []}}).encode()},
        "harmless-slow-pattern": {"tokenizer.json": json.dumps(
            {**sound, "pre_tokenizer": slow}).encode()},
    }  # fmt: skip


DATA = (DataError,)
TARGETS = (
    Target(
        "text_plain",
        "text without checksums: .jsonl, .json, .tar, .txt",
        _plain,
        _texts,
        DATA,
    ),
    Target(
        "text_packed",
        "packed text: .jsonl.zst, .jsonl.gz, .json.zst, .json.gz, .dat.zst, .tar.gz, .tar.zst, "
        "lm_dataformat, tar of them",
        _packed,
        _texts,
        DATA,
        attacks=_attacks_of_archives,
        memory=5 << 29,  # a document may have a gibibyte
    ),
    # Arrow's library takes up to 2 GiB for a page before it looks whether that much is there.
    Target("text_columns", ".parquet, .arrow", _columns, _texts, DATA, memory=3 << 30, share=0.5),
    Target(
        "indexed_sealed",
        "`.bin`, `.idx` and sidecar: any damage must be noticed",
        lambda: [_pair(sidecar=True)],
        _indexed,
        DATA,
        sealed=True,
        stays=frozenset({"x.json"}),
    ),
    Target(
        "indexed",
        "`.bin` and `.idx` of others, and what `inspect` prints of them",
        lambda: [_pair(sidecar=False), _pair(sidecar=True)],
        _inspected,
        DATA,
        judge=fuzz_commands.controls,
        attacks=_attacks_of_pairs,
    ),
    Target("prepared", "`prepared.json`, `SHA256SUMS`", _prepared, _marks, DATA),
    Target(
        "tokenizer",
        "`tokenizer.json`",
        _tokenizers,
        _tokenized,
        DATA,
        attacks=_attacks_of_tokenizers,
        share=0.5,
    ),
    Target("pieces", "SentencePiece's `.model`", _pieces, _tokenized, DATA),
)
