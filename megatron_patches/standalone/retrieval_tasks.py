"""What the retrieval tasks ask: passkeys and copies at any length and depth. numpy, no model.

A text is ``filler | needle | filler | cue | answer``. The model reads all of it but the last token,
exactly `length` tokens, and its losses on the answer are scored. The control text has another needle
of equally many tokens in the same place, and the same cue and answer.

A question (needle, control, cue, answer, and the place in the held-out text where its filler ends)
depends on the text, the tokenizer and its number alone. So cells of different length or depth differ
in context alone, and every method and seed reads the same texts.

* ``passkey`` (after Mohtashami & Jaggi 2023, arXiv 2305.16300): the needle is a line
  ``passkey = 48213``, the cue its beginning up to the key. The control has another key.
* ``copy`` (after the repeated random tokens of Olsson et al. 2022, arXiv 2209.11895): the needle is a
  span of tokens, cue and answer repeat it. The control has another span. ``random`` spans are
  distinct entries of the vocabulary, drawn uniformly among those that occur in the held-out text;
  ``text`` spans come from the held-out text itself, the needle's half of it and the control's a
  quarter of it behind the place where the filler ends.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from data_prep.errors import DataError
from data_prep.tokenizer import Tokenizer

SEED = 2023
KEY_DIGITS = 5
SPAN, CUE = 24, 8  # tokens of a copied span, and how many of them are given again as the cue
# Keys that decide how the tokenizer spells most of them. Fixed, so more samples change no question.
SPELLING_KEYS = 256
MOST_KEYS = 1 << 17  # keys that are spelt in search of fitting ones: more than there are
GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples spread evenly over [0, 1) however many are taken
_BLOCK = 1 << 24  # tokens counted at a time


@dataclass(frozen=True)
class Question:
    """Token ids, int64: ``needle`` and ``control`` of one length, then ``cue`` and ``answer``.

    The filler ends at token ``end`` of the text, taken as a ring; ``room`` is the longest filler
    that does not reach the text's own copy of the answer.
    """

    needle: np.ndarray
    control: np.ndarray
    cue: np.ndarray
    answer: np.ndarray
    end: int
    room: int


@dataclass(frozen=True)
class Task:
    """The questions of one task over one text of ``tokens``, an integer array ``[T]``.

    ``answer_at`` is the offset of the answer inside the needle.
    """

    name: str
    source: str
    tokens: np.ndarray
    questions: tuple[Question, ...]
    answer_at: int

    @property
    def answer_tokens(self) -> int:
        return len(self.questions[0].answer)

    @property
    def parts(self) -> int:
        """Tokens of needle, cue and answer."""
        first = self.questions[0]
        return len(first.needle) + len(first.cue) + len(first.answer)

    @property
    def fingerprint(self) -> str:
        """16 hex digits over all questions: rows that differ in it asked something else."""
        digest = hashlib.sha256(f"{self.name} {self.source} {self.answer_at}".encode())
        for asked in self.questions:
            for ids in (asked.needle, asked.control, asked.cue, asked.answer):
                digest.update(f"|{' '.join(map(str, ids.tolist()))}".encode())
            digest.update(f"@{asked.end}".encode())
        return digest.hexdigest()[:16]

    def filler_tokens(self, length: int) -> int:
        """Filler of a window of ``length`` tokens; ValueError where there is no room for any."""
        # The model does not read the answer's last token, so the text has length + 1.
        filler = length + 1 - self.parts
        if filler < 1:
            raise ValueError(
                f"{self.name} ({self.source}) needs windows of at least {self.parts} tokens, "
                f"{length} were asked for"
            )
        return filler

    def distance(self, length: int, depth: float) -> int:
        """Tokens from an answer token back to its copy in the needle."""
        return length + 1 - self.answer_tokens - self._start(length, depth) - self.answer_at

    def _start(self, length: int, depth: float) -> int:
        if not 0 <= depth <= 1:
            raise ValueError(f"depth {depth} is outside [0, 1]")
        return math.floor(depth * self.filler_tokens(length) + 0.5)

    def texts(self, length: int, depth: float, *, control: bool = False) -> np.ndarray:
        """int64 ``[questions, length + 1]``; at depth 0 the needle comes first, at 1 right before the cue.

        Raises:
            ValueError: a window too short for the parts, or a depth outside [0, 1].
            DataError: a held-out text too short for the filler.
        """
        filler, start = self.filler_tokens(length), self._start(length, depth)
        found = np.empty((len(self.questions), length + 1), dtype=np.int64)
        for row, asked in zip(found, self.questions, strict=True):
            if filler > asked.room:
                raise DataError(
                    f"the held-out text of {len(self.tokens)} tokens has filler for at most "
                    f"{asked.room + self.parts - 1} tokens of {self.name} ({self.source}), not for "
                    f"{length}: prepare more held-out text or ask for shorter lengths"
                )
            around = ring(self.tokens, asked.end - filler, filler)
            needle = asked.control if control else asked.needle
            pieces = (around[:start], needle, around[start:], asked.cue, asked.answer)
            np.concatenate(pieces, out=row, casting="same_kind")
        return found


def ring(tokens: np.ndarray, start: int, count: int) -> np.ndarray:
    """``count`` tokens from ``start`` on, which may be negative, as int64; the end joins the beginning."""
    start %= len(tokens)
    first = tokens[start : start + count]
    rest = tokens[: count - len(first)]
    return np.concatenate([first, rest]).astype(np.int64)


def filler_end(tokens: int, number: int) -> int:
    """Where the filler of question ``number`` ends in a text of ``tokens``: spread evenly over it."""
    return int((number + 0.5) * GOLDEN % 1.0 * tokens)


def passkey_task(tokens: np.ndarray, tokenizer: Tokenizer, samples: int) -> Task:
    """``samples`` passkeys, spelt as the tokenizer spells most of them.

    All needles have the same number of tokens; the cue is what they begin with in common, and the
    answer ends where they end in common. Needle and control differ in every token of the answer,
    but for a token that all keys share between their digits.

    Raises DataError where the tokenizer gives keys nothing in common to begin with.
    """
    drawn = _keys()
    spelt = [_line(tokenizer, next(drawn)) for _ in range(SPELLING_KEYS)]
    counts = Counter(map(len, spelt))
    # The finest of equally common spellings.
    size = max(counts, key=lambda count: (counts[count], count))
    alike = np.array([ids for ids in spelt if len(ids) == size])
    same = (alike == alike[0]).all(axis=0)
    begin, tail = int(np.argmin(same)), int(np.argmin(same[::-1]))
    if not begin or same.all():
        raise DataError(f"{tokenizer.origin} spells all passkeys in unlike ways: no cue is left")
    answer = slice(begin, size - tail)

    def fits(ids: np.ndarray) -> bool:
        return len(ids) == size and bool((ids[same] == alike[0][same]).all())

    lines = (_line(tokenizer, key) for key in islice(_keys(), MOST_KEYS))
    fitting = (ids for ids in lines if fits(ids))
    questions = []
    for number in range(samples):
        needle = next(fitting, None)
        control = next((ids for ids in fitting if not (ids == needle)[~same].any()), None)
        if needle is None or control is None:
            raise DataError(
                f"{tokenizer.origin} spells too few passkeys so that they differ in every token"
            )
        end = filler_end(len(tokens), number)
        question = Question(needle, control, needle[:begin], needle[answer], end, len(tokens))
        questions.append(question)
    return Task("passkey", "digits", tokens, tuple(questions), begin)


def _keys() -> Iterator[int]:
    # RandomState's streams are frozen; those of numpy's newer generators may change.
    random = np.random.RandomState(SEED)
    while True:
        yield int(random.randint(10 ** (KEY_DIGITS - 1), 10**KEY_DIGITS))


def _line(tokenizer: Tokenizer, key: int) -> np.ndarray:
    return tokenizer.encode_array(f"\npasskey = {key}\n").astype(np.int64)


def copy_task(tokens: np.ndarray, eod: int | None, samples: int, source: str) -> Task:
    """``samples`` spans of SPAN tokens whose first CUE tokens are given again; ``source`` as above.

    ``eod`` ends documents and is part of no span. DataError where the text is too small.
    """
    make = SPANS[source](tokens, eod)
    questions = []
    for number in range(samples):
        end = filler_end(len(tokens), number)
        needle, control, room = make(number, end)
        questions.append(Question(needle, control, needle[:CUE], needle[CUE:], end, room))
    return Task("copy", source, tokens, tuple(questions), CUE)


Spans = Callable[[int, int], tuple[np.ndarray, np.ndarray, int]]


def _random_spans(tokens: np.ndarray, eod: int | None) -> Spans:
    entries = occurring(tokens)
    entries = entries[entries != eod] if eod is not None else entries
    if len(entries) < 2 * SPAN:
        raise DataError(
            f"copy (random) draws {2 * SPAN} distinct tokens, the held-out text has {len(entries)}"
        )

    def make(number: int, end: int) -> tuple[np.ndarray, np.ndarray, int]:
        random = np.random.RandomState([SEED, number])
        drawn = random.choice(entries, 2 * SPAN, replace=False)
        return drawn[:SPAN], drawn[SPAN:], len(tokens)

    return make


def _runs(span: np.ndarray) -> set[bytes]:
    """All CUE tokens in a row of a span, int64."""
    return {span[start : start + CUE].tobytes() for start in range(len(span) - CUE + 1)}


def _text_spans(tokens: np.ndarray, eod: int | None) -> Spans:
    total = len(tokens)

    def stretch(end: int, offsets: range, unlike: np.ndarray | None = None) -> int:
        """The first of `offsets` where SPAN tokens lie inside one document and hold nowhere as many
        tokens of the span `unlike` in a row as make a cue."""
        for found in offsets:
            span = ring(tokens, end + found, SPAN)
            if eod is not None and (span == eod).any():
                continue
            if unlike is None or not _runs(span) & _runs(unlike):
                return found
        what = "copy (text)" if unlike is None else "the control of copy (text)"
        raise DataError(
            f"the held-out text of {total} tokens has no stretch of {SPAN} tokens inside one "
            f"document for {what}"
        )

    def make(number: int, end: int) -> tuple[np.ndarray, np.ndarray, int]:
        asked = stretch(end, range(total // 2, total - SPAN))
        needle = ring(tokens, end + asked, SPAN)
        # Where long documents are rare, the next stretch may be the needle itself; and text repeats
        # (a licence in each file). A control that holds the answer would show no gain, whatever the model.
        other = stretch(end, range(total // 4, asked - SPAN + 1), needle)
        return needle, ring(tokens, end + other, SPAN), total - asked - SPAN

    return make


SPANS: dict[str, Callable[[np.ndarray, int | None], Spans]] = {
    "random": _random_spans,
    "text": _text_spans,
}


def occurring(tokens: np.ndarray) -> np.ndarray:
    """The ids that occur in ``tokens``, ascending, int64; a block at a time, for mapped files."""
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, len(tokens), _BLOCK):
        block = np.bincount(tokens[start : start + _BLOCK], minlength=len(counts))
        block[: len(counts)] += counts
        counts = block
    return np.flatnonzero(counts).astype(np.int64)


TASKS = ("passkey", "copy")


def make_tasks(
    names: Sequence[str], tokens: np.ndarray, tokenizer: Tokenizer, samples: int
) -> list[Task]:
    """The tasks of ``names`` (of TASKS): passkeys, and copies of either source."""
    tasks = []
    for name in dict.fromkeys(names):
        if name == "passkey":
            tasks.append(passkey_task(tokens, tokenizer, samples))
        elif name == "copy":
            tasks += [copy_task(tokens, tokenizer.eod, samples, source) for source in SPANS]
        else:
            raise ValueError(f"task {name!r} is none of {', '.join(TASKS)}")
    return tasks
