"""Where a `config.json` of GPT-NeoX says its rotary positions: read as transformers reads it, or refused."""

from __future__ import annotations

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from megatron_patches.config import ConfigError  # noqa: E402
from megatron_patches.hf import read_model  # noqa: E402

# Heads of 32, so that every frequency, and what stretches it, shows in the logits.
SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
LINEAR = {"rope_type": "linear", "factor": 3.0}
PLAIN = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}


def stored(folder, without=(), **changes):
    """A folder whose config.json is changed by hand, without the keys `without`."""
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        **SIZES, num_attention_heads=2, max_position_embeddings=128, initializer_range=0.2
    )
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder)
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: v for key, v in values.items() if key not in without}))
    return folder


READ = {
    "rotary_pct": (("rope_parameters",), {"rotary_pct": 0.5, "rotary_emb_base": 500}),
    "scaling first": ((), {"rope_parameters": PLAIN, "rope_scaling": LINEAR}),
    "empty scaling": ((), {"rope_parameters": PLAIN, "rope_scaling": {}}),
    "equal theta": ((), {"rope_parameters": PLAIN, "rope_theta": 500, "head_dim": None}),
    "length beside": ((), {"rope_parameters": YARN, ORIGINAL: 32}),
    "length twice": ((), {"rope_parameters": {**YARN, ORIGINAL: 32}, ORIGINAL: 64}),
    "truncated": ((), {"rope_parameters": {**YARN, ORIGINAL: 32}}),
    "truncate null": ((), {"rope_parameters": {**YARN, ORIGINAL: 32, "truncate": None}}),
    "truncate false": ((), {"rope_parameters": {**YARN, ORIGINAL: 32, "truncate": False}}),
}


@torch.no_grad()
@pytest.mark.parametrize("case", READ)
def test_logits_equal_those_of_transformers(tmp_path, case):
    without, changes = READ[case]
    folder = stored(tmp_path, without, **changes)
    theirs = transformers.GPTNeoXForCausalLM.from_pretrained(folder).eval()
    ours, _ = read_model(folder)
    text = torch.randint(0, 64, (1, 100), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(ours(text), theirs(text).logits, atol=5e-5, rtol=1e-5)


def test_null_is_another_truncation_than_none_at_all(tmp_path):
    """So that the cases above can tell."""
    found = [
        read_model(stored(tmp_path / case, **READ[case][1]))[1].position_options["truncate"]
        for case in ("truncated", "truncate null", "truncate false")
    ]
    assert found == [True, False, False]


@pytest.mark.parametrize(
    ("without", "changes", "said"),
    [
        (("rope_parameters",), {"rope_theta": 500}, "rope_theta is 500, but .* turns by 10000"),
        (
            (),
            {"rope_parameters": PLAIN, "rope_theta": 10000},
            "rope_theta is 10000, but .* by 500.0",
        ),
        ((), {"head_dim": 16}, "head_dim is 16; .*, 32$"),
    ],
)
def test_what_transformers_overlooks_or_ours_has_not_is_refused(tmp_path, without, changes, said):
    with pytest.raises(ConfigError, match=f"config.json: {said}"):
        read_model(stored(tmp_path, without, **changes))
