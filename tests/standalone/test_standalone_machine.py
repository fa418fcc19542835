"""The class of machine that a run records: hardware, and nothing that names the machine."""

from __future__ import annotations

import json
import re
import socket

import pytest
import standalone_tools as tools
import torch

from megatron_patches.analysis.run_folder import read_run_folder
from megatron_patches.analysis.training_rows import append_training, read_training
from megatron_patches.standalone import runtime
from megatron_patches.standalone.runtime import World
from megatron_patches.standalone.train import train


def test_processor_cores_processes_and_threads(monkeypatch):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = World(0, 1, 0, torch.device("cpu")).machine()
        torch.set_num_threads(2)
        several = World(0, 4, 0, torch.device("cpu")).machine()
    finally:
        torch.set_num_threads(before)
    assert re.fullmatch(r".+, \d+ cores, 1 process of 1 thread", alone["machine"])
    assert several["machine"].endswith(" cores, 4 processes of 2 threads")
    assert socket.gethostname() not in alone["machine"] and "/" not in alone["machine"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert World(0, 8, 0, torch.device("cuda", 0)).machine() == {"machine": "a GPU, 8 processes"}


def test_a_processor_without_a_name_is_said(monkeypatch):
    def missing(*arguments, **options):
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", missing)
    monkeypatch.setattr(runtime.platform, "processor", lambda: "")
    monkeypatch.setattr(runtime.platform, "machine", lambda: "")
    assert runtime._processor() == "unknown CPU"
    monkeypatch.setattr(runtime.platform, "processor", lambda: "chip")
    assert runtime._processor() == "chip"


def test_a_trained_run_is_read_into_a_row(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {"train_iters": 6, "log_interval": 1, "eval_iters": 1, "eval_interval": 3}
    folder = train(config(position_sharing="layer", **settings))
    row = read_run_folder(folder)
    steps = [item for item in tools.log(folder) if "lm_loss" in item]
    assert row.lm_loss == pytest.approx([item["lm_loss"] for item in steps], rel=1e-5)
    assert row.seconds == pytest.approx(sum(1 / s["steps_per_second"] for s in steps), rel=1e-5)
    assert (row.step, row.tokens, row.tokens_at([1])) == (6, 6 * 128, [128])
    assert row.validation_iterations == [3, 6] and row.options == {"position_sharing": "layer"}
    assert {"layer0/bias_p", "layer1/bias_a"} <= set(row.position)
    assert row.machine == json.loads((folder / "run.json").read_text())["machine"]
    assert ", 1 process of " in row.machine
    append_training(tmp_path / "training.jsonl", [row])
    assert read_training(tmp_path / "training.jsonl") == [row]
