"""How large a model is: by arithmetic, built, and the paper's 162M taking a step."""

from __future__ import annotations

import dataclasses

import pytest
import standalone_tools as tools
import torch

from megatron_patches import positions
from megatron_patches.config import compose
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.describe import parameter_count
from megatron_patches.standalone.model import GPT, ModelShape

SMALL = ModelShape(
    layers=3, hidden_size=24, heads=2, vocabulary=50, pos_emb="none", max_length=16, seed=5
)


@pytest.mark.parametrize("changes", [{}, {"tied_output": True}, {"intermediate_size": 40}])
@pytest.mark.parametrize("sharing", [None, "model", "layer"])
@pytest.mark.parametrize("name", positions.names())
def test_the_arithmetic_equals_the_model(name, sharing, changes):
    shape = dataclasses.replace(SMALL, pos_emb=name, position_sharing=sharing, **changes)
    model = GPT(shape)
    assert parameter_count(shape) == model.parameter_count()
    tokens = torch.arange(12).view(2, 6)
    assert model(tokens).shape == (2, 6, 50)
    model(tokens, tokens).backward()
    assert all(p.grad is not None for p in model.position_parameters())


def test_one_shared_method_or_one_a_layer():
    def count(sharing: str) -> int:
        shape = dataclasses.replace(SMALL, pos_emb="kerple_log", position_sharing=sharing)
        return len({id(p) for p in GPT(shape).position_parameters()})

    assert count("model") == 2 and count("layer") == 6


def test_the_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    first = GPT(SMALL).state_dict()
    torch.manual_seed(2)
    torch.rand(5)
    tools.assert_same(GPT(SMALL).state_dict(), first)
    other = GPT(dataclasses.replace(SMALL, seed=6)).state_dict()
    key = "sequential.2.mlp.linear1.weight"
    assert not torch.equal(other[key], first[key])


def test_methods_of_one_seed_begin_with_the_same_other_weights():
    """A difference between methods must not be one of the first draw."""
    plain = GPT(SMALL).state_dict()
    for name in ("kerple_log", "rpe", "learned"):
        other = GPT(dataclasses.replace(SMALL, pos_emb=name)).state_dict()
        assert all(torch.equal(other[key], tensor) for key, tensor in plain.items()), name


def test_deviations_of_the_first_weights():
    shape = dataclasses.replace(
        SMALL,
        hidden_size=256,
        init_method="small_init",
        output_layer_init_method="wang_init",
    )
    state = GPT(shape).state_dict()
    small, wang = (2 / (5 * 256)) ** 0.5, 2 / (3 * 256**0.5)
    for key, wanted in (
        ("2.attention.query_key_value", small),
        ("2.mlp.linear1", small),
        ("2.attention.dense", wang),
        ("4.mlp.linear2", wang),
        ("7.final_linear", small),
    ):
        assert state[f"sequential.{key}.weight"].std().item() == pytest.approx(wanted, rel=0.03)
    with pytest.raises(ValueError, match="init method 'orthogonal' is not known"):
        GPT(dataclasses.replace(SMALL, init_method="orthogonal"))


def test_the_paper_model_has_162m_parameters_and_takes_a_step():
    files = [tools.ROOT / "configs" / file for file in ("base/162m.yml", "method/kerple_log.yml")]
    config = compose(files, ["padded_vocab_size=50304"])
    shape = shape_of(config)
    # 12 x (12 x 768^2 + 13 x 768) + 2 x 768 + 2 x 50304 x 768 + 24; the paper says 162M
    assert parameter_count(shape) == 162_322_968
    model = GPT(shape).train()
    assert model.parameter_count() == parameter_count(shape)
    assert shape.checkpoint_activations
    tokens = torch.randint(0, 50257, (1, 65), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    losses = []
    for _ in range(2):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] == pytest.approx(10.83, abs=0.15) and losses[1] < losses[0] - 0.3
