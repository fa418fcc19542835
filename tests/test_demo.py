"""Which rows a demonstration shows: its own, whatever an earlier one left in the runs' folders."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megatron_patches.analysis.rows import Row

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "demo.py"
VALID = SimpleNamespace(fingerprint="file", tokens=range(5000))


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def asked(demo, lengths, tokens=2049, methods=("alibi", "rotary")):
    return demo.Demo(methods, 10, 1, lengths, tokens, Path("out"), 1)


def cell(method: str, length: int, cut: str) -> Row:
    data = hashlib.sha256(f"file {cut}".encode()).hexdigest()[:16]
    return Row(
        method=method, dataset="local_code", seed=1, train_length=512, eval_length=length,
        protocol="nonoverlap", split="valid", stride=length, last_k=None, loss=2.0,
        perplexity=math.exp(2.0), bits_per_byte=None, tokens=2048 // length * length,
        windows=2048 // length, tokenizer="t", data=data, config_sha="c", git_sha="g",
        engine="standalone", attention="chunked", dtype="float32", step=10, parameters=9,
        seconds=1.0, window_losses=[2.0] * (2048 // length),
    )  # fmt: skip


def rows(cut: str, *lengths: int) -> list[Row]:
    return [cell(method, length, cut) for method in ("alibi", "rotary") for length in lengths]


def test_it_writes_where_git_looks_away_by_default(demo):
    """The rows under results/demo are what the README shows: only who asks for it replaces them."""
    output = demo.make_parser().parse_args([]).output
    ignored = ["git", "check-ignore", "-q", str(output / "rows.jsonl")]
    assert subprocess.run(ignored, cwd=SCRIPT.parent).returncode == 0


def test_rows_of_other_lengths_or_tokens_do_not_stand_in(demo):
    first = rows("|first 2049|aligned to 2048", 512, 1024, 2048)
    shorter = rows("|first 2049|aligned to 1024", 512, 1024)
    less = rows("|first 1025|aligned to 1024", 512, 1024)
    # The files grow at their ends, so what was asked for first stands above.
    everything = [*first, *shorter, *less]
    assert demo.chosen(asked(demo, (512, 1024, 2048)), everything, VALID) == first
    assert demo.chosen(asked(demo, (512, 1024)), everything, VALID) == shorter
    assert demo.chosen(asked(demo, (512, 1024), 1025), everything, VALID) == less


def test_a_length_that_was_not_scored_is_no_success(demo):
    found = rows("|first 2049|aligned to 2048", 512, 2048)
    with pytest.raises(RuntimeError, match="no rows of alibi at 1024, rotary at 1024: .*--fresh"):
        demo.chosen(asked(demo, (512, 1024, 2048)), found, VALID)


def test_a_split_shorter_than_a_length_is_aligned_to_the_longest_that_fits(demo):
    found = rows("|first 9000|aligned to 2048", 512, 2048)
    wide = asked(demo, (512, 2048, 8192), 9000)
    with pytest.raises(RuntimeError, match="no rows of alibi at 8192, rotary at 8192"):
        demo.chosen(wide, found, VALID)
    assert demo.chosen(asked(demo, (512, 2048), 9000), found, VALID) == found
