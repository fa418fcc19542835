"""Twenty steps of GPT-NeoX, done again from its weights and its data through the real path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standalone_tools as tools
import torch
import yaml
from safetensors.torch import load_file

from megatron_patches.config import Config, from_mapping
from megatron_patches.standalone import checkpoint
from megatron_patches.standalone.schedule import learning_rate
from megatron_patches.standalone.train import Trainer, train

DATA = tools.GOLDENS / "neox_data"
TRAINING = tools.GOLDENS / "neox" / "training"
RUNS = sorted((tools.GOLDENS / "neox" / "runs").glob("*.json"))
METHODS = ("kerple_log", "alibi")
# Of the last weights the repository holds one method's only: they are large.
FINAL = [name for name in METHODS if (TRAINING / f"{name}-main.final.safetensors").exists()]


def golden(method: str, variant: str) -> dict[str, Any]:
    return json.loads((TRAINING / f"{method}-{variant}.json").read_text())


def neox_config(text: str, **changes: Any) -> Config:
    """NeoX's YAML with our paths; the vocabulary is what NeoX padded its tokenizer to."""
    values = yaml.safe_load(text)
    eps = float(values["optimizer"]["params"]["eps"])  # YAML 1.1 reads 1e-08 as a text
    values["optimizer"]["params"]["eps"] = eps
    values["data_path"] = str(DATA / Path(values["data_path"]).name)
    values["vocab_file"] = str(DATA / Path(values["vocab_file"]).name)
    return from_mapping({**values, **changes})


def initial_weights(method: str) -> dict[str, torch.Tensor]:
    """Both methods began with the same weights, beside what the method itself stores."""
    own = load_file(TRAINING / "kerple_log.initial.safetensors")
    if method == "kerple_log":
        return own
    slopes = torch.tensor([2.0**-i for i in range(1, 9)] + [2.0 ** -(i + 0.5) for i in range(4)])
    kept = {key: tensor for key, tensor in own.items() if ".rpe." not in key}
    return kept | {f"sequential.{n}.attention.alibi_embed.slopes": slopes for n in (2, 3)}


@pytest.fixture(scope="module", params=METHODS)
def method(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def runs(method, tmp_path_factory) -> dict[str, Path]:
    """The `main` and the `plain` run of one method, started from NeoX's weights."""
    folder = tmp_path_factory.mktemp(method)
    step = folder / "start" / "global_step0"
    step.mkdir(parents=True)
    torch.save({"module": initial_weights(method)}, step / "mp_rank_00_model_states.pt")
    (folder / "start" / "latest").write_text("global_step0")
    found = {}
    for variant in ("main", "plain"):
        changes = {
            "save": str(folder / variant),
            "load": str(folder / "start"),
            "finetune": True,
            "log_interval": 1,
            "extra_save_iters": None,
        }
        found[variant] = train(neox_config(golden(method, variant)["yaml"], **changes))
    return found


@pytest.mark.parametrize("variant", ["main", "plain"])
def test_losses_of_every_step(runs, method, variant):
    wanted = [step["loss"] for step in golden(method, variant)["steps"]]
    np.testing.assert_allclose(tools.losses(runs[variant]), wanted, rtol=2e-6)


def test_learning_rates_and_gradient_norms(runs, method):
    rows = [row for row in tools.log(runs["main"]) if "lm_loss" in row]
    steps = golden(method, "main")["steps"]
    assert [row["learning_rate"] for row in rows] == [step["lr_used"] for step in steps]
    norms = [row["gradient_norm"] for row in rows]
    np.testing.assert_allclose(norms, [step["grad_norm"] for step in steps], rtol=1e-5)


@pytest.mark.parametrize("variant", ["main", "plain"])
def test_validation(runs, method, variant):
    stored = golden(method, variant)
    (row,) = [row for row in tools.log(runs[variant]) if "validation_loss" in row]
    assert row["iteration"] == 20
    assert row["validation_loss"] == pytest.approx(stored["evaluation"][0]["lm_loss"], rel=1e-5)
    model = checkpoint.load_model(runs[variant])
    batches = torch.tensor(stored["evaluation_tokens"]).reshape(-1, 4, 65)
    mean = torch.stack([model(b[:, :-1], b[:, 1:]) for b in batches]).mean().item()
    assert mean == pytest.approx(row["validation_loss"], rel=1e-6)


@pytest.mark.parametrize("method", FINAL, indirect=True)
def test_final_weights(runs, method):
    wanted = load_file(TRAINING / f"{method}-main.final.safetensors")
    found = tools.weights(runs["main"])
    assert set(found) == set(wanted)
    for key, tensor in found.items():
        ours, theirs = tensor, wanted[key]
        if key.endswith("query_key_value.bias"):
            # The key rows have no true gradient; Adam enlarges rounding noise there.
            ours, theirs = (t.view(12, 3, 8)[:, [0, 2]] for t in (ours, theirs))
        difference = (ours - theirs).abs()
        assert difference.quantile(0.999) < 1e-5, key
        # A weight that almost no token reaches has a gradient of rounding noise, too.
        assert difference.max() < 2e-4, key


def test_the_fed_batches(method, tmp_path):
    config = neox_config(golden(method, "main")["yaml"], save=str(tmp_path), extra_save_iters=None)
    trainer = Trainer(config, _world(config))
    wanted = load_file(TRAINING / "kerple_log-main.batches.safetensors")["tokens"].numpy()
    from megatron_patches.standalone.data import micro_batches

    batches = micro_batches(trainer.samples, 4, 0, 1, 0)
    found = np.stack([next(batches)[1] for _ in range(20)])
    assert (found == wanted).all()
    assert (found[19] == found[0]).all()  # 79 samples hold 19 whole batches


def _world(config: Config) -> Any:
    from megatron_patches.standalone import runtime

    return runtime.start(config)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_learning_rates_of_other_runs(path):
    run = json.loads(path.read_text())
    config = neox_config(run["yaml"], pipe_parallel_size=0, model_parallel_size=1)
    found = [learning_rate(config, step) for step in range(len(run["steps"]))]
    assert found == [step["lr_used"] for step in run["steps"]]
