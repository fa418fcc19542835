"""Every method file: from its YAML to a trained model that reads four times its length, or says no."""

from __future__ import annotations

import math

import pytest
import standalone_tools as tools
import yaml

from megatron_patches import positions
from megatron_patches.standalone.evaluate import Evaluation, Request
from megatron_patches.standalone.train import Trainer, train

FILES = sorted((tools.ROOT / "configs" / "method").glob("*.yml"))


def test_every_method_has_a_file():
    assert [file.stem for file in FILES] == positions.names()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_train_then_read_four_times_the_length(file, config):
    changes = yaml.safe_load(file.read_text())
    made = config(train_iters=30, log_interval=5, hidden_size=32, **changes)
    folder = train(made)
    losses = tools.losses(folder)
    assert losses[-1] < losses[0] - 0.1
    statistics = {key for key in tools.log(folder)[0] if key.startswith("position/")}

    evaluation = Evaluation(folder, Request((32, 128)))
    method = evaluation.model.position_method
    assert bool(statistics) == any(
        method.head_dim_of.get(n) is not None for n, _ in method.named_parameters()
    )
    near, far = evaluation.run(None, lambda _: None)
    assert near.status == "ok" and math.isfinite(near.perplexity)
    assert near.perplexity < tools.VOCABULARY
    if method.max_length is None or method.max_length >= 128:
        assert far.status == "ok" and math.isfinite(far.perplexity)
    else:
        assert far.status == "refused" and f"max_length={method.max_length}" in far.message


@pytest.mark.parametrize("checkpoint_activations", [False, True])
@pytest.mark.parametrize("name", ["randomised_rotary", "randomised_kerple_log"])
def test_draws_go_on_where_a_training_stopped(config, name, checkpoint_activations, monkeypatch):
    """Each step has its own; a layer that is computed twice, and a training in two parts, the same."""
    changes = {"train_iters": 6, "checkpoint_factor": 3, "pos_emb": name, "log_interval": 1}
    straight = train(config("straight", **changes))
    changes["checkpoint_activations"] = checkpoint_activations
    original = Trainer._one_step
    draws: list[tuple[int, ...]] = []

    def one_step(self, *arguments):
        if self.step == 3 and len(draws) == 3:
            raise KeyboardInterrupt
        loss = original(self, *arguments)
        draws.append(tuple(self.model.position_method.take(100, 10).tolist()))
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_one_step", one_step)
        with pytest.raises(KeyboardInterrupt):
            train(config("parts", **changes))
    assert len(set(draws)) == 3
    assert tools.losses(train(config("parts", **changes))) == tools.losses(straight)
