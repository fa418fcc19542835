"""The schema of rows: what is accepted, stored, read back, skipped and kept apart."""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from analysis_rows import fields, kernel, make

from megatron_patches.analysis import jsonl
from megatron_patches.analysis.rows import (
    Row,
    RowError,
    append_kernels,
    append_rows,
    read_kernels,
    read_rows,
)

ROOT = Path(__file__).resolve().parents[2]


def test_round_trip_keeps_every_value(tmp_path: Path) -> None:
    rows = [
        Row(
            **fields(bits_per_byte=0.123456789012345, options={"window": 512, "nested": [1, None]})
        ),
        Row(**fields(protocol="last", last_k=256, stride=256, tokens=512, documents_isolated=True)),
        Row(**fields(protocol="position", position_losses=[2.5, 1.5])),
        make("learned", 2, 2048, None, message="zu lang: 2048 > 512 – nein"),
    ]
    path = tmp_path / "new" / "folder" / "rows.jsonl"
    append_rows(path, rows[:1])
    append_rows(path, rows[1:])
    assert read_rows(path) == rows
    assert read_rows([path, path]) == rows + rows
    assert path.read_bytes().count(b"\n") == 4


def test_numpy_numbers_become_plain(tmp_path: Path) -> None:
    row = Row(**fields(seed=np.int64(1), loss=np.float64(2), seconds=np.float32(1.5)))
    assert type(row.seed) is int and type(row.loss) is float and type(row.seconds) is float
    append_rows(tmp_path / "rows.jsonl", [row])
    assert read_rows(tmp_path / "rows.jsonl") == [Row(**fields())]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": ""}, "method"),
        ({"seed": True}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"eval_length": 0}, "eval_length"),
        ({"seconds": math.nan}, "seconds"),
        ({"protocol": "middle"}, "protocol"),
        ({"status": "done"}, "status"),
        ({"stride": 512}, "stride"),
        ({"protocol": "sliding", "stride": 1025}, "stride"),
        ({"protocol": "last", "stride": 512}, "last_k"),
        ({"protocol": "last", "last_k": 1025}, "last_k"),
        ({"last_k": 4}, "last_k"),
        ({"loss": None}, "loss"),
        ({"loss": math.inf, "perplexity": math.inf}, "loss"),
        ({"perplexity": math.exp(2.0) * (1 + 1e-5)}, "perplexity"),
        ({"window_losses": [2.0]}, "window_losses"),
        ({"window_losses": [2.1, 2.5]}, "outside"),
        ({"window_losses": [1.5, 2.6]}, "mean of window_losses"),
        ({"window_losses": "2"}, "window_losses"),
        ({"protocol": "position"}, "position_losses"),
        ({"position_losses": [2.5, 1.6]}, "mean of position_losses"),
        ({"position_losses": []}, "position_losses"),
        ({"protocol": "sliding", "stride": 8, "position_losses": [2.0]}, "position_losses"),
        ({"tokens": 0}, "tokens"),
        ({"status": "failed"}, "message"),
        ({"status": "failed", "message": "out of memory"}, "must be absent"),
        ({"options": {"a": math.nan}}, "options"),
        ({"options": {1: 2}}, "options"),
        ({"documents_isolated": 1}, "documents_isolated"),
    ],
)
def test_contradictions_are_refused_by_name(changes: dict[str, object], named: str) -> None:
    Row(**fields())
    with pytest.raises(RowError, match=named):
        Row(**fields(**changes))


def test_windows_of_unequal_size_need_not_average_to_the_loss() -> None:
    loss = (1.5 * 1024 + 2.5 * 256) / 1280
    scores = {"loss": loss, "perplexity": math.exp(loss), "tokens": 1280}
    assert Row(**fields(protocol="sliding", stride=256, **scores)).loss == loss


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "missing .*method"),
        ("[1]", "expected an object"),
        ("", "not strict JSON"),
        ('{"a": 1', "not strict JSON"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": 1e999}', "does not fit"),
        ('{"a": 1, "a": 2}', "repeated key a"),
        ("[" * 100000, "not strict JSON"),
        (json.dumps(fields(surplus=1)), "unknown surplus"),
        (json.dumps(fields(seed=-1)), "seed: expected an integer >= 0"),
        ("\udcff", "not strict JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    append_rows(path, [Row(**fields())])
    with path.open("ab") as stream:
        stream.write(line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(RowError, match=rf"rows\.jsonl:2: .*{message}"):
        read_rows(path)


def test_truncated_last_line_is_refused_by_reader_and_writer(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_rows(path, [Row(**fields()), Row(**fields(seed=2))])
    cut = path.read_bytes()[:-20]
    path.write_bytes(cut)
    for action in (lambda: append_rows(path, [Row(**fields(seed=3))]), lambda: read_rows(path)):
        with pytest.raises(RowError, match=r"rows\.jsonl:2: the last line is truncated"):
            action()
    assert path.read_bytes() == cut
    # A line that is whole but for its newline is refused too: more might have followed.
    path.write_bytes((json.dumps(fields())).encode())
    with pytest.raises(RowError, match="truncated"):
        append_rows(path, [Row(**fields(seed=3))])


def test_failed_write_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rows.jsonl"
    append_rows(path, [Row(**fields())])
    before = path.read_bytes()
    real = jsonl.os.write

    def full_disk(descriptor: int, data: memoryview) -> int:
        real(descriptor, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jsonl.os, "write", full_disk)
    with pytest.raises(OSError, match="No space"):
        append_rows(path, [Row(**fields(seed=2))])
    assert path.read_bytes() == before


def test_reading_is_bounded(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "rows.jsonl"
    append_rows(path, [Row(**fields())])
    size = path.stat().st_size
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", size)
    assert len(read_rows(path)) == 1
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", size - 1)
    with pytest.raises(RowError, match=r":1: line longer"):
        read_rows(path)
    monkeypatch.setattr(jsonl, "MAX_FILE_BYTES", size - 1)
    with pytest.raises(RowError, match="more than the limit"):
        read_rows(path)
    with pytest.raises(RowError, match="absent.jsonl: cannot be read"):
        read_rows(tmp_path / "absent.jsonl")


def _append_many(path: Path, worker: int) -> None:
    for number in range(50):
        losses = [2.0] * 400  # about 2 KiB a line, so that torn writes would show
        row = fields(seed=worker * 1000 + number, windows=400, tokens=409600, window_losses=losses)
        append_rows(path, [Row(**row)])


def test_concurrent_appends_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append_many, args=(path, worker)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    seeds = [row.seed for row in read_rows(path)]
    assert sorted(seeds) == sorted(w * 1000 + n for w in range(4) for n in range(50))


def test_append_waits_for_whoever_holds_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("ab") as holder:
        fcntl.flock(holder.fileno(), fcntl.LOCK_EX)
        writer = threading.Thread(target=append_rows, args=(path, [Row(**fields())]))
        writer.start()
        writer.join(0.3)
        assert writer.is_alive() and path.stat().st_size == 0
    writer.join(30)
    assert read_rows(path) == [Row(**fields())]


def test_nothing_to_append_creates_no_file(tmp_path: Path) -> None:
    append_rows(tmp_path / "rows.jsonl", [])
    assert not (tmp_path / "rows.jsonl").exists()


def test_kernels_round_trip_and_checks(tmp_path: Path) -> None:
    rows = [kernel(0), kernel(1, layer=3, bias=None, weight=[0.5] * 64)]
    append_kernels(tmp_path / "kernels.jsonl", rows)
    assert read_kernels(tmp_path / "kernels.jsonl") == rows
    with pytest.raises(RowError, match=r"kernels\.jsonl:1: missing .*eval_length"):
        read_rows(tmp_path / "kernels.jsonl")
    for changes, named in (
        ({"distances": [0, 2, 1], "bias": [0.0] * 3}, "not ascending"),
        ({"bias": [0.0]}, "bias: 1 values, 64 distances"),
        ({"weight": [math.inf] * 64}, "weight"),
        ({"parameters": {"p": "x"}}, r"parameters\.p"),
        ({"head": -1}, "head"),
        ({"distances": []}, "distances"),
    ):
        with pytest.raises(RowError, match=named):
            kernel(**changes)


def test_import_is_light() -> None:
    code = (
        "import sys, megatron_patches.analysis.tables, megatron_patches.analysis.figures;"
        "heavy = {'torch', 'numpy', 'scipy', 'matplotlib', 'pandas'} & set(sys.modules);"
        "ours = {m for m in sys.modules if m.startswith('megatron_patches.')"
        " and not m.startswith('megatron_patches.analysis')};"
        "assert not heavy and not ours, (heavy, ours)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", ["loss", "seconds", "tokens", "seed", "window_losses"])
def test_integers_of_any_size_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """JSON's integers have no limit, a float and an array have: no OverflowError later."""
    path = tmp_path / "rows.jsonl"
    value = [10**400, 2.5] if name == "window_losses" else 10**400
    path.write_text(json.dumps(fields(**{name: value})) + "\n")
    with pytest.raises(RowError, match=rf"rows.jsonl:1: {name}.*1329"):
        read_rows(path)
    assert Row(**fields(seed=2**63 - 1)).seed == 2**63 - 1
    with pytest.raises(RowError, match="seed: expected an integer of 63 bits"):
        Row(**fields(seed=2**63))
