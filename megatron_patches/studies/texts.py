"""The held-out text that a study would score now, and whether rows that are there were scored on it.

The hash of a configuration leaves out where a named data set lies and what it holds (local_code is the
standard library of whoever prepared it), so finished cells are recognised by their text besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.indexed import IndexedDataset
from data_prep.splits import NAMES, split_ranges
from megatron_patches.analysis.cuts import (
    PAPER_WINDOWS,
    fixed_cut,
    paper_cut,
    text_fingerprint,
)
from megatron_patches.analysis.retrieval_rows import RetrievalRow
from megatron_patches.analysis.rows import Row
from megatron_patches.analysis.run_folder import run_record
from megatron_patches.config import UNNAMED, Config, ConfigError
from megatron_patches.studies.questions import Eval
from megatron_patches.studies.run import Run
from megatron_patches.studies.schema import ROOT, shown

UNKNOWN = "unknown"  # the tokenizer of files without a sidecar


@dataclass(frozen=True)
class Text:
    """One split of prepared files: `files` are their fingerprints, `part` NeoX's `split` if it decides."""

    prefixes: tuple[str, ...]
    files: tuple[str, ...]
    tokenizer: str
    vocabulary: int | None  # entries, None where no sidecar says it
    tokens: int
    part: str

    def data(self, asked: Eval, protocol: str | None) -> str:
        """The `data` of a row under `protocol`; None: of retrieval, which reads the whole split."""
        if protocol is None:
            return text_fingerprint(self.files, self.part)
        if protocol == "paper":
            cut = paper_cut(self.part, asked.paper_windows or PAPER_WINDOWS)
            return text_fingerprint(self.files, cut)
        targets = min(self.tokens, asked.max_tokens or self.tokens) - 1
        longest = max((length for length in asked.lengths if length <= targets), default=0)
        cut = fixed_cut(self.part, protocol, asked.max_tokens, longest)
        return text_fingerprint(self.files, cut)


def data_prefixes(config: Config, splits: Sequence[str]) -> list[str]:
    found = [p for split in splits for p in getattr(config, f"{split}_data_paths") or ()]
    return found or ([config.data_path] if config.data_path else [])


def prepared(prefix: str) -> bool:
    return all((ROOT / f"{prefix}.{end}").is_file() for end in ("bin", "idx"))


def held_out(config: Config, split: str) -> Text | None:
    """The text of a split, None before it is prepared. DataError where the files are damaged."""
    prefixes = tuple(data_prefixes(config, [split]))
    if not prefixes or not all(map(prepared, prefixes)):
        return None
    datasets = [IndexedDataset(ROOT / prefix) for prefix in prefixes]
    part, tokens = "", sum(len(dataset.tokens) for dataset in datasets)
    if not getattr(config, f"{split}_data_paths"):
        part = f"{config.split}|{split}"
        start, stop = split_ranges(config.split, len(datasets[0]))[NAMES.index(split)]
        tokens = int(datasets[0].sizes[start:stop].sum())
    return Text(
        prefixes=prefixes,
        files=tuple(dataset.fingerprint for dataset in datasets),
        tokenizer=str(_of_tokenizer(datasets, "fingerprint") or UNKNOWN),
        vocabulary=_of_tokenizer(datasets, "vocab_size"),
        tokens=tokens,
        part=part,
    )


class Library:
    """The texts of many runs, each opened once."""

    def __init__(self) -> None:
        self.read: dict[tuple[str, ...], Text | None] = {}

    def text(self, config: Config, split: str) -> Text | None:
        key = (split, config.split, *data_prefixes(config, [split]))
        if key not in self.read:
            self.read[key] = held_out(config, split)
        return self.read[key]


def _of_tokenizer(datasets: Iterable[IndexedDataset], key: str) -> Any:
    """What the sidecars say; those that contradict each other are refused when they are scored."""
    found = [(dataset.sidecar or {}).get("tokenizer", {}).get(key) for dataset in datasets]
    return next((value for value in found if value is not None), None)


def check_texts(
    asked: Eval, runs: Iterable[Run], rows: Iterable[Row | RetrievalRow], place: str
) -> None:
    """ConfigError where `rows` were scored on another text than the `runs` would be now.

    `rows` answer questions of this study, and lie in `place`. Data sets that are not prepared here
    cannot be compared: their rows count as they are.
    """
    rows = list(rows)
    if not rows:
        return
    runs = list(runs)
    found = _texts(runs, sorted({row.split for row in rows}))
    # Their hash holds the paths, and rows of another path are those of other runs.
    unnamed = {run.sha for run in runs if not run.config.dataset}
    for row in rows:
        if row.dataset == UNNAMED and row.config_sha not in unnamed:
            continue
        protocol = getattr(row, "protocol", None)
        texts = found.get((row.dataset, row.split), ())
        if texts and not any(_same(row, text, text.data(asked, protocol)) for text in texts):
            text = texts[0]
            here = f"{' '.join(text.prefixes)} is {text.data(asked, protocol)}"
            raise ConfigError(
                f"{place}: {row.dataset}, {row.split} was scored there on text {row.data} of "
                f"tokenizer {row.tokenizer}, {here} of tokenizer {text.tokenizer}: rows of "
                "both must not meet. Keep this machine's rows apart (`--output DIR`, or `output` in "
                "the study), or restore that text"
            )


def check_trained(runs: Iterable[Run]) -> None:
    """ConfigError where a model of `runs`, all trained, has learned another text than is prepared now.

    Its scores would stand in one table with those of models of the new text. Where the text is not
    prepared here, or the run does not say what it read, there is nothing to compare.
    """
    library = Library()
    for run in runs:
        text, record = library.text(run.config, "train"), run.folder / "run.json"
        if text is None or not record.is_file():
            continue
        told = run_record(run.folder)
        now = {"data": text_fingerprint(text.files), "tokenizer": text.tokenizer}
        for key, value in now.items():
            if UNKNOWN not in (value, before := told.get(key, UNKNOWN)) and before != value:
                raise ConfigError(
                    f"{shown(record)}: {run.name} was trained on {key} {before}, but "
                    f"{' '.join(text.prefixes)} is {value} now: restore that text, or train anew "
                    f"(remove {shown(run.folder)}, or name another folder as `checkpoints` in the study)"
                )


def _texts(runs: Iterable[Run], splits: Sequence[str]) -> dict[tuple[str, str], list[Text]]:
    """By the data set that rows name; several where configurations share a name."""
    library = Library()
    found: dict[tuple[str, str], list[Text]] = {}
    for run in runs:
        for split in splits:
            text = library.text(run.config, split)
            there = found.setdefault((run.config.dataset_name, split), [])
            if text is not None and text not in there:
                there.append(text)
    return found


def _same(row: Row | RetrievalRow, text: Text, data: str) -> bool:
    known = UNKNOWN not in (row.tokenizer, text.tokenizer)
    return row.data == data and (row.tokenizer == text.tokenizer or not known)
