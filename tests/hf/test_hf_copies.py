"""Copies of transformers' models with a position method: deep, pickled, and what is saved of them."""

from __future__ import annotations

import copy
import io

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from megatron_patches.hf import modeling_gpt_positions as carried  # noqa: E402
from megatron_patches.hf import use_positions  # noqa: E402

TEXT = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(4))


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def llama(name: str = "kerple_log"):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    use_positions(model, name)
    return model


@torch.no_grad()
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_a_copy_stands_on_its_own(duplicate):
    model = llama()
    wanted = model(TEXT).logits
    twin = duplicate(model)
    for made in (model, twin):
        made.position_methods[0].bias_p.fill_(-5.0)  # not legal
    # Saving one makes legal what is saved of it, and leaves the other alone.
    saved = twin.state_dict()["position_methods.0.bias_p"]
    assert torch.equal(saved, torch.full((4, 1, 1), 0.01))
    assert torch.equal(model.position_methods[0].bias_p, torch.full((4, 1, 1), -5.0))
    assert torch.equal(model.state_dict()["position_methods.0.bias_p"], saved)
    twin.position_methods[0].load_state_dict(llama().position_methods[0].state_dict())
    assert torch.equal(twin(TEXT).logits, wanted)
    assert not torch.equal(model(TEXT).logits, wanted)


@torch.no_grad()
@pytest.mark.parametrize("name", carried.METHODS)
def test_a_carried_model_can_be_pickled(name):
    torch.manual_seed(0)
    config = carried.GPTPositionsConfig(
        **{"vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3},
        **{"intermediate_size": 48, "initializer_range": 0.3, "position": name},
    )
    model = carried.GPTPositionsForCausalLM(config).eval()
    wanted = model(TEXT).logits
    for twin in (pickled(model), copy.deepcopy(model)):
        assert torch.equal(twin(TEXT).logits, wanted)


def test_the_kernels_by_hand():
    """At distance 3 with a = 0.5, p = 2, e = 1.5, from the paper's formulas."""
    value = {"bias_p": 2.0, "bias_a": 0.5, "bias_e": 1.5, "wei_a": 0.5, "wei_p": 2.0}
    numbers = {key: torch.tensor(number) for key, number in value.items()}
    wanted = {
        "kerple_log": -1.8325815,  # -2 log(1 + 0.5 * 3)
        "kerple_log3": -2.5607986,  # -2 log(1 + 0.5 * 3^1.5)
        "kerple_gauss2": 0.0222180,  # 2 exp(-0.5 * 9)
        "kerple_gauss3": 0.1488332,  # 2 exp(-0.5 * 3^1.5)
        "kerple_weight1": 0.0111090,  # exp(-0.5 * 9)
    }
    for name, number in wanted.items():
        kernel = carried.KERPLE[name]
        found = (kernel.bias or kernel.weight)(numbers, torch.tensor(3.0))
        assert float(found) == pytest.approx(number, abs=2e-6)
