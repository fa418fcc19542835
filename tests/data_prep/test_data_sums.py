"""Files of sums: a name belongs to the path that ends in it."""

import pytest

from data_prep.errors import UsageError
from data_prep.sums import Sums


def wanted(tmp_path, lines, files):
    listing = tmp_path / "sums"
    listing.write_text("".join(f"{digit * 64}  {name}\n" for digit, name in lines))
    found = Sums.of([str(listing)], [tmp_path / file for file in files], {}).wanted
    return [found[str(tmp_path / file)][0][0] for file in files]


@pytest.mark.parametrize(
    "lines, files, digits",
    [
        # `sha256sum */00.jsonl` in the folder above.
        ([("a", "x/00.jsonl"), ("b", "y/00.jsonl")], ["y/00.jsonl", "x/00.jsonl"], "ba"),
        ([("a", "./x/0.jsonl"), ("b", "../y/0.jsonl")], ["y/0.jsonl", "x/0.jsonl"], "ba"),
        # Made elsewhere: what the ends share decides, then the name alone.
        ([("a", "/p/x/0.jsonl"), ("b", "/p/y/0.jsonl")], ["y/0.jsonl", "x/0.jsonl"], "ba"),
        ([("a", "else/0.jsonl")], ["x/0.jsonl"], "a"),
        # The whole of a name goes before a longer one that is of another place.
        ([("a", "q/x/0.jsonl"), ("b", "x/0.jsonl")], ["x/0.jsonl"], "b"),
        ([("a", "0.jsonl"), ("b", "x/0.jsonl")], ["x/0.jsonl", "0.jsonl"], "ba"),
        ([("a", "u/0.jsonl"), ("a", "v/0.jsonl")], ["x/0.jsonl"], "a"),
    ],
)
def test_names_are_matched_by_the_end_of_the_path(tmp_path, lines, files, digits):
    assert wanted(tmp_path, lines, files) == list(digits)


def test_what_could_be_either_is_refused(tmp_path):
    with pytest.raises(UsageError, match="sums:2: a second, other sum of 0.jsonl, after line 1"):
        wanted(tmp_path, [("a", "u/0.jsonl"), ("b", "v/0.jsonl")], ["x/0.jsonl"])
