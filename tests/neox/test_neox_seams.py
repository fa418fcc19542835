"""Every place that the patches need is looked at before anything is replaced."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from neox_tools import STUB, changed, neox_modules, state

from megatron_patches.config import ConfigError
from megatron_patches.neox import KNOWN_COMMITS, SEAMS, MovedSeam, install
from megatron_patches.neox.seams import Seam, compare, moved

GONE = "moved_elsewhere"
NAMED = {seam.place: seam for seam in SEAMS}
WITH_PARAMETERS = [place for place, seam in NAMED.items() if seam.parameters]
PIECES = [(place, piece) for place, seam in NAMED.items() for piece in seam.contains]


def find(tree: ast.Module, name: str) -> tuple[list[ast.stmt], int]:
    """The block that holds the statement called `name`, and its index there."""
    body: list[ast.stmt] = tree.body
    *outer, last = name.split(".")
    for part in outer:
        body = next(n.body for n in body if isinstance(n, ast.ClassDef) and n.name == part)
    for index, node in enumerate(body):
        names = [getattr(node, "name", None), getattr(getattr(node, "target", None), "id", None)]
        names += [getattr(target, "id", None) for target in getattr(node, "targets", [])]
        if last in names:
            return body, index
    raise AssertionError(f"the stub has no {name}")


def edit(home: Path, seam: Seam, old: str, new: str) -> None:
    """Replace `old` by `new` in the source of the seam, and nowhere else in its file."""
    file = home / seam.module
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body, index = find(tree, seam.name)
    text = ast.unparse(body[index])
    assert old in text
    body[index] = ast.parse(text.replace(old, new)).body[0]
    file.write_text(ast.unparse(tree), encoding="utf-8")


def only_line(home: Path) -> str:
    lines = moved(home)
    assert len(lines) == 1, lines
    return lines[0]


def test_the_stub_fits():
    assert moved(STUB) == []
    assert len(NAMED) == len(SEAMS)
    assert [(seam, None) for seam in SEAMS] == list(compare(STUB))


@pytest.mark.parametrize("place", NAMED)
def test_a_renamed_place_stops_the_installation(clean, copy, place):
    seam = NAMED[place]
    file = copy / seam.module
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body, index = find(tree, seam.name)
    node = body[index]
    if isinstance(node, ast.FunctionDef):
        node.name = GONE
    else:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        target.id = GONE
    file.write_text(ast.unparse(tree), encoding="utf-8")
    before = state()
    with pytest.raises(MovedSeam) as caught:
        install(home=copy)
    message = str(caught.value)
    assert f"{seam.place} ({seam.why}): is gone" in message
    assert all(commit[:8] in message for commit in KNOWN_COMMITS)
    assert str(copy) in message
    assert changed(before, state()) == [] and not neox_modules()


@pytest.mark.parametrize("place", WITH_PARAMETERS)
def test_another_parameter_is_reported(copy, place):
    seam = NAMED[place]
    file = copy / seam.module
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body, index = find(tree, seam.name)
    node = body[index]
    last = next(a for a in node.args.args if a.arg == seam.parameters[-1])
    last.arg = GONE
    file.write_text(ast.unparse(tree), encoding="utf-8")
    line = only_line(copy)
    assert line.startswith(f"{seam.place} ({seam.why}): takes (")
    assert GONE in line and f"expected ({', '.join(seam.parameters)}, ...)" in line


@pytest.mark.parametrize(("place", "piece"), PIECES)
def test_a_missing_piece_is_reported(copy, place, piece):
    seam = NAMED[place]
    words = [*re.finditer(r"\w+", piece)]
    without = piece[: words[-1].start()] + "moved" + piece[words[-1].end() :]
    edit(copy, seam, piece, without)
    head = f"{seam.place} ({seam.why}): no longer contains `"
    line = only_line(copy)
    assert line.startswith(head) and line.removeprefix(head).rstrip("`") in seam.contains


def test_a_function_that_became_something_else(copy):
    file = copy / "megatron/utils.py"
    text = file.read_text(encoding="utf-8").replace("def get_attn_mask(", "def original(")
    file.write_text(text + "\nget_attn_mask = original\n", encoding="utf-8")
    assert "is no longer a function" in only_line(copy)


def test_a_missing_file_and_one_that_is_not_python(copy):
    (copy / "megatron/logging.py").unlink()
    (copy / "megatron/utils.py").write_text("x = 1\ndef (:\n", encoding="utf-8")
    lines = moved(copy)
    gone = [line for line in lines if line.endswith("the file is gone")]
    broken = [line for line in lines if line.endswith("line 2 is not Python")]
    assert len(gone) == sum(s.module == "megatron/logging.py" for s in SEAMS)
    assert len(broken) == sum(s.module == "megatron/utils.py" for s in SEAMS)
    assert len(lines) == len(gone) + len(broken)


def test_all_moved_places_are_named_at_once(clean, copy):
    (copy / "megatron/data/data_utils.py").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        install(home=copy)
    places = [s.place for s in SEAMS if s.module == "megatron/data/data_utils.py"]
    assert len(places) > 3 and all(place in str(caught.value) for place in places)
    assert str(copy) not in sys.path
