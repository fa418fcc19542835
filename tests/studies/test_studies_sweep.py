"""`scripts/sweep.py` on a toy study: parallel runs, an interrupt, a failure, and going on."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import studies_tools as tools
import yaml

from megatron_patches.analysis.failures import Failure, read_failures
from megatron_patches.analysis.rows import cell_key, latest_rows, read_kernels, read_rows
from megatron_patches.analysis.training_rows import read_training
from megatron_patches.studies import ROOT, load_study, make_plan

RUNS = [f"{method}-text-{seed}" for method in tools.METHODS for seed in tools.SEEDS]
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start(study: Path, *arguments: str) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return subprocess.Popen(
        [sys.executable, "scripts/sweep.py", str(study), *arguments],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def sweep(study: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(study, *arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def alive(folder: Path) -> list[str]:
    """Command lines of processes that work in `folder`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{folder}/runs" in text:
            found.append(text)
    return found


@pytest.mark.slow
def test_interrupted_failed_and_resumed(tmp_path):
    asked = {"lengths": tools.LENGTHS, "max_tokens": 129, "kernels": True}
    study = tools.write_study(tmp_path, eval=asked)
    rows = tmp_path / "results" / "rows.jsonl"

    process = start(study, "--parallel", "2")
    until = time.monotonic() + 120
    while not list(tmp_path.glob("runs/*/log.jsonl")) and process.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert alive(tmp_path) == []
    assert not (tmp_path / "results" / "failed.jsonl").exists()

    # On purpose: this folder belongs to somebody else's run.
    foreign = tmp_path / "runs" / "rotary-text-2"
    foreign.mkdir(parents=True, exist_ok=True)
    config = (ROOT / "configs/base/tiny.yml").read_text() + "pos_emb: none\n"
    (foreign / "config.yml").write_text(config)
    (foreign / "log.jsonl").touch()
    code, out, err = sweep(study, "--parallel", "2")
    assert code == 1
    assert "failed: rotary-text-2, train, exit code 2: error: " in err
    assert "holds a run of another configuration" in err
    assert "rotary-text-2: FAILED" in out and "alibi-text-2: done" in out
    (failed,) = map(json.loads, (tmp_path / "results" / "failed.jsonl").read_text().splitlines())
    assert (failed["run"], failed["step"], failed["exit_code"]) == ("rotary-text-2", "train", 2)
    assert failed["command"].startswith("python deepy.py --set train_iters=4")
    assert "another configuration" in failed["message"]
    assert len(read_rows(rows)) == 6  # the other three, at two lengths

    for file in foreign.iterdir():
        file.unlink()
    before = rows.read_bytes()
    code, out, err = sweep(study)
    assert (code, err) == (0, "")
    assert "3 of 4 runs, 6 of 8 cells" in out and "[1/1] rotary-text-2: done" in out
    assert rows.read_bytes().startswith(before)
    found = read_rows(rows)
    assert max(Counter(map(cell_key, found)).values()) == 1 and len(latest_rows(found)) == 8
    assert {(r.method, r.seed) for r in found} == {
        (m, s) for m in tools.METHODS for s in tools.SEEDS
    }
    assert {r.eval_length for r in found} == set(tools.LENGTHS)
    assert {r.step for r in found} == {4} and {r.tokens for r in found} == {128}

    kernels = read_kernels(tmp_path / "results" / "kernels" / "alibi-text-2.jsonl")
    assert [kernel.head for kernel in kernels] == [0, 1]
    written = sorted(file.name for file in (tmp_path / "results" / "kernels").iterdir())
    assert written == ["alibi-text-1.jsonl", "alibi-text-2.jsonl"]  # rotary has none
    lines = read_training(tmp_path / "results" / "training.jsonl")
    assert sorted((line.method, line.seed) for line in lines) == [
        (m, s) for m in tools.METHODS for s in tools.SEEDS
    ]
    assert all(line.step == 4 and len(line.lm_loss) == 2 for line in lines)

    # More asked of the same models, by a study of its own: nothing is trained again.
    asked = {"lengths": [32], "protocols": ["paper", "position"], "paper_windows": 3}
    asked |= {"window_widths": ["none", 4]}
    more = tmp_path / "more.yml"
    keys = {"follows": "toy", "methods": ["rotary"], "output": f"{tmp_path}/more", "eval": asked}
    more.write_text(yaml.safe_dump(keys))
    steps = {run: (tmp_path / "runs" / run / "log.jsonl").stat().st_mtime_ns for run in RUNS}
    code, out, err = sweep(more)
    assert (code, err) == (0, "") and "0 trainings of 0 tokens together, 8 cells" in out
    assert {n: (tmp_path / "runs" / n / "log.jsonl").stat().st_mtime_ns for n in RUNS} == steps
    scored = read_rows(tmp_path / "more" / "rows.jsonl")
    assert Counter((r.protocol, r.options.get("sliding_window_width")) for r in scored) == {
        (protocol, width): 2 for protocol in ("paper", "position") for width in (None, 4)
    }
    assert {r.windows for r in scored if r.protocol == "paper"} == {3}
    assert rows.read_bytes().startswith(before) and not (tmp_path / "more/training.jsonl").exists()
    code, out, _ = sweep(more)
    assert code == 0 and "2 of 2 runs, 8 of 8 cells" in out and "[1/" not in out

    code, out, _ = sweep(study)
    assert code == 0 and "4 of 4 runs, 8 of 8 cells" in out and "[1/" not in out
    # Kernels that are lost are written again, of the models that are there.
    shutil.rmtree(tmp_path / "results" / "kernels")
    code, out, _ = sweep(study)
    assert code == 0 and "0 trainings of 0 tokens together, 0 cells, 2 files of kernels" in out
    assert read_kernels(tmp_path / "results" / "kernels" / "alibi-text-2.jsonl") == kernels
    assert rows.read_bytes().count(b"\n") == 8


@pytest.mark.slow
def test_plan_cost_and_list_start_nothing(tmp_path):
    study = tools.write_study(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for chosen in (["--list"], ["--dry-run", "--list"]):
        code, again, err = sweep(study, *chosen)
        assert (code, err) == (0, "") and "  rotary-text-2: train, eval nonoverlap valid\n" in again
    code, out, err = sweep(study, "--dry-run", "--tokens-per-second", "100")
    assert (code, err) == (0, "")
    assert "toy: 2 methods x 1 dataset x 2 seeds x 1 training length, 4 runs" in out
    # 4 runs x 4 steps x 4 sequences of 16; 129 tokens at two lengths
    assert "4 trainings of 1,024 tokens together, 8 cells, evaluation: 1,032 tokens" in out
    assert "4 x 1 x 1 = 4 sequences of 16 = 64 tokens a step; memory about 0.0 GB a run" in out
    assert "at 100 tokens/s of training a run" in out
    assert sorted(tmp_path.rglob("*")) == before


STUB = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$*" in
*FAILS*) echo "error: on purpose" >&2; exit 2 ;;
esac
"""


@pytest.mark.slow
def test_slurm_script_runs_the_exact_commands(tmp_path):
    study = tools.write_study(tmp_path)
    file, stub, calls = tmp_path / "array.sh", tmp_path / "python.sh", tmp_path / "calls"
    code, _, err = sweep(study, "--slurm", str(file), "--only", "alibi-*")
    assert (code, err) == (0, "")
    assert subprocess.run(["bash", "-n", str(file)]).returncode == 0
    text = file.read_text()
    assert "#SBATCH --array=0-1\n" in text and "#SBATCH --cpus-per-task=1\n" in text
    assert str(ROOT) not in text.replace(str(tmp_path), "")

    def task(number: int, fails: str) -> tuple[int, list[str]]:
        stub.write_text(STUB.replace("FAILS", fails))
        stub.chmod(0o755)
        calls.write_text("")
        env = {**os.environ, "PYTHON": str(stub), "CALLS": str(calls)}
        env |= {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_JOB_ID": "7"}
        done = subprocess.run(["bash", str(file)], cwd=ROOT, env=env, capture_output=True)
        return done.returncode, calls.read_text().splitlines()

    plan = make_plan(load_study(study), ["alibi-*"])
    commands = [[" ".join(step.arguments) for step in plan.steps(run)] for run in plan.runs]
    for run, lines in zip(plan.runs, commands, strict=True):
        lines.insert(1, f"scripts/sweep.py {study} --record --only {run.name}")
    assert len(commands[0]) == 3
    assert task(0, "nothing") == (0, commands[0])
    assert task(1, "nothing") == (0, commands[1])
    assert not (tmp_path / "results" / "failed.jsonl").exists()
    assert task(1, "train.py") == (1, commands[1][:1])  # no model, so nothing to score
    assert task(0, "eval.py") == (1, commands[0])
    assert task(2, "nothing")[0] == 2
    lines = (tmp_path / "results" / "failed.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [set(item) for item in found] == [{field.name for field in fields(Failure)}] * 2
    for item, run in zip(
        read_failures([tmp_path / "results" / "failed.jsonl"]), reversed(plan.runs), strict=True
    ):
        assert (item.config_sha, item.seed) == (run.sha, run.config.seed)
        assert (item.method, item.dataset, item.train_length) == ("alibi", "text", 16)
    assert [f["message"] for f in found] == [
        "task 1 of job 7: see the log",
        "task 0 of job 7: see the log",
    ]
    # As a sweep records it, so that its lengths are known.
    train, evaluate = plan.steps(plan.runs[1])[0], plan.steps(plan.runs[0])[1]
    assert [f["command"] for f in found] == [
        shlex.join(["python", *step.arguments]) for step in (train, evaluate)
    ]
    assert found[1]["command"].endswith(" --lengths 16 32")
    assert [f["log"] for f in found] == [f"{tmp_path}/runs/slurm-7_{task}.txt" for task in (1, 0)]
    assert [(f["run"], f["step"], f["exit_code"]) for f in found] == [
        ("alibi-text-2", "train", 2),
        ("alibi-text-1", "eval nonoverlap valid", 2),
    ]


def test_what_a_command_line_may_not_join(tmp_path):
    study = tools.write_study(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    for other in (["--dry-run"], ["--slurm", str(tmp_path / "x.sh")]):
        code, _, err = sweep(study, "--record", *other)
        assert code == 2 and "not allowed with" in err
    assert sorted(tmp_path.rglob("*")) == before
    code, out, _ = sweep(study, "--record", "--output", str(tmp_path / "mine"))
    assert (code, out) == (0, f"0 lines appended to {tmp_path}/mine/training.jsonl\n")
    follower = tmp_path / "again.yml"
    follower.write_text(f"follows: again\neval: {{lengths: [16]}}\noutput: {tmp_path}/x\n")
    code, _, err = sweep(follower, "--dry-run")
    assert code == 2 and "cannot follow itself" in err and "Traceback" not in err


def test_errors_are_one_line_and_exit_2(tmp_path):
    study = tools.write_study(tmp_path, methods=["alibbi"])
    code, _, err = sweep(study, "--dry-run")
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err
    assert "nearest: `alibi`" in err and f"{study}:" in err
