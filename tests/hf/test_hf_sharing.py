"""`position_sharing` on the way to a Hugging Face folder and back: what is in effect decides."""

from __future__ import annotations

import json

import pytest
import torch
from hf_cases import LENGTH, a_run, tokens

pytest.importorskip("transformers", reason="transformers is not installed")

from megatron_patches.config import ConfigError  # noqa: E402
from megatron_patches.hf import carry, read_model  # noqa: E402
from megatron_patches.standalone import load_model  # noqa: E402

# Method, what is asked for, layers -> what the folder says.
CASES = [
    ("learned", "layer", 2, "model"),
    ("sinusoidal", "layer", 2, "model"),
    ("kerple_log", "layer", 1, "model"),
    ("kerple_log", "layer", 2, "layer"),
    ("kerple_log", "model", 2, "model"),
    ("kerple_log", None, 2, "model"),
    ("alibi", "layer", 2, "layer"),
]


@torch.no_grad()
@pytest.mark.parametrize(("method", "asked", "layers", "told"), CASES)
def test_the_sharing_in_effect_comes_back(tmp_path, method, asked, layers, told):
    run = a_run(tmp_path / "run", method, position_sharing=asked, num_layers=layers)
    carry(run, tmp_path / "carried", with_tokenizer=False)
    path = tmp_path / "carried" / "config.json"
    values = json.loads(path.read_text())
    assert values["position_sharing"] == told
    ours, (back, _) = load_model(run), read_model(tmp_path / "carried")
    assert torch.equal(back(tokens(2, LENGTH)), ours(tokens(2, LENGTH)))
    other = "model" if told == "layer" else "layer"
    path.write_text(json.dumps({**values, "position_sharing": other}))
    with pytest.raises(ConfigError, match=f"position_sharing is '{other}', .* says '{told}'"):
        read_model(tmp_path / "carried")
