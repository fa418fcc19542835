"""Which document goes where."""

import pytest

from data_prep.errors import DataError, UsageError
from data_prep.reading import Document
from data_prep.splits import Selection, digest_of, parse_split, split_of, split_ranges


def documents(texts):
    return [Document(text, str(i)) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    "split, borders", [("949,50,1", [0, 10, 11, 11]), ("80,10,10", [0, 9, 10, 11])]
)
def test_split_ranges_equal_neox(split, borders):
    """What GPT-NeoX (commit ea7aefd8) itself gave for 11 documents."""
    assert split_ranges(split, 11) == list(zip(borders, borders[1:], strict=False))


@pytest.mark.parametrize(
    "split, documents_, wanted",
    [
        ("969,30,1", 143, [(0, 139), (139, 143), (143, 143)]),
        ("949,50,1", 18, [(0, 17), (17, 18), (18, 18)]),
        ("1", 5, [(0, 5), (5, 5), (5, 5)]),
        ("90/10", 10, [(0, 9), (9, 10), (10, 10)]),
        ("1,1,1", 2, [(0, 0), (0, 1), (1, 2)]),
        ("50,25,25,99", 4, [(0, 2), (2, 3), (3, 4)]),
    ],
)
def test_split_ranges_by_hand(split, documents_, wanted):
    assert split_ranges(split, documents_) == wanted


@pytest.mark.parametrize("split, count", [("a", 3), ("", 3), ("0,0", 3), ("-1,2", 3), ("0,1,1", 3)])
def test_split_ranges_refuses(split, count):
    with pytest.raises(UsageError):
        split_ranges(split, count)


def test_split_ranges_of_nothing():
    with pytest.raises(DataError, match="no documents"):
        split_ranges("1", 0)


@pytest.mark.parametrize("text", ["", "a", "1,2,3,4", "-1,2", "0,1", "1/0"])
def test_wrong_shares_are_refused(text):
    with pytest.raises(UsageError):
        parse_split(text)


def test_splits_depend_on_the_text_alone_and_have_their_shares():
    shares = parse_split("80,15,5")
    texts = [f"text {i}" for i in range(4000)]
    where = {text: split_of(digest_of(text), shares) for text in texts}
    counts = {name: list(where.values()).count(name) for name in ("train", "valid", "test")}
    assert abs(counts["train"] - 3200) < 100 and abs(counts["valid"] - 600) < 80
    chosen = Selection(shares).apply(documents(reversed(texts)))
    assert {document.text: split for _, split, document in chosen} == where
    assert split_of(b"\xff" * 32, parse_split("1")) == "train"


def test_duplicates_are_dropped_and_counted():
    selection = Selection(parse_split("1"))
    kept = [d.origin for _, _, d in selection.apply(documents(["a", "b", "a", "a", "a "]))]
    assert kept == ["0", "1", "4"] and selection.duplicates == 2
    selection = Selection(parse_split("1"), keep_duplicates=True)
    assert len(list(selection.apply(documents(["a", "a"])))) == 2 and not selection.duplicates


def test_short_documents_are_dropped_and_long_ones_cut_at_a_line():
    selection = Selection(parse_split("1"), min_characters=2, max_bytes=10)
    found = [
        d.text
        for _, _, d in selection.apply(
            documents(["a", "ab", "0123456789", "01234\n6789x", "ąąąąąą", "x\n" + "é" * 40])
        )
    ]
    assert found == ["ab", "0123456789", "01234\n", "ąąąąą", "x\n"]
    assert selection.too_short == 1 and selection.cut == 3
    assert selection.cut_bytes == 5 + 2 + 80


def test_texts_that_a_cut_makes_equal_are_one_and_in_one_split():
    """Otherwise the same words would be trained on and held out."""
    texts = [f"{'same ' * 3}{number}" for number in range(40)]
    selection = Selection(parse_split("50,50"), max_bytes=15)
    found = list(selection.apply(documents(texts)))
    assert [d.text for _, _, d in found] == ["same same same "]
    assert (selection.duplicates, selection.cut) == (39, 1)
    kept = Selection(parse_split("50,50"), max_bytes=15, keep_duplicates=True)
    assert len({split for _, split, _ in kept.apply(documents(texts))}) == 1
    assert kept.cut == 40
    # What is left of a text decides whether it is too short.
    short = Selection(parse_split("1"), min_characters=3, max_bytes=4)
    assert not list(short.apply(documents(["a\nbcdefgh"]))) and short.too_short == 1


def test_a_cut_never_breaks_a_character():
    selection = Selection(parse_split("1"), max_bytes=9)
    found = [d.text for _, _, d in selection.apply(documents(["ąąąąąą", "日本語の文"]))]
    assert found == ["ąąąą", "日本語"]
