"""Kept seeds, known attacks and some 200 random inputs a target; and that the harness notices harm.

FUZZ_SEED chooses other random inputs; `scripts/fuzz.py --seconds` searches longer.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_campaign
import fuzz_child
import fuzz_commands
import pytest
from fuzz_target import Target

ROOT = Path(__file__).resolve().parents[2]
TARGETS = (
    *("checkpoint", "manifest", "moments", "release", "hugging_face", "text_plain", "text_packed"),
    *("text_columns", "indexed_sealed", "indexed", "prepared", "tokenizer", "pieces"),
    *("run_command", "run_yaml", "study_yaml", "released_yaml", "tables", "tables_latex"),
    *("tables_models", "report", "figures", "run_folder", "resume", "signs", "cut", "heat_maps"),
)
NEEDS = {"text_columns": "pyarrow", "pieces": "sentencepiece"}


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of the command over all targets: a process of its own, which forks."""
    output = tmp_path_factory.mktemp("fuzz") / "tried.jsonl"
    missing = [name for name, package in NEEDS.items() if not _there(package)]
    command = [sys.executable, "scripts/fuzz.py", "--cases", "200", "--shares", "--no-seeds"]
    command += ["--seed", os.environ.get("FUZZ_SEED", "1"), "--output", str(output)]
    for name in TARGETS:
        command += ["--target", name] if name not in missing else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return {**{row["target"]: row for row in rows}, "said": done.stderr}


def _there(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found(tried: dict[str, Any], name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    assert name in tried, tried["said"]
    row = tried[name]
    assert not row["bad"], tried["said"]
    assert row["cases"] == row["accepted"] + row["refused"] > 0
    assert row["refused"] > 0  # damage is noticed at all
    assert row["seeds"] == len(list((fuzz_campaign.SEEDS / name).glob("*/finding.json")))


def test_all_targets_are_tried() -> None:
    from fuzz_registry import targets

    assert set(targets()) == set(TARGETS)
    assert {path.name for path in fuzz_campaign.SEEDS.iterdir()} <= set(TARGETS)


# ---- what the harness notices ----------------------------------------------------------------


def _reader(folder: Path) -> bytes:
    return (folder / "a.txt").read_bytes()


def _sound_only(harm: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Reads the sound input, and does `harm` on any other."""

    def read(folder: Path) -> Any:
        found = _reader(folder)
        return found if found == b"sound" else harm(folder)

    return read


def _verdict(harm: Callable[[Path], Any], **changes: Any) -> fuzz_child.Verdict:
    sound = [{"a.txt": b"sound"}]
    target = Target("t", "a file", lambda: sound, _sound_only(harm), (ValueError,), **changes)
    return fuzz_campaign.replay(target, {"other": {"a.txt": b"other"}})["other"]


def _fails(error: BaseException) -> Callable[[Path], Any]:
    def harm(folder: Path) -> Any:
        raise error

    return harm


def _hidden(folder: Path) -> None:
    try:
        os.system("true")
    except BaseException:
        raise ValueError("a.txt: refused") from None


@pytest.mark.parametrize(
    ("harm", "key"),
    [
        (_fails(KeyError("x")), "KeyError"),
        (_fails(ValueError("something is wrong")), "a message that names no file"),
        (_fails(ValueError("a.txt: " + "x" * 30_000)), "a message without end"),
        (_fails(MemoryError()), "memory"),
        (lambda folder: bytearray(2 << 30), "memory"),
        (lambda folder: os.system("true"), "escape os.system"),
        (_hidden, "escape os.system"),
        (lambda folder: subprocess.run(["true"]), "escape subprocess.Popen"),
        (lambda folder: (folder.parent / "x").write_text(""), "escape open"),
        (lambda folder: (folder.parent / "outside" / "secret").read_text(), "escape open"),
        (lambda folder: (folder / "../new").mkdir(), "escape os.mkdir"),
        (lambda folder: exec(compile("1", str(folder / "m.py"), "exec")), "escape exec"),
        (lambda folder: ctypes.string_at(0), "process died (-11)"),
        (lambda folder: os._exit(0), "process died (0)"),
    ],
)
def test_harm_is_a_finding(harm: Callable[[Path], Any], key: str) -> None:
    verdict = _verdict(harm)
    assert verdict.kind == "finding"
    assert verdict.key.startswith(key)


def test_refusals_and_sound_readings_are_none() -> None:
    assert _verdict(_fails(ValueError("a.txt: damaged"))).kind == "refused"
    assert _verdict(_reader).kind == "accepted"
    assert _verdict(lambda folder: (folder / "new").write_text("")).kind == "accepted"


def test_wrong_content_of_a_sealed_file() -> None:
    assert _verdict(_reader, sealed=True).key == "wrong content"
    assert _verdict(lambda folder: b"sound", sealed=True).kind == "accepted"


def test_what_the_output_shows_is_judged() -> None:
    shown = _verdict(lambda folder: "<fuzzed onload=1>", judge=fuzz_commands.page)
    assert shown.key.startswith("judged: the page has <fuzzed>")
    assert _verdict(lambda folder: "&lt;fuzzed&gt;", judge=fuzz_commands.page).kind == "accepted"


def test_loops_and_hangs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop(folder: Path) -> None:
        while True:
            pass

    monkeypatch.setattr(fuzz_child, "SECONDS", 0.2)
    assert _verdict(loop).key.startswith("more than 0.2 s")
    monkeypatch.setattr(fuzz_campaign, "SILENT", 1.0)
    assert _verdict(lambda folder: time.sleep(600)).key == "hangs"


def test_a_finding_is_made_small_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read(folder: Path) -> bytes:
        found = _reader(folder)
        assert b"bad" not in found
        return found

    sound = [{"a.txt": b"sound", "b.txt": b"sound"}]
    target = Target("t", "files", lambda: sound, read, (ValueError,))
    monkeypatch.setattr(fuzz_campaign, "SEEDS", tmp_path)
    files = {"a.txt": b"x" * 500 + b"bad" + b"y" * 300, "b.txt": b"changed", "c.txt": b"more"}
    (verdict,) = fuzz_campaign.replay(target, {"found": files}).values()
    folder = fuzz_campaign.keep(target, verdict.key, files)
    (kept,) = fuzz_campaign.seeds("t").values()
    assert kept["b.txt"] == b"sound" and "c.txt" not in kept
    assert b"bad" in kept["a.txt"] and len(kept["a.txt"]) < 60
    assert json.loads((folder / fuzz_campaign.NOTE).read_text())["what"] == verdict.key


@pytest.mark.parametrize(
    ("judge", "bad", "good"),
    [
        (fuzz_commands.page, "<a href='javascript:x'>", "<a href='#javascript'>"),
        (fuzz_commands.page, "<p onfuzzed='x'>", "<p title='&quot; onfuzzed=x'>"),
        (fuzz_commands.markdown, "| <fuzzed> |", "| \\<fuzzed> |"),
        (fuzz_commands.markdown, "\x1b[31m", "red"),
        (fuzz_commands.latex, "\\input{fuzzed}", "\\textbackslash{}input\\{fuzzed\\}"),
        (fuzz_commands.drawings, ["<svg><fuzzed/></svg>"], ["<svg><g/></svg>"]),
        (fuzz_commands.drawings, ["<svg>\x1b</svg>"], ["<svg>x</svg>"]),
    ],
)
def test_judges(judge: Callable[[Any], str | None], bad: Any, good: Any) -> None:
    assert judge(bad) is not None
    assert judge(good) is None
