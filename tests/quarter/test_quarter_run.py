"""A whole run: on a machine without the full environment, and the numbers that it leaves."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import quarter_tools as tools
import torch
import torch.nn.functional as F

from data_prep.indexed import IndexedDataset
from megatron_patches.analysis.rows import check_comparable, read_kernels, read_rows
from megatron_patches.analysis.training_rows import comparable_training, read_training
from megatron_patches.quarter import run as running
from megatron_patches.quarter.budget import Speed
from megatron_patches.quarter.calibration import Calibration
from megatron_patches.quarter.plan import PlanError, read_plan
from megatron_patches.quarter.toy import toy
from megatron_patches.standalone.model import GPT

ABSENT = "deepspeed pydantic yaml scipy tokenizers tiktoken matplotlib rich zstandard psutil"
CELLS = 3 * 3 * 2  # methods, lengths, protocols


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """The script's own `run`, with torch and numpy alone."""
    output = tmp_path_factory.mktemp("finished") / "out"
    done = tools.command(
        *("run", "--data", data, "--output", output, "--minutes", 2, "--device", "cpu"),
        *("--toy", "--save-weights"),
        blocked=ABSENT,
    )
    assert done.returncode == 0, done.stderr
    return output, done.stdout


@pytest.fixture(scope="module")
def small(data):
    """The plan at the sizes that the script's --toy gives it, with the held-out text that there is."""
    return toy(read_plan(data))


def test_every_cell_is_a_row_that_tables_can_compare(finished):
    output, said = finished
    rows = read_rows(output / "rows.jsonl")
    assert len(rows) == CELLS and {row.status for row in rows} == {"ok"}
    for protocol in ("nonoverlap", "position"):
        part = [row for row in rows if row.protocol == protocol]
        check_comparable(part)
        assert {(row.method, row.eval_length) for row in part} == {
            (method, length) for method in tools.METHODS for length in (32, 64, 128)
        }
        assert all((row.position_losses is not None) == (protocol == "position") for row in part)
    assert {row.attention for row in rows} == {"chunked"} and {row.dtype for row in rows} == {
        "float32"
    }
    assert len({row.config_sha for row in rows}) == 3
    assert "steps a method" in said and "0 failed cells" in said


def test_the_summary_says_what_was_measured(finished):
    summary = json.loads((finished[0] / "summary.json").read_text())
    assert summary["state"] == "finished" and summary["toy"] is True
    assert summary["torch"] == str(torch.__version__) and summary["device_type"] == "cpu"
    assert summary["seconds"] < 120
    assert summary["attention"] == "chunked" and summary["probe_seconds"]["chunked"] > 0
    assert summary["clocks_before"] is summary["clocks_after"] is None  # no nvidia-smi asked
    assert "triton" in summary and summary["tokens_per_pass"] == 4096
    for own in summary["runs"].values():
        assert set(own["evaluation"]) == {"32", "64", "128"}
        for scored in own["evaluation"].values():
            # twelve windows of 128 tokens are held out
            assert scored["tokens_per_second"] == pytest.approx(12 * 128 / scored["seconds"])
            assert scored["peak_bytes"] is None
        assert own["tokens_per_second"] > 0 and own["training_seconds"] > 0
        assert own["model_flops_utilisation"] is None  # nobody knows this processor's peak


def test_losses_equal_a_plain_float64_computation(finished, small, data):
    """Dense attention, softmax and logarithm in float64 over the saved weights, window by window."""
    output, _ = finished
    tokens = IndexedDataset(data / "valid").tokens[: small.evaluation.max_tokens].astype(np.int64)
    rows = {(r.method, r.eval_length, r.protocol): r for r in read_rows(output / "rows.jsonl")}
    for run in small.runs:
        model = GPT(replace(run.shape, attention="reference"))
        model.load_state_dict(torch.load(output / run.name / "weights.pt", weights_only=True))
        model.double()
        for method in model.own_methods():
            method.to_float64_()
        for length in (32, 128):
            longest = 128
            count = (len(tokens) - 1) // longest * longest // length
            losses = []
            for start in range(0, count * length, length):
                text = torch.from_numpy(tokens[start : start + length + 1])
                with torch.no_grad():
                    logits = model(text[None, :-1])[0]
                losses.append(F.cross_entropy(logits, text[1:]).item())
            row = rows[run.training.pos_emb, length, "nonoverlap"]
            assert row.windows == count and row.tokens == count * length
            assert row.loss == pytest.approx(np.mean(losses), rel=2e-5)
            assert row.window_losses == pytest.approx(losses, rel=2e-4)
            assert row.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)


def test_training_learns_and_all_methods_read_the_same_samples(finished):
    logs = {
        folder.name: [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        for folder in finished[0].iterdir()
        if folder.is_dir()
    }
    assert len(logs) == 3
    for log in logs.values():
        assert log[-1]["lm_loss"] < log[0]["lm_loss"] - 0.5
        assert log[-1]["learning_rate"] < 0.01 * max(entry["learning_rate"] for entry in log)
    chains = [
        [(entry["iteration"], entry["consumed_sha"]) for entry in log] for log in logs.values()
    ]
    assert chains[0] == chains[1] == chains[2]
    assert {"position/bias_a_mean", "position/bias_p_mean"} <= set(logs["kerple_log-toy-7"][0])


def test_kernels_are_those_of_the_learned_parameters(finished):
    rows = read_kernels(finished[0] / "kernels.jsonl")
    assert {row.method for row in rows} == {"kerple_log", "alibi"}
    for row in [row for row in rows if row.method == "kerple_log"]:
        p, a = row.parameters["bias_p"], row.parameters["bias_a"]
        wanted = [-p * math.log1p(a * d) for d in row.distances]
        assert row.bias == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_logs_become_training_rows(finished, data, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "copy")
    done = tools.command("collect", "--output", folder)
    assert done.returncode == 0, done.stderr
    rows = read_training(folder / "training.jsonl")
    assert [row.method for row in rows] == sorted(tools.METHODS)
    assert comparable_training(rows)
    evaluated = {row.config_sha for row in read_rows(folder / "rows.jsonl")}
    for row in rows:
        text = (folder / f"{row.method}-toy-7" / "log.jsonl").read_text()
        losses = [json.loads(line)["lm_loss"] for line in text.splitlines()]
        assert row.lm_loss == pytest.approx(losses, rel=1e-5) and row.status == "ok"
        assert row.config_sha in evaluated and row.data == read_plan(data).train.fingerprint
        assert row.tokens == row.step * 16 * 32
    assert tools.command("collect", "--output", folder).returncode == 2
    assert tools.command("collect", "--output", tmp_path).returncode == 2


def test_a_second_run_into_the_same_folder_is_refused(finished, data):
    done = tools.command(
        *("run", "--data", data, "--output", finished[0], "--device", "cpu", "--toy"),
    )
    assert done.returncode == 2 and "earlier run" in done.stderr


def test_a_killed_run_leaves_whole_rows(data, tmp_path):
    command = [sys.executable, str(tools.SCRIPT), "run", "--data", str(data), "--toy"]
    command += ["--device", "cpu", "--minutes", "5", "--output", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    rows = tmp_path / "out" / "rows.jsonl"
    end = time.monotonic() + 120
    while not rows.exists() and time.monotonic() < end:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert 1 <= len(read_rows(rows)) < CELLS
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["state"] == "running"


def test_the_watchdog_writes_what_is_missing(plan, data, tmp_path, monkeypatch):
    """A kernel that never returns: the process ends at the deadline, and every cell has a row."""
    hour = running.QuarterHour(plan, tools.request(data, tmp_path / "out"), tools.Clock(), print)
    left = []
    monkeypatch.setattr(running.os, "_exit", left.append)
    hour._last_words()
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert left == [1] and len(rows) == CELLS
    assert {row.status for row in rows} == {"failed"}
    hour._last_words()
    assert len(read_rows(tmp_path / "out" / "rows.jsonl")) == CELLS


def test_the_watchdog_ends_a_process_that_hangs(data, tmp_path):
    code = (
        "import sys, time\n"
        f"sys.path[:0] = [{str(tools.ROOT)!r}, {str(tools.ROOT / 'tests' / 'quarter')!r}]\n"
        "import quarter_tools as tools\n"
        "from pathlib import Path\n"
        "from megatron_patches.quarter import run as running\n"
        "from megatron_patches.quarter.plan import read_plan\n"
        "running.calibrate = lambda *a: time.sleep(600)\n"
        f"data, out = Path({str(data)!r}), Path({str(tmp_path / 'out')!r})\n"
        "tools.run(read_plan(data), tools.request(data, out, minutes=0.1))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert len(read_rows(tmp_path / "out" / "rows.jsonl")) == CELLS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "cpu", "--output", "OUT"), "--toy"),
        (("--device", "cpu", "--toy", "--minutes", "nine"), "minutes"),
        (("--device", "cpu", "--toy"), "--output"),
        (("--device", "cpu", "--toy", "--attention", "triton", "--output", "OUT"), "triton"),
    ],
)
def test_wrong_requests_are_one_line_and_code_2(arguments, words, data, tmp_path):
    given = [str(tmp_path / "out") if word == "OUT" else word for word in arguments]
    done = tools.command("run", "--data", data, *given)
    assert done.returncode == 2 and words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_dry_run_prints_the_plan_and_writes_nothing(data, tmp_path):
    done = tools.command("run", "--data", data, "--dry-run", blocked=ABSENT)
    assert done.returncode == 0, done.stderr
    for word in ("memory", "passes", "TFLOP", "kerple_log-toy-7"):
        assert word in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_prepare_without_the_full_environment_says_what_it_needs(tmp_path):
    done = tools.command("prepare", "--output", tmp_path / "x", blocked="pydantic")
    assert done.returncode == 2 and "full environment" in done.stderr


def test_too_little_time_is_an_error_with_the_numbers(plan, data, tmp_path, monkeypatch):
    slow = Calibration(8, 4096, {r.name: Speed(1.0, 0.0, 0.0, 0.0) for r in plan.runs}, None)
    monkeypatch.setattr(running, "calibrate", lambda *_: slow)
    asked = tools.request(data, tmp_path / "out", minutes=0.2)
    with pytest.raises(PlanError, match="steps a method fit .* 1 s each"):
        tools.run(plan, asked)
    rows = read_rows(tmp_path / "out" / "rows.jsonl")
    assert len(rows) == CELLS and {row.status for row in rows} == {"failed"}
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["state"] == "failed"
