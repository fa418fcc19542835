"""The same function as Hugging Face's GPT-NeoX, from the same random weights."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.standalone.model import GPT, ModelShape

transformers = pytest.importorskip("transformers")

NAMES = {
    "gpt_neox.embed_in.": "sequential.0.word_embeddings.",
    "gpt_neox.final_layer_norm.": "sequential.5.norm.",
    "embed_out.": "sequential.6.final_linear.",
    "lm_head.": "sequential.6.final_linear.",  # the same since transformers 5
    "mlp.dense_h_to_4h.": "mlp.linear1.",
    "mlp.dense_4h_to_h.": "mlp.linear2.",
}


def renamed(key: str) -> str:
    for theirs, ours in NAMES.items():
        key = key.replace(theirs, ours)
    if key.startswith("gpt_neox.layers."):
        number, rest = key.removeprefix("gpt_neox.layers.").split(".", 1)
        key = f"sequential.{int(number) + 2}.{rest}"
    return key


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_logits_equal_hugging_face(share, parallel):
    torch.manual_seed(3)
    config = transformers.GPTNeoXConfig(
        vocab_size=96,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=128,
        rotary_pct=share,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": share,
        },
        use_parallel_residual=parallel,
        max_position_embeddings=64,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    theirs = transformers.GPTNeoXForCausalLM(config).eval()
    shape = ModelShape(
        layers=2,
        hidden_size=48,
        heads=3,
        vocabulary=96,
        pos_emb="rotary",
        max_length=64,
        intermediate_size=128,
        parallel_residual=parallel,
        position_options={"rotary_pct": share},
    )
    ours = GPT(shape).eval()
    state = {renamed(key): tensor for key, tensor in theirs.state_dict().items()}
    ours.load_state_dict({key: state[key] for key in ours.state_dict()}, strict=True)
    tokens = torch.randint(0, 96, (2, 50))
    with torch.no_grad():
        wanted, found = theirs(tokens).logits, ours(tokens)
    assert wanted.abs().max() > 1
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
