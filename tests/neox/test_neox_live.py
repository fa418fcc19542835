"""The patches in a real GPT-NeoX: a few steps of training on the CPU, compared among themselves."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from neox_tools import ADDED, NATIVE, PRODUCT, ROOT

from megatron_patches.neox.launch import NEEDED

GOLDENS = ROOT / "tests" / "goldens" / "neox_data"
TEXT = "c_noeod_text_document"
STEPS = 5
ADDITIVE = next(name for name in ADDED if name not in NATIVE)

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "no_weight_tying": True,
    "init_method": "small_init",
    "output_layer_init_method": "wang_init",
    # The same start whatever the number of processes.
    "use_cpu_initialization": True,
    "optimizer": {"type": "Adam", "params": {"lr": 0.003, "betas": [0.9, 0.95], "eps": 1e-8}},
    "zero_optimization": {"stage": 0},
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "data_impl": "mmap",
    "num_workers": 0,
    "data_path": TEXT,
    "split": "90,5,5",
    "tokenizer_type": "HFTokenizer",
    "vocab_file": "tok_c.json",
    "gradient_clipping": 1.0,
    "weight_decay": 0.1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "precision": "fp32",
    "train_iters": STEPS,
    "lr_decay_iters": 20,
    "distributed_backend": "gloo",
    "lr_decay_style": "cosine",
    "warmup": 0.1,
    "checkpoint_factor": 1000,
    "eval_interval": STEPS,
    "eval_iters": 2,
    "log_interval": 1,
    "steps_per_print": 100,
    "pipe_parallel_size": 0,
}
LAYERS = {"global": [[["global"], "all"]], "attend": [[["attend"], "all"]]}

pytestmark = [pytest.mark.neox, pytest.mark.slow]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    """losses(method, layers, processes=1): of each step; every run is done once."""
    # NeoX caches index maps beside its text, which must not happen among the goldens.
    folder = tmp_path_factory.mktemp("live")
    for name in (f"{TEXT}.bin", f"{TEXT}.idx", "tok_c.json"):
        shutil.copy(GOLDENS / name, folder)
    done: dict[tuple[str, str, int], list[float]] = {}

    def train(method: str, layers: str, processes: int = 1) -> list[float]:
        key = (method, layers, processes)
        if key not in done:
            done[key] = _train(folder, *key)
        return done[key]

    return train


def _train(folder: Path, method: str, layers: str, processes: int) -> list[float]:
    name = f"{method}-{layers}-{processes}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {
        "pos_emb": method,
        "attention_config": LAYERS[layers],
        "model_parallel_size": processes,
        "master_port": port,
        "save": name,
    }
    (folder / f"{name}.yml").write_text(yaml.safe_dump(BASE | own), encoding="utf-8")
    command = [sys.executable, "-m", "megatron_patches.neox", "--cpu", str(processes)]
    run = subprocess.run(
        [*command, "train.py", f"{name}.yml"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-5000:]
    text = (folder / name / "log.jsonl").read_text(encoding="utf-8")
    entries = [json.loads(line) for line in text.splitlines()]
    found = [entry["lm_loss"] for entry in entries if "lm_loss" in entry]
    assert len(found) == STEPS and found[-1] < found[0]
    assert any(key.startswith("position/") for key in entries[0])
    return found


def test_the_checkout_fits():
    command = [sys.executable, "scripts/check_neox.py", "--home", os.environ["NEOX_HOME"]]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith("fits: ")


@pytest.fixture
def runnable() -> None:
    import importlib.util

    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"GPT-NeoX needs {', '.join(missing)}")


@pytest.mark.parametrize("method", [ADDITIVE, PRODUCT[0]])
def test_both_types_of_layers_train_alike(runnable, losses, method):
    dense, linear = losses(method, "global"), losses(method, "attend")
    assert linear == pytest.approx(dense, rel=1e-6)


def test_the_methods_differ(runnable, losses):
    first, second = losses(ADDITIVE, "global"), losses(PRODUCT[0], "global")
    assert first[-1] != pytest.approx(second[-1], rel=1e-4)


@pytest.mark.parametrize("layers", LAYERS)
def test_two_tensor_parallel_processes_train_like_one(runnable, losses, layers):
    one, two = losses(ADDITIVE, layers), losses(ADDITIVE, layers, 2)
    assert two == pytest.approx(one, rel=1e-6)
