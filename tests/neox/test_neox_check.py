"""`scripts/check_neox.py`: what of a checkout moved, its configuration keys included."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest
from neox_tools import ROOT, STUB

from megatron_patches.config.keys_own import Own
from megatron_patches.config.schema import Config
from megatron_patches.neox import SEAMS
from megatron_patches.neox.fields import OUR_DEFAULTS, differences, fields

SCRIPT = ROOT / "scripts" / "check_neox.py"
KEYS = "megatron/neox_arguments/deepspeed_args.py"


@pytest.fixture
def whole(copy):
    """The stub with all keys of a real checkout, as this suite knows them."""
    known = fields(copy)
    lines = []
    for key, info in Config.model_fields.items():
        if key not in known and key not in Own.model_fields:
            default = None if info.is_required() or info.default_factory else info.default
            lines.append(f"    {key}: object = {default!r}")
    file = copy / KEYS
    text = file.read_text(encoding="utf-8").rstrip()
    file.write_text("\n".join([text, *lines]) + "\n", encoding="utf-8")
    return copy


@pytest.fixture
def check(clean, capsys, monkeypatch):
    """check(...): exit code, output and errors of the script."""
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> tuple[int, list[str], str]:
        code = script["main"]([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


def change(home, file: str, old: str, new: str) -> None:
    path = home / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_checkout_that_fits(check, whole):
    code, lines, err = check("--home", whole)
    assert (code, err) == (0, "")
    count = len(fields(whole))
    assert lines == [
        f"{whole}: commit unknown (not tried with these patches)",
        f"fits: {len(SEAMS)} places, {count} configuration keys",
    ]


def test_all_places(check, whole, monkeypatch):
    monkeypatch.setenv("NEOX_HOME", str(whole))
    change(whole, "megatron/utils.py", "seq_length, device,", "length, device,")
    code, lines, _ = check("--all")
    assert code == 1
    shown = [line for line in lines if line.startswith("  ")]
    assert len(shown) == len(SEAMS)
    moved = [line for line in shown if not line.endswith(": ok")]
    assert len(moved) == 1 and "megatron/utils.py: get_attn_mask (" in moved[0]
    assert "moved: takes (length, device, sliding_window_width)" in moved[0]


def test_only_what_moved_is_printed(check, whole):
    change(whole, "megatron/utils.py", "def get_attn_mask", "def mask")
    code, lines, _ = check("--home", whole)
    assert code == 1 and len(lines) == 3
    assert re.fullmatch(r"  megatron/utils\.py: get_attn_mask \(.+\): moved: is gone", lines[1])
    assert lines[2] == f"1 of {len(SEAMS)} places moved, 0 configuration keys differ"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("    deepspeed: bool = True\n", "    deepspeed: bool = True\n    novel: int = 3\n",
         "novel: a key of GPT-NeoX that this suite does not know"),
        ("deepspeed: bool = True", "deepspeed: bool = False",
         "deepspeed: its default is False in GPT-NeoX, True here"),
        ("deepspeed: bool = True", "deepspeed: bool = 2 > 1",
         "deepspeed: its default is computed in GPT-NeoX, True here"),
        ("    deepspeed: bool = True\n", "",
         "deepspeed: GPT-NeoX has no such key any more"),
    ],
)  # fmt: skip
def test_keys_and_defaults(check, whole, old, new, expected):
    change(whole, KEYS, old, new)
    code, lines, _ = check("--home", whole)
    assert code == 1 and lines[1] == f"  {expected}"
    assert lines[2] == f"0 of {len(SEAMS)} places moved, 1 configuration keys differ"


def test_defaults_that_we_decide_otherwise_do_not_count(whole):
    key = sorted(OUR_DEFAULTS)[0]
    assert Config.model_fields[key].default != "theirs"
    change(whole, KEYS, f"    {key}: ", f"    {key}: str = 'theirs'  #")
    assert differences(whole) == []


def test_a_file_that_is_gone_or_not_python(whole):
    (whole / KEYS).write_text("def (:\n", encoding="utf-8")
    assert differences(whole) == [f"{whole / KEYS}: line 1 is not Python"]
    (whole / KEYS).unlink()
    assert differences(whole) == [f"{whole / KEYS}: the file is gone"]


def test_no_checkout(check, tmp_path):
    code, lines, err = check("--home", tmp_path)
    assert (code, lines) == (2, []) and err.startswith("error: ") and err.count("\n") == 1
    code, lines, err = check()
    assert (code, lines) == (2, []) and "NEOX_HOME is not set" in err


def test_it_runs_without_torch(tmp_path):
    code = (
        "import runpy, sys\n"
        "sys.modules['torch'] = sys.modules['deepspeed'] = None\n"
        f"sys.argv = ['check_neox.py', '--home', {str(STUB)!r}, '--all']\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    # The stub has few of the keys, so something is printed as moved: no place, many keys.
    assert done.returncode == 1, done.stderr
    assert done.stdout.count(": ok\n") == len(SEAMS) and "GPT-NeoX has no such key" in done.stdout
