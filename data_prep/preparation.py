"""The stages of a preparation: read and spool, learn a tokenizer, tokenize, publish.

Everything is built in a hidden folder inside the output (see `work`) and moved into place at the
very end, so a failed or killed run leaves nothing that looks finished.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_prep import archive, corpora, finished
from data_prep.corpora import LocalCorpus, PublishedCorpus
from data_prep.corpora._base import Fetched
from data_prep.counts import dropped_of, in_words, sources_of
from data_prep.errors import DataError
from data_prep.files import sha256_text
from data_prep.options import Options
from data_prep.pool import WorkerDied, encode_all, worker_count
from data_prep.progress import Say, stage
from data_prep.reading import Document, Reading, read
from data_prep.splits import NAMES, Selection
from data_prep.sums import Sums, published_sums
from data_prep.tokenizer import TOKENIZER_FILES, Tokenizer
from data_prep.tokenizing import load_tokenizer, train_bpe
from data_prep.work import Spooled, Work
from data_prep.writing import write_in_shards


@dataclass
class Preparation:
    """One run into ``output``, whose lock the caller holds."""

    options: Options
    files: list[Path]
    output: Path
    workers: int | None
    sums: Sums
    say: Say
    force: bool = False
    opened: dict[Path, os.stat_result] = field(default_factory=dict, init=False)
    spooled: Spooled | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.work = Work(self.output)
        self.known = corpora.known(self.options.corpus)

    def run(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """``tokenizer`` None: learn one. Returns prepared.json; DataError for unusable data."""
        start = time.monotonic()
        # Outside of `try`: a wrong request must not cost what an interrupted run has done.
        self.spooled = self.work.open(self.options, self.files, self.sums, self.force, self.say)
        try:
            if self.spooled is None:
                self.spooled = self._read()
                # A local corpus is small, and its text may come from another package next time.
                if not isinstance(self.known, LocalCorpus):
                    self.work.keep_reading(self.options, self.spooled)
            tokenizer = self._tokenizer(tokenizer)
            splits = {name: self._tokenize(name, tokenizer) for name in self._wanted()}
            self._check_lengths(splits)
            if not self.options.keep_documents:
                # A continued run may find it gone already.
                shutil.rmtree(self.work.folder / "documents", ignore_errors=True)
            prepared = {
                **self._about(tokenizer),
                "splits": splits,
                "inputs": self.spooled.inputs,
                "seconds": round(time.monotonic() - start, 1),
            }
            finished.publish(self.work.folder, self.output, prepared)
        except (KeyboardInterrupt, OSError, WorkerDied):
            # Not the data's fault: what was done is worth keeping.
            if self.work.can_continue():
                self.say(f"kept in {self.work.folder}: the same command continues from there")
            else:
                self.work.remove()
            raise
        except BaseException:
            self.work.remove()
            raise
        self.work.remove()
        return prepared

    # ---- reading -------------------------------------------------------------------------------

    def _read(self) -> Spooled:
        options = self.options
        reading = Reading(options.text_key, options.on_bad_line)
        selection = Selection(
            options.shares(),
            options.min_characters,
            options.max_document_bytes,
            options.keep_duplicates,
            _repair() if options.fix_text else None,
        )
        if options.published_splits and isinstance(self.known, PublishedCorpus):
            selection.published = self.known.split_of
        fetched = self._fetch(reading)
        total = sum(path.stat().st_size for path in self.files) or None
        spool = archive.ArchiveWriter(self.work.folder / "documents")
        with spool as writer, stage("reading", total, self.say) as advance:
            chosen = selection.apply(fetched.documents)
            if options.order == "hash":
                chosen = iter(sorted(chosen, key=lambda item: item[0]))
            text_bytes = 0
            for _, split, document in chosen:
                writer.add(split, document)
                text_bytes += len(document.text)
                advance(reading.input_bytes or text_bytes)
        shutil.rmtree(self.work.folder / "scratch", ignore_errors=True)
        spooled = Spooled(
            documents=dict(writer.documents),
            bytes=dict(writer.bytes),
            sources=sources_of(reading, fetched.provenance),
            dropped=dropped_of(reading, selection, fetched.provenance),
            inputs=finished.describe_inputs(self.files, reading.sources, self.opened),
        )
        self._check_documents(spooled, reading)
        return spooled

    def _fetch(self, reading: Reading) -> Fetched:
        known = self.known
        if not isinstance(known, LocalCorpus):
            return Fetched(self._from_files(reading), {})
        assert self.options.source is not None
        self.say(f"{self.options.corpus}: source {self.options.source}")
        scratch = self.work.folder / "scratch"
        scratch.mkdir()
        fetched = known.sources[self.options.source](scratch.resolve())
        return Fetched(_counted(fetched.documents, reading), fetched.provenance)

    def _from_files(self, reading: Reading) -> Iterator[Document]:
        """File by file: a wrong hash is found at the end of its file, not of the last one."""
        known = self.known
        own = known.read if isinstance(known, PublishedCorpus) else None
        for path in self.files:
            self.opened[path] = path.stat()
            if own:
                yield from own([path], reading)
            else:
                yield from read([path], reading, pile_set=self.options.pile_set)
            finished.check_unchanged(path, self.opened[path])
            self.sums.check(reading.sources)

    def _check_documents(self, spooled: Spooled, reading: Reading) -> None:
        counts = f"read {reading.documents} documents ({in_words(spooled.dropped, reading)})"
        if not sum(spooled.documents.values()):
            raise DataError(f"no documents left: {counts}")
        for name in self._wanted():
            if not spooled.documents[name]:
                raise DataError(
                    f"split {name} is empty: {spooled.documents} with --split "
                    f"{self.options.split}; {counts}; give it a larger share, or 0"
                )
        self.say(f"{counts}; kept {spooled.documents}")

    def _wanted(self) -> list[str]:
        if self.options.published_splits and isinstance(self.known, PublishedCorpus):
            given = {self.known.split_files.get(path.name) for path in self.files}
            return [name for name in NAMES if name in given]
        return [n for n, share in zip(NAMES, self.options.shares(), strict=True) if share]

    # ---- tokenizing ----------------------------------------------------------------------------

    def _tokenizer(self, tokenizer: Tokenizer | None) -> Tokenizer:
        assert self.spooled is not None
        kept = next((p for n in TOKENIZER_FILES if (p := self.work.folder / n).is_file()), None)
        if tokenizer is None and kept is not None:
            return load_tokenizer(kept)
        if tokenizer is None:
            size = self.options.vocab_size
            assert size is not None
            learnt_from = self.spooled.bytes["train"]
            with stage(f"training a BPE of {size}", learnt_from, self.say) as advance:
                texts = archive.texts(self.work.folder / "documents", "train")
                tokenizer = train_bpe(_told(texts, advance), size)
        tokenizer.save(self.work.folder)
        return tokenizer

    def _tokenize(self, name: str, tokenizer: Tokenizer) -> dict[str, Any]:
        assert self.spooled is not None
        size, documents = self.spooled.bytes[name], self.spooled.documents[name]
        workers = worker_count(self.workers, size)
        summary = self.work.done(name)
        if summary is None:
            with stage(f"tokenizing {name} ({workers} workers)", size, self.say) as tell:

                def ids_from(first: int) -> Iterator[Any]:
                    texts = _told(archive.texts(self.work.folder / "documents", name), tell, first)
                    eod = self.options.append_eod
                    return encode_all(tokenizer, texts, workers=workers, append_eod=eod)

                summary = write_in_shards(
                    self.work.folder / name,
                    ids_from,
                    vocab_size=tokenizer.vocab_size,
                    sidecar={**self._about(tokenizer), "split": name, "text_bytes": size},
                    say=self.say,
                )
        if summary["documents"] != documents:
            raise DataError(f"{name}: {summary['documents']} of {documents} documents")
        keys = ("documents", "tokens", "text_bytes", "dtype", "fingerprint")
        return {key: summary[key] for key in keys}

    def _check_lengths(self, splits: dict[str, Any]) -> None:
        least = self.options.min_split_tokens
        short = {name: split["tokens"] for name, split in splits.items() if split["tokens"] < least}
        if short:
            raise DataError(
                f"too short: {short} tokens, at least {least} are wanted in each split; use more "
                "text, another --split, or a smaller --min-split-tokens"
            )

    def _about(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """What the sidecars and prepared.json have in common."""
        assert self.spooled is not None
        return {
            "corpus": self.options.corpus,
            "tokenizer": tokenizer.describe(),
            "sources": self.spooled.sources,
            "options": self.options.record(),
            "options_sha256": self.options.sha256(),
            "dropped": self.spooled.dropped,
        }


def make_sums(given: list[str] | None, corpus: str, files: list[Path]) -> Sums:
    """Expected hashes: those asked for, and those of published files under their own names."""
    known = corpora.known(corpus)
    published = known.files if isinstance(known, PublishedCorpus) else {}
    return Sums.of(given or [], files, published_sums(published, files))


def _counted(documents: Iterable[Document], reading: Reading) -> Iterator[Document]:
    """Local documents get the counts and hashes that `read` gives to files."""
    for document in documents:
        if document.text:
            reading.documents += 1
            reading.sources[document.origin] = sha256_text(document.text)
            yield document
        else:
            reading.empty += 1


def _repair() -> Any:
    from ftfy import fix_text

    return fix_text


def _told(texts: Iterable[str], advance: Callable[[int], None], skip: int = 0) -> Iterator[str]:
    """``texts`` without the first ``skip``; ``advance`` hears the bytes, skipped ones at once."""
    done = 0
    for number, text in enumerate(texts):
        if number == skip:
            advance(done)
        if number >= skip:
            yield text
        done += len(text.encode())
        if number >= skip:
            advance(done)
