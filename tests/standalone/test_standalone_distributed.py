"""Two processes, accumulation, ZeRO and recomputation change how a step is computed, not the step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standalone_tools as tools
import torch
import yaml

from megatron_patches.config import dump, from_mapping
from megatron_patches.standalone import load_model
from megatron_patches.standalone.train import train

WORKER = Path(__file__).with_name("standalone_worker.py")


def zero(stage: int) -> dict[str, Any]:
    return {"stage": stage}


# All of them read eight sequences a step. `micro` times `accumulation` times processes is 8.
ALONE: dict[str, dict[str, Any]] = {
    "accumulation": {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
    "recomputation": {"checkpoint_activations": True},
    "zero1": {"zero_optimization": zero(1)},
    "zero2": {
        "zero_optimization": zero(2),
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    },
    "zero3": {"zero_optimization": zero(3)},
}
PAIR: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2},
    "recomputation": {"checkpoint_activations": True},
    **{f"zero{n}": {"zero_optimization": zero(n)} for n in (1, 2, 3)},
    "zero1-accumulation": {
        "zero_optimization": zero(1),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
    },
    **{
        f"bfloat16-zero{n}": {"zero_optimization": zero(n), "precision": "bfloat16"}
        for n in (0, 1, 2)
    },
    "bfloat16-zero1-accumulation": {
        "zero_optimization": zero(1),
        "precision": "bfloat16",
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
    },
}
COMMON = {"train_iters": 8, "eval_iters": 2, "eval_interval": 4}


def made(text: Path, save: Path, processes: int, **changes: Any) -> dict[str, Any]:
    micro = {"train_micro_batch_size_per_gpu": 8 // processes}
    return tools.settings(text, save, **{**COMMON, **micro, **changes})


@pytest.fixture(scope="module")
def reference(text, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    return train(from_mapping(made(text, folder / "run", 1)))


@pytest.fixture(scope="module")
def pairs(text, tmp_path_factory) -> dict[str, Path]:
    """Every run of PAIR, done by two processes."""
    folder = tmp_path_factory.mktemp("pairs")
    files = []
    for name, changes in PAIR.items():
        file = folder / f"{name}.yml"
        config = from_mapping(made(text, folder / name, 2, **changes))
        file.write_text(dump(config))
        files.append(str(file))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    # A store of its own on a free port: nothing to meet another test's.
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", str(WORKER), *files]
    done = subprocess.run(
        command,
        cwd=tools.ROOT,
        env=tools.clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: folder / name for name in PAIR}


def column(folder: Path, key: str) -> list[Any]:
    return [row[key] for row in tools.log(folder) if key in row]


def assert_equal_runs(found: Path, wanted: Path, tolerance: float) -> None:
    assert column(found, "consumed_sha") == column(wanted, "consumed_sha")
    assert column(found, "learning_rate") == column(wanted, "learning_rate")
    for key in ("lm_loss", "validation_loss"):
        assert len(column(found, key)) == len(column(wanted, key)) > 0
        np.testing.assert_allclose(column(found, key), column(wanted, key), rtol=tolerance)
    norms = column(found, "gradient_norm")
    assert len(norms) == COMMON["train_iters"]
    np.testing.assert_allclose(norms, column(wanted, "gradient_norm"), rtol=30 * tolerance)


@pytest.mark.parametrize("name", ALONE)
def test_one_process(reference, text, tmp_path, name):
    found = train(from_mapping(made(text, tmp_path / "run", 1, **ALONE[name])))
    assert_equal_runs(found, reference, 1e-5)
    model, wanted = load_model(found), load_model(reference)
    for key, tensor in model.state_dict().items():
        # The biases of keys have no gradient but noise, which Adam enlarges.
        if not key.endswith("query_key_value.bias"):
            torch.testing.assert_close(tensor, wanted.state_dict()[key], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", [name for name in PAIR if "bfloat16" not in name])
def test_two_processes(reference, pairs, name):
    assert_equal_runs(pairs[name], reference, 1e-5)
    tokens = torch.arange(32)[None]
    found, wanted = load_model(pairs[name])(tokens), load_model(reference)(tokens)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", [name for name in PAIR if "bfloat16" in name])
def test_bfloat16(reference, pairs, name):
    assert_equal_runs(pairs[name], reference, 1e-3)
    stored = tools.weights(pairs[name])
    kinds = {key.rsplit(".", 1)[1]: tensor.dtype for key, tensor in stored.items()}
    assert kinds["bias_p"] == kinds["bias_a"] == torch.float32
    assert stored["sequential.2.mlp.linear1.weight"].dtype == torch.bfloat16
    # Finer than bfloat16: an update of the learning rate's size is not lost in rounding.
    p = stored["sequential.2.attention.rpe.bias_p"]
    assert (p != p.bfloat16().float()).any()
    assert yaml.safe_load((pairs[name] / "config.yml").read_text())["precision"] == "bfloat16"


def test_the_parameter_count_is_told_under_every_stage(reference, pairs):
    import json

    counts = {
        json.loads((folder / "run.json").read_text())["parameters"]
        for folder in (reference, *pairs.values())
    }
    assert counts == {load_model(reference).parameter_count()}


def test_position_statistics_are_logged_under_every_stage(reference, pairs):
    wanted = {key for key in tools.log(reference)[0] if key.startswith("position/")}
    assert wanted
    for name, folder in pairs.items():
        first = tools.log(folder)[0]
        assert {key for key in first if key.startswith("position/")} == wanted, name
