"""YaRN as transformers' GPT-NeoX has it, read as our rotary: equal logits, or a refusal by name."""

from __future__ import annotations

import json
import math

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from megatron_patches.config import ConfigError  # noqa: E402
from megatron_patches.hf import read_model  # noqa: E402

ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
ROPE |= {"factor": 40.0, "original_max_position_embeddings": 32}


def saved(folder, **rope):
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    config = transformers.GPTNeoXConfig(
        **sizes,
        num_attention_heads=2,
        max_position_embeddings=128,
        rope_parameters={**ROPE, **rope},
        initializer_range=0.3,
    )
    theirs = transformers.GPTNeoXForCausalLM(config).eval()
    theirs.save_pretrained(folder)
    return theirs


L40 = math.log(40)
# What is said -> the factor on cosines and sines, by hand; None: our default, 0.1 log(factor) + 1.
AMPLITUDES = [
    ({"mscale": 1.0, "mscale_all_dim": 0.707}, (0.1 * L40 + 1) / (0.0707 * L40 + 1)),
    ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ({"mscale": 0.5, "mscale_all_dim": 2.0}, (0.05 * L40 + 1) / (0.2 * L40 + 1)),
    ({"mscale": 0.5, "mscale_all_dim": 2.0, "attention_factor": 1.3}, 1.3),
    ({"mscale": 0.5}, None),
    ({"mscale": 0.0, "mscale_all_dim": 1.0}, None),
    ({"factor": 1.0, "mscale": 0.5, "mscale_all_dim": 2.0}, 1.0),
]


@torch.no_grad()
@pytest.mark.parametrize(("rope", "amplitude"), AMPLITUDES, ids=str)
def test_the_amplitude_follows_the_pair(tmp_path, rope, amplitude):
    theirs = saved(tmp_path, **rope)
    ours, config = read_model(tmp_path)
    text = torch.randint(0, 64, (1, 100), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(ours(text), theirs(text).logits, atol=2e-5, rtol=1e-5)
    found = config.position_options.get("attention_factor")
    assert found == (None if amplitude is None else pytest.approx(amplitude, rel=1e-12))


@torch.no_grad()
def test_without_a_factor_it_is_the_ratio_of_the_lengths(tmp_path):
    theirs = saved(tmp_path, factor=4.0)  # 128 / 32
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["rope_parameters"]["factor"] = None
    path.write_text(json.dumps(values))
    ours, config = read_model(tmp_path)
    assert config.position_options["factor"] == 4.0
    text = torch.randint(0, 64, (1, 100), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(ours(text), theirs(text).logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"finetuned": True}, "names finetuned, which rope_type 'yarn' does not have"),
        ({"rope_type": "linear", "mscale": 1.0}, "names mscale.*rope_type 'linear'"),
        ({"rope_type": "default", "factor": 40.0}, "names factor.*rope_type 'default'"),
        ({"mscale": "1", "mscale_all_dim": 1.0}, "garbles"),
        ({"mscale": 1.0, "mscale_all_dim": -10 / L40}, "garbles|attention_factor"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path, rope, said):
    saved(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    kept = (
        ROPE if rope.get("rope_type", "yarn") == "yarn" else {"rope_theta": 10000.0, "factor": 2.0}
    )
    path.write_text(json.dumps({**values, "rope_parameters": {**kept, "unused": None, **rope}}))
    with pytest.raises(ConfigError, match=said):
        read_model(tmp_path)
