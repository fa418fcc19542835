"""Byte-level BPE: the byte alphabet, tokenizer.json from vocabulary and merges, proof for tiktoken.

A byte-level BPE spells each of the 256 bytes as one printable character (the scheme of GPT-2), so a
vocabulary string maps back to bytes. ``tiktoken`` encodes such a vocabulary about six times as fast
as ``tokenizers``, but it knows only the ids, not the merge list: `ranks` says whether the ids must
come out equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

EOD = "<|endoftext|>"
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def byte_characters() -> list[str]:
    """The 256 characters that stand for bytes 0..255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, extra = [], 0x100
    for byte in range(256):
        characters.append(chr(byte) if byte in printable else chr(extra))
        extra += byte not in printable
    return characters


# Limits of the proof in `ranks`, whose time grows with the square of a token's length. GPT-2's
# longest token has 128 bytes and its squares sum up to 2.5 million.
LONGEST_PROVEN = 256
_MOST_WORK = 50_000_000
# The longest word, in bytes, that a trainer sees whole (see tokenizing.train_bpe).
LONGEST_TRAINED = 256

_BYTE_OF = {ord(character): byte for byte, character in enumerate(byte_characters())}
# Characters below 256 that stand for no byte become one that Latin-1 refuses.
_TO_LATIN = dict.fromkeys(range(256), 256) | _BYTE_OF


def _spelled(token: str) -> bytes:
    """The bytes of a vocabulary string; UnicodeEncodeError for a character that is none of 256."""
    return token.translate(_TO_LATIN).encode("latin-1")


def tokenizer_json(vocab: Mapping[str, int], merges: Sequence[Sequence[str]]) -> bytes:
    """The bytes of a ``tokenizer.json`` as Hugging Face ``tokenizers`` reads it.

    Written here, not by the library, so that the bytes, and the fingerprint taken over them, do
    not change with the library's version. ``vocab`` includes ``<|endoftext|>``.
    """
    special = {"id": vocab[EOD], "content": EOD, "special": True, "normalized": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**special, **flags}],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])),
            "merges": [list(pair) for pair in merges],
        },
    }
    return (json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n").encode()


def byte_tokenizer_json() -> bytes:
    """Ids 0..255 are the bytes, 256 is the end of a document; no merges."""
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    return tokenizer_json({**vocab, EOD: 256}, [])


def ranks(content: Mapping[str, Any], proven: bool = False) -> dict[bytes, int] | None:
    """Byte strings with ids for tiktoken, or None where equal ids are not proven.

    ``content`` is a parsed ``tokenizer.json``. Required: plain byte-level BPE with GPT-2's split,
    only special added tokens, all 256 bytes, merges in the order of the ids they make, and for
    each token t = l + r: merging the bytes of t by id alone ends in exactly the pair (l, r). Two
    tokens that exactly cover t can only have come from merges inside t, in the order in which t
    alone would be merged; so tiktoken never sees a mergeable pair that the merge list lacks, and
    both libraries always pick the same one (lowest id, leftmost). ``proven``: this was found to
    hold before, so the second it takes for GPT-2's vocabulary is saved. A vocabulary with a token
    above ``LONGEST_PROVEN`` bytes, or with very many long ones, is not tried: None.
    """
    if not _is_plain(content):
        return None
    model = content["model"]
    special = {token["content"] for token in content.get("added_tokens") or []}
    try:
        table = {
            _spelled(token): number
            for token, number in model["vocab"].items()
            if token not in special
        }
        if proven:
            return table
        lengths = [len(token) for token in table]
        if max(lengths, default=0) > LONGEST_PROVEN or sum(n * n for n in lengths) > _MOST_WORK:
            return None
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        merges = [tuple(_spelled(part) for part in pair) for pair in pairs]
    except UnicodeEncodeError:
        return None
    single = {token for token in table if len(token) == 1}
    made = [left + right for left, right in merges]
    order = [table.get(token, -1) for token in made]
    if len(set(table.values())) != len(table):  # tiktoken panics
        return None
    if len(single) != 256 or order != sorted(set(order)) or set(made) != set(table) - single:
        return None
    if any(_last_pair(token, table) != pair for token, pair in zip(made, merges, strict=True)):
        return None
    return table


def spelled_bytes(content: Mapping[str, Any]) -> dict[int, int] | None:
    """Bytes of text behind each id of a parsed ``tokenizer.json``, 0 for special ones.

    None where the ids do not spell the text byte for byte: no byte-level BPE, or one whose text is
    normalised or given a blank before it is encoded.
    """
    model, split = content.get("model") or {}, content.get("pre_tokenizer") or {}
    affixes = ("continuing_subword_prefix", "end_of_word_suffix", "unk_token")
    exact = (
        model.get("type") == "BPE"
        and not any(model.get(option) for option in affixes)
        and content.get("normalizer") is None
        and split.get("type") == "ByteLevel"
        and not split.get("add_prefix_space", True)
    )
    if not exact:
        return None
    added = {token["id"]: token for token in content.get("added_tokens") or []}
    try:
        found = {
            number: len(_spelled(token))
            for token, number in model["vocab"].items()
            if number not in added
        }
    except UnicodeEncodeError:
        return None
    # Added tokens stand in the text as they are written.
    written = {
        number: 0 if token["special"] else len(token["content"].encode())
        for number, token in added.items()
    }
    return found | written


def _is_plain(content: Mapping[str, Any]) -> bool:
    model, split = content.get("model") or {}, content.get("pre_tokenizer") or {}
    post = (content.get("post_processor") or {"type": "ByteLevel"})["type"]
    options = (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "fuse_unk",
        "byte_fallback",
        "ignore_merges",
    )
    return (
        model.get("type") == "BPE"
        and not any(model.get(option) for option in options)
        and content.get("normalizer") is None
        and split.get("type") == "ByteLevel"
        and not split.get("add_prefix_space", True)
        and split.get("use_regex", True)
        and post in ("ByteLevel", "TemplateProcessing")
        and all(token["special"] for token in content.get("added_tokens", []))
    )


def _last_pair(token: bytes, table: Mapping[bytes, int]) -> tuple[bytes, ...] | None:
    """The two parts last merged when ``token`` alone is merged by lowest id; None if it sticks."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        found = [
            (table[parts[i] + parts[i + 1]], i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in table
        ]
        if not found:
            return None
        _, at = min(found)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return tuple(parts)
