"""Every method file: from its YAML to a trained model that reads four times its length, or says no."""

from __future__ import annotations

import math

import pytest
import standalone_tools as tools
import yaml

from megatron_patches import positions
from megatron_patches.standalone.evaluate import Evaluation, Request
from megatron_patches.standalone.train import train

FILES = sorted((tools.ROOT / "configs" / "method").glob("*.yml"))


def test_every_method_has_a_file():
    assert [file.stem for file in FILES] == positions.names()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_train_then_read_four_times_the_length(file, config):
    changes = yaml.safe_load(file.read_text())
    made = config(train_iters=20, log_interval=5, hidden_size=32, **changes)
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
    if method.max_length is None:
        assert far.status == "ok" and math.isfinite(far.perplexity)
    else:
        assert far.status == "refused" and f"max_length={method.max_length}" in far.message
