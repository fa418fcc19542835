"""What a preparation does, as one flat record that is hashed into the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Any

from data_prep import corpora
from data_prep.corpora import LocalCorpus, PublishedCorpus
from data_prep.errors import UsageError
from data_prep.reading import check_pile_set
from data_prep.splits import parse_split

PUBLISHED = "published"
_LATER = {"pile_set": None, "fix_text": False}  # options that early sidecars do not have


@dataclass(frozen=True)
class Options:
    """Everything that decides the output, the inputs themselves apart. Defaults are ``jsonl``'s.

    ``tokenizer``: gpt2, byte, train or a path. ``vocab_size``: for train alone. ``split``: shares
    of train, valid, test by hash of the text. ``order``: documents of a split in ``input`` order
    (flat memory) or by ``hash`` (whole text in memory). ``min_split_tokens``: a split below is an
    error. ``pile_set``: keep records of this component of The Pile alone. ``fix_text``: repair
    with ftfy first. ``split`` may be ``published`` where the corpus has fixed ones. ``identity``:
    not an option but what is known of the text and the tokenizer beforehand.
    """

    corpus: str
    source: str | None = None
    tokenizer: str = "gpt2"
    vocab_size: int | None = None
    append_eod: bool = True
    split: str = "88,10,2"
    text_key: str = "text"
    on_bad_line: str = "stop"
    min_characters: int = 1
    max_document_bytes: int | None = None
    keep_duplicates: bool = False
    pile_set: str | None = None
    fix_text: bool = False
    order: str = "input"
    min_split_tokens: int = 2
    keep_documents: bool = True
    identity: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, corpus: str, given: Mapping[str, Any]) -> Options:
        """Defaults of ``corpus`` overlaid with ``given`` (None means not given). UsageError."""
        unknown = sorted(set(given) - {f.name for f in fields(cls)} | {"identity"} & set(given))
        if unknown:
            raise UsageError(f"unknown option {unknown[0]!r} of a preparation")
        known = corpora.known(corpus)
        defaults: dict[str, Any] = {}
        if isinstance(known, LocalCorpus):
            defaults = {**known.options, "source": next(iter(known.sources))}
            defaults["identity"] = dict(known.identity)
        if isinstance(known, PublishedCorpus):
            defaults = dict(known.options)
        chosen = {name: value for name, value in given.items() if value is not None}
        if chosen.get("tokenizer", "train") != "train" and "vocab_size" not in chosen:
            defaults.pop("vocab_size", None)
        options = cls(corpus=corpus, **{**defaults, **chosen})
        if options.tokenizer == "train" and options.vocab_size is None:
            options = replace(options, vocab_size=1024)
        options._check(known)
        if options.fix_text:  # another version repairs otherwise
            identity = {**options.identity, "ftfy": ftfy_version()}
            options = replace(options, identity=identity)
        return options

    @property
    def published_splits(self) -> bool:
        """Whether the corpus itself says where a document belongs."""
        return self.split == PUBLISHED

    def shares(self) -> tuple[Fraction, Fraction, Fraction]:
        """Of train, valid and test; all equal where the corpus itself decides."""
        return parse_split("1,1,1" if self.published_splits else self.split)

    def _check(self, known: LocalCorpus | PublishedCorpus | None) -> None:
        fixed = isinstance(known, PublishedCorpus) and known.split_files
        if self.published_splits and not fixed:
            raise UsageError(f"--split {PUBLISHED}: {self.corpus} has no published splits")
        self.shares()
        check_pile_set(self.pile_set)
        if self.pile_set is not None and (
            isinstance(known, LocalCorpus) or (known is not None and known.read)
        ):
            raise UsageError(f"--pile-set is for files of The Pile; {self.corpus} is none of it")
        if self.vocab_size is not None and self.tokenizer != "train":
            raise UsageError(
                f"--vocab-size is for --tokenizer train; {self.tokenizer} has its own vocabulary"
            )
        if self.vocab_size is not None and not 257 <= self.vocab_size <= 2**31:
            raise UsageError(f"--vocab-size {self.vocab_size}: at least 257 (256 bytes and an EOD)")
        for name, allowed in (("on_bad_line", ("stop", "skip")), ("order", ("input", "hash"))):
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name} {getattr(self, name)!r}: one of {', '.join(allowed)}")
        if self.min_characters < 0 or self.min_split_tokens < 1:
            raise UsageError("min_characters must be >= 0, min_split_tokens >= 1")
        if self.max_document_bytes is not None and self.max_document_bytes < 4:
            raise UsageError("max_document_bytes must be >= 4")
        sources = known.sources if isinstance(known, LocalCorpus) else {}
        if self.source is not None and self.source not in sources:
            there = f"there are {', '.join(sources)}" if sources else "it has none to choose from"
            raise UsageError(f"no source {self.source!r} of {self.corpus}: {there}")

    def with_tokenizer(self, fingerprint: str) -> Options:
        """The same, knowing the tokenizer by its content: a path may change, or its file may."""
        name = Path(self.tokenizer).name
        return replace(self, tokenizer=name, identity={**self.identity, "tokenizer": fingerprint})

    def record(self) -> dict[str, Any]:
        """As plain JSON data. Later options appear only where used: older folders stay valid."""
        content = asdict(self)
        for name, default in _LATER.items():
            if content[name] == default:
                del content[name]
        return content

    def sha256(self) -> str:
        text = json.dumps(self.record(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def ftfy_version() -> str:
    try:
        return metadata.version("ftfy")
    except metadata.PackageNotFoundError as error:
        raise UsageError("--fix-text needs the package ftfy: pip install ftfy") from error
