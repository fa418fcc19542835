"""GPT-NeoX's own grammar: real run files compose, and a checkout's keys and defaults are ours."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_patches.config import ConfigError, check_standalone, compose, dump
from megatron_patches.neox.fields import differences, fields

RUNS = json.loads((Path(__file__).parent / "neox_runs.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_files_of_real_neox_runs_compose(write, name):
    made = compose([write(RUNS[name])])
    method, pipe, model = name.rsplit("-", 2)
    assert made.pos_emb == method
    assert made.pipe_parallel_size == int(pipe[2:])
    assert made.optimizer.params.betas == [0.9, 0.95]
    assert made.save == f"checkpoints/{name}"
    assert compose([write(dump(made), "again.yml")]) == made
    if int(model[2:]) > 1:
        with pytest.raises(ConfigError, match="model_parallel_size"):
            check_standalone(made)
    else:
        check_standalone(made)


@pytest.fixture
def checkout() -> Path:
    home = os.environ.get("NEOX_HOME")
    if not home:
        pytest.skip("NEOX_HOME names no GPT-NeoX checkout")
    return Path(home)


@pytest.mark.neox
def test_every_key_of_a_checkout_is_known_with_its_default(checkout):
    assert len(fields(checkout)) > 300
    assert differences(checkout) == []


@pytest.mark.neox
def test_the_checkouts_own_model_files_compose(checkout):
    names = (
        "125M",
        "1-3B",
        "20B",
        "bf16_125M",
        "pythia/160M",
        "pythia/70M",
        "mamba/mamba-1.4B",
        "rwkv/170M",
    )
    for name in names:
        config = compose([checkout / "configs" / f"{name}.yml"])
        assert config.num_layers >= 6
