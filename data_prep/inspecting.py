"""What is in a ``.bin/.idx`` pair, for a person to read."""

from __future__ import annotations

import unicodedata

import numpy as np

from data_prep.indexed import IndexedDataset
from data_prep.tokenizer import Tokenizer
from data_prep.tokenizing import load_tokenizer, tokenizer_beside

_SHOWN = 300


def report(prefix: str, *, tokenizer: str | None = None, documents: int = 2) -> str:
    """Counts, histogram of lengths, verification and the first ``documents`` decoded.

    Raises DataError for a damaged pair or one that its sidecar does not describe.
    """
    data = IndexedDataset(prefix)
    sizes_N = np.asarray(data.sizes)
    lines = [
        f"{prefix}: {len(data.document_index) - 1} documents in {len(data)} sequences, "
        f"{len(data.tokens)} tokens of {data.dtype.name}",
        f"fingerprint {data.fingerprint}",
        f"lengths     min {sizes_N.min()}, median {int(np.median(sizes_N))}, max {sizes_N.max()}; "
        f"{(len(data.tokens) - 1) // 16384} packed windows of 16384",
        *_histogram(sizes_N),
        *_verified(data),
    ]
    found = _tokenizer(data, tokenizer)
    if found is None:
        return _plain([*lines, "no tokenizer beside the data: give --tokenizer to decode"])
    wanted = (data.sidecar or {}).get("tokenizer", {}).get("fingerprint", found.fingerprint)
    if wanted != found.fingerprint:
        lines.append(f"WARNING: {found.origin} is {found.fingerprint}, not the tokenizer {wanted}")
    for i in range(min(documents, len(data))):
        text = _decoded(found, data.get(i, 0, min(int(sizes_N[i]), _SHOWN)))
        lines += [f"--- document {i}, {sizes_N[i]} tokens", text[:_SHOWN]]
    return _plain(lines)


def _decoded(tokenizer: Tokenizer, ids_T: np.ndarray) -> str:
    """The text of ids, or why there is none: the libraries leave foreign ids out, or raise."""
    foreign_T = ids_T[(ids_T < 0) | (ids_T >= tokenizer.vocab_size)]
    if foreign_T.size:
        return (
            f"not text of {tokenizer.origin}: it has {tokenizer.vocab_size} entries, and the id "
            f"{foreign_T[0]} is here; give the tokenizer of the data by --tokenizer"
        )
    return tokenizer.decode(ids_T)


def _plain(lines: list[str]) -> str:
    """Joined, control characters escaped: a document must not be able to drive the terminal."""
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs")
        else character.encode("unicode_escape").decode()
        for character in "\n".join(lines)
    )


def _histogram(sizes_N: np.ndarray) -> list[str]:
    """Documents and tokens by powers of two of the length."""
    bins_N = np.ceil(np.log2(np.maximum(sizes_N, 1))).astype(int)
    lines = [f"{'up to':>10} {'documents':>10} {'tokens':>12}"]
    for power in range(int(bins_N.min()), int(bins_N.max()) + 1):
        here_N = bins_N == power
        tokens = int(sizes_N[here_N].sum(dtype=np.int64))
        lines.append(f"{2**power:>10} {int(here_N.sum()):>10} {tokens:>12}")
    return lines


def _verified(data: IndexedDataset) -> list[str]:
    if data.sidecar is None:
        return ["no sidecar: written by another tool, nothing to verify against"]
    data.verify()
    tokenizer, sidecar = data.sidecar.get("tokenizer", {}), data.sidecar
    lines = ["verified    .bin and .idx are what the sidecar describes"]
    if tokenizer:
        lines.append(f"tokenizer   {tokenizer}")
        eod = tokenizer.get("eod")
        if eod is not None:
            ends = np.cumsum(data.sizes, dtype=np.int64)[np.asarray(data.sizes) > 0] - 1
            closed = int((data.tokens[ends] == eod).sum())
            lines.append(f"EOD {eod}       at the end of {closed} of {len(data)} documents")
    for key in ("corpus", "split", "text_bytes", "sources", "merged", "dropped"):
        if key in sidecar:
            lines.append(f"{key:<11} {sidecar[key]}")
    return lines


def _tokenizer(data: IndexedDataset, name: str | None) -> Tokenizer | None:
    if name is not None:
        return load_tokenizer(name)
    return tokenizer_beside(data.prefix)
