"""From a corpus to train, valid and test: the request, checked before anything is read.

Two runs into one folder exclude each other by a lock on that folder; what happens under it is in
`preparation`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_prep import corpora, finished
from data_prep.bytebpe import EOD
from data_prep.corpora import LocalCorpus, PublishedCorpus
from data_prep.errors import UsageError
from data_prep.files import clear_leftovers, locked
from data_prep.options import Options
from data_prep.preparation import Preparation, make_sums
from data_prep.progress import Say, to_stderr
from data_prep.reading import expand
from data_prep.tokenizer import Tokenizer
from data_prep.tokenizing import load_tokenizer
from data_prep.work import Work


def prepare(
    corpus: str,
    output: str | Path,
    *,
    inputs: Iterable[str | Path] = (),
    sha256: list[str] | None = None,
    workers: int | None = None,
    force: bool = False,
    say: Say = to_stderr,
    **given: Any,
) -> dict[str, Any]:
    """Prepare ``corpus`` (or ``jsonl``) in the folder ``output`` and return its prepared.json.

    ``given``: fields of `Options`. A folder already prepared with the same options and inputs is
    returned as it is; with others DataError, unless ``force``. ``workers`` changes speed alone.
    ``sha256``: what the inputs must have (see `Sums`). An interrupted run is continued.
    UsageError for a wrong request, DataError for unusable data; nothing is left behind then.
    """
    options = Options.of(corpus, given)
    files = _inputs(corpus, inputs)
    sums = make_sums(sha256, corpus, files)
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: at least 1")
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; --output names a folder")
    tokenizer = _tokenizer_before_reading(options)
    if tokenizer is not None:
        options = options.with_tokenizer(tokenizer.fingerprint)
    with locked(output):
        finished.check_apart(output, files)
        clear_leftovers(*finished.outputs(output))
        _complete(output, say)
        if force:
            finished.check_replaceable(output)
        found = None if force else finished.check(output, options, files)
        if found is None:
            return Preparation(options, files, output, workers, sums, say, force).run(tokenizer)
        inputs_now = zip(files, found["inputs"], strict=True)
        sums.check({str(path): entry["sha256"] for path, entry in inputs_now})
        say(f"{output} is already prepared with these options: nothing to do")
        return found


def _complete(output: Path, say: Say) -> None:
    """End a preparation that was killed while it moved its files into place."""
    work = Work(output)
    if finished.complete(work.folder, output):
        work.remove()
        say(f"{output}: put the last files of a finished preparation in place")


def _inputs(corpus: str, inputs: Iterable[str | Path]) -> list[Path]:
    known = corpora.known(corpus)
    own = isinstance(known, PublishedCorpus) and known.expand
    files = own(inputs) if own else expand(inputs)
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
