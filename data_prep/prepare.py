"""From a corpus to train, valid and test: read, select, split, tokenize, write, publish.

Everything is built in a hidden folder inside the output and moved into place at the very end, the
index files late and ``prepared.json`` last, so a failed or killed run leaves nothing that looks
finished. Two runs into one folder exclude each other by a lock on that folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_prep import archive, corpora, finished
from data_prep.corpora import LocalCorpus, PublishedCorpus
from data_prep.corpora._base import Fetched
from data_prep.errors import DataError, UsageError
from data_prep.files import PARTIAL, locked, sha256_text
from data_prep.indexed import write_indexed
from data_prep.options import Options
from data_prep.pool import encode_all, worker_count
from data_prep.progress import Say, stage, to_stderr
from data_prep.reading import Document, Reading, expand, read
from data_prep.splits import NAMES, Selection, parse_split
from data_prep.tokenizing import EOD, Tokenizer, load_tokenizer, train_bpe


def prepare(
    corpus: str,
    output: str | Path,
    *,
    inputs: Iterable[str | Path] = (),
    workers: int | None = None,
    force: bool = False,
    say: Say = to_stderr,
    **given: Any,
) -> dict[str, Any]:
    """Prepare ``corpus`` (or ``jsonl``) in the folder ``output`` and return its prepared.json.

    ``given``: fields of `Options`. A folder already prepared with the same options and inputs is
    returned as it is; with others DataError, unless ``force``. ``workers`` changes speed alone.
    UsageError for a wrong request, DataError for unusable data; nothing is left behind then.
    """
    options = Options.of(corpus, given)
    files = _inputs(corpus, inputs)
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: at least 1")
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; --output names a folder")
    tokenizer = _tokenizer_before_reading(options)
    if tokenizer is not None:
        options = options.with_tokenizer(tokenizer.fingerprint)
    existed = output.exists()
    output.mkdir(parents=True, exist_ok=True)
    done = False
    with locked(output):
        try:
            finished.check_apart(output, files)
            if force and (output / "documents").is_dir():
                finished.check_own_archive(output / "documents")
            found = None if force else finished.check(output, options, files)
            if found is not None:
                say(f"{output} is already prepared with these options: nothing to do")
            else:
                found = _Preparation(options, files, output, workers, say).run(tokenizer)
            done = True
            return found
        finally:
            if not done and not existed:
                with suppress(OSError):  # not empty: someone else's file, keep it
                    output.rmdir()


def _inputs(corpus: str, inputs: Iterable[str | Path]) -> list[Path]:
    known = None if corpus == "jsonl" else corpora.get(corpus)
    files = expand(inputs)
    if isinstance(known, LocalCorpus) and files:
        raise UsageError(f"{corpus} makes its own text; use jsonl to prepare --input files")
    if isinstance(known, PublishedCorpus) and not files:
        raise UsageError(known.describe(corpus))
    if known is None and not files:
        raise UsageError("jsonl needs --input PATH ...")
    return files


def _tokenizer_before_reading(options: Options) -> Tokenizer | None:
    """Load it first: a wrong tokenizer must not cost an hour of reading. None: to be trained."""
    if options.tokenizer == "train":
        return None
    tokenizer = load_tokenizer(options.tokenizer)
    if options.append_eod and tokenizer.eod is None:
        raise UsageError(
            f"{tokenizer.origin} has no {EOD} to append; add it to the tokenizer, or use "
            "--no-append-eod"
        )
    return tokenizer


class _Preparation:
    def __init__(
        self, options: Options, files: list[Path], output: Path, workers: int | None, say: Say
    ) -> None:
        self.options, self.files, self.output = options, files, output
        self.workers, self.say = workers, say
        self.staging = output / f"{PARTIAL}{os.getpid()}-{secrets.token_hex(4)}"
        self.reading = Reading(options.text_key, options.on_bad_line)
        self.selection = Selection(
            parse_split(options.split),
            options.min_characters,
            options.max_document_bytes,
            options.keep_duplicates,
        )
        self.provenance: dict[str, Any] = {}

    def run(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        start = time.monotonic()
        for leftover in self.output.glob(f"{PARTIAL}*"):  # of killed runs: we hold the lock
            shutil.rmtree(leftover)
        self.staging.mkdir()
        try:
            counts = self._read()
            tokenizer = tokenizer or self._train(counts.bytes["train"])
            (self.staging / "tokenizer.json").write_bytes(tokenizer.json_bytes)
            splits = {
                name: self._tokenize(name, tokenizer, counts)
                for name, share in zip(NAMES, self.selection.shares, strict=True)
                if share
            }
            self._check_lengths(splits)
            if not self.options.keep_documents:
                shutil.rmtree(self.staging / "documents")
            prepared = {
                **self._about(tokenizer),
                "splits": splits,
                "inputs": finished.describe_inputs(self.files, self.reading.sources),
                "seconds": round(time.monotonic() - start, 1),
            }
            finished.publish(self.staging, self.output, prepared)
        finally:
            shutil.rmtree(self.staging, ignore_errors=True)
        return prepared

    def _read(self) -> archive.ArchiveWriter:
        fetched = self._fetch()
        total = sum(path.stat().st_size for path in self.files) or None
        spool = archive.ArchiveWriter(self.staging / "documents")
        with spool as writer, stage("reading", total, self.say) as advance:
            chosen = self.selection.apply(fetched.documents)
            if self.options.order == "hash":
                chosen = iter(sorted(chosen, key=lambda item: item[0]))
            text_bytes = 0
            for _, split, document in chosen:
                writer.add(split, document)
                text_bytes += len(document.text)
                advance(self.reading.input_bytes or text_bytes)
        self.provenance = fetched.provenance
        self._check_hashes()
        shutil.rmtree(self.staging / "scratch", ignore_errors=True)
        self._check_documents(writer)
        return writer

    def _fetch(self) -> Fetched:
        known = None if self.options.corpus == "jsonl" else corpora.get(self.options.corpus)
        if not isinstance(known, LocalCorpus):
            return Fetched(read(self.files, self.reading), {})
        assert self.options.source is not None
        self.say(f"{self.options.corpus}: source {self.options.source}")
        scratch = self.staging / "scratch"
        scratch.mkdir()
        fetched = known.sources[self.options.source](scratch.resolve())
        return Fetched(self._counted(fetched.documents), fetched.provenance)

    def _counted(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Local documents get the counts and hashes that `read` gives to files."""
        for document in documents:
            if document.text:
                self.reading.documents += 1
                self.reading.sources[document.origin] = sha256_text(document.text)
                yield document
            else:
                self.reading.empty += 1

    def _check_hashes(self) -> None:
        """A published file under its own name must be that file."""
        known = None if self.options.corpus == "jsonl" else corpora.get(self.options.corpus)
        if not isinstance(known, PublishedCorpus):
            return
        for path, sha256 in self.reading.sources.items():
            wanted = known.files.get(Path(path).name)
            if wanted and wanted != sha256:
                raise DataError(
                    f"{path}: sha256 {sha256[:12]} is not that of the published file "
                    f"({wanted[:12]}); get it anew, or rename it if it is another edition"
                )

    def _check_documents(self, writer: archive.ArchiveWriter) -> None:
        counts = f"read {self.reading.documents} documents ({self._dropped()})"
        if not sum(writer.documents.values()):
            raise DataError(f"no documents left: {counts}")
        for name, share in zip(NAMES, self.selection.shares, strict=True):
            if share and not writer.documents[name]:
                raise DataError(
                    f"split {name} is empty: {writer.documents} with --split {self.options.split}; "
                    f"{counts}; give it a larger share, or 0"
                )
        self.say(f"{counts}; kept {writer.documents}")

    def _dropped(self) -> str:
        first = f", first {self.reading.first_bad}" if self.reading.first_bad else ""
        return (
            f"{self.reading.empty} empty, {self.reading.bad} bad{first}, "
            f"{self.provenance.get('not_utf8', 0)} not UTF-8, "
            f"{self.selection.too_short} too short, {self.selection.duplicates} duplicates, "
            f"{self.selection.cut} cut by {self.selection.cut_bytes} bytes"
        )

    def _train(self, text_bytes: int) -> Tokenizer:
        assert self.options.vocab_size is not None
        with stage(f"training a BPE of {self.options.vocab_size}", text_bytes, self.say) as advance:
            texts = _told(archive.texts(self.staging / "documents", "train"), advance)
            return train_bpe(texts, self.options.vocab_size)

    def _tokenize(
        self, name: str, tokenizer: Tokenizer, counts: archive.ArchiveWriter
    ) -> dict[str, Any]:
        workers = worker_count(self.workers, counts.bytes[name])
        with stage(f"tokenizing {name} ({workers} workers)", counts.bytes[name], self.say) as tell:
            texts = _told(archive.texts(self.staging / "documents", name), tell)
            summary = write_indexed(
                self.staging / name,
                encode_all(tokenizer, texts, workers=workers, append_eod=self.options.append_eod),
                vocab_size=tokenizer.vocab_size,
                sidecar={**self._about(tokenizer), "split": name, "text_bytes": counts.bytes[name]},
            )
        if summary["documents"] != counts.documents[name]:
            raise DataError(f"{name}: {summary['documents']} of {counts.documents[name]} documents")
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
        names = sorted(f"{Path(path).name} {sha}" for path, sha in self.reading.sources.items())
        return {
            "corpus": self.options.corpus,
            "tokenizer": tokenizer.describe(),
            "sources": {
                "files": len(names),
                "sha256": sha256_text("\n".join(names)),
                # One by one only where a person would read them.
                "names": names if len(names) <= 20 else names[:3] + ["..."],
                **self.provenance,
            },
            "options": self.options.record(),
            "options_sha256": self.options.sha256(),
            "dropped": {
                "empty": self.reading.empty,
                "bad": self.reading.bad,
                "blank_lines": self.reading.blank_lines,
                "too_short": self.selection.too_short,
                "duplicates": self.selection.duplicates,
                "cut": self.selection.cut,
                "cut_bytes": self.selection.cut_bytes,
            },
        }


def _told(texts: Iterable[str], advance: Any) -> Iterator[str]:
    done = 0
    for text in texts:
        yield text
        done += len(text.encode())
        advance(done)
