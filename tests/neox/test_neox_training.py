"""The training loop: parameter groups, legal parameters, statistics over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from neox_tools import (
    ATTEND_ONLY,
    INSERTED,
    LEARNED,
    LEARNS_ONCE,
    NATIVE,
    REPLICATED,
    SLOT,
    Engine,
    carrying,
    make_model,
    parameters_of,
    random,
)

from megatron_patches.neox import training
from megatron_patches.neox.model import own_methods, position_parameters
from megatron_patches.positions import build
from megatron_patches.training import position_state

BOUNDED = [
    name
    for name in INSERTED
    if name not in NATIVE and build(name, heads=2, head_dim=4, hidden_size=8, max_length=8).bounds
]

pytestmark = pytest.mark.usefixtures("shared")


# ---- parameter groups ----------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["model", "layer"])
@pytest.mark.parametrize(("decay", "expected"), [(False, 0.0), (True, 0.1)])
@pytest.mark.parametrize("name", [*LEARNED, *(n for n in ATTEND_ONLY if parameters_of(n))])
def test_position_parameters_are_the_last_group(name, decay, expected, sharing):
    from megatron.training import get_optimizer

    changes = {"position_weight_decay": decay, "position_sharing": sharing, **carrying(name)}
    made = make_model(name, weight_decay=0.1, **changes)
    groups = get_optimizer(made, made.neox_args)
    assert [group["name"] for group in groups[:-1]] == [
        "weight_decay_params",
        "no_weight_decay_params",
    ]
    last = groups[-1]
    expected_ids = {
        id(p) for key, p in made.named_parameters(remove_duplicate=False) if f".{SLOT}." in key
    }
    assert {id(p) for p in last["params"]} == expected_ids and expected_ids
    assert (last["name"], last["weight_decay"]) == ("position_params", expected)
    every = [id(p) for group in groups for p in group["params"]]
    assert sorted(every) == sorted(id(p) for p in made.parameters())  # each once
    torch.optim.AdamW(groups, lr=0.1)  # torch refuses one that stands twice


@pytest.mark.parametrize("name", sorted({*NATIVE, *INSERTED} - {*LEARNED}))
def test_without_position_parameters_the_groups_are_neoxs(name):
    from megatron.training import get_optimizer

    made = make_model(name)
    assert len(get_optimizer(made, made.neox_args)) == 2 and position_parameters(made) == []


# ---- legal parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOUNDED)
def test_parameters_are_legal_after_every_step(name):
    from megatron import training as loop

    made = make_model(name)
    (method,) = own_methods(made)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.copy_(torch.tensor([-3.0, 0.5, 9.0, 0.002])[:, None, None])
    loop.train_step(made.neox_args, None, iter([random(2, 12, 32)]), Engine(made), optimizer, None)
    for key, (low, high) in method.bounds.items():
        stored = method.get_parameter(key).flatten()
        expected = torch.tensor([-3.0, 0.5, 9.0, 0.002]).clamp(low, high)
        assert torch.equal(stored, expected)


def test_the_optimizers_own_copies_are_moved_as_well(monkeypatch):
    (method,) = own_methods(make_model(LEARNS_ONCE))
    copies = {id(p): torch.full_like(p, -1.0) for p in method.parameters()}
    first, *others = method.parameters()
    first.data.fill_(-1.0)
    for parameter in method.parameters():
        parameter._hp_mapping = "somewhere"
    monkeypatch.setattr("deepspeed.utils.safe_get_full_fp32_param", lambda p: copies[id(p)])
    monkeypatch.setattr(
        "deepspeed.utils.safe_set_full_fp32_param", lambda p, v: copies[id(p)].copy_(v)
    )
    position_state.project([method], object())
    assert torch.equal(first, torch.full_like(first, 0.01))
    assert torch.equal(copies[id(first)], torch.full_like(first, 0.01))
    assert all(torch.equal(copies[id(p)], torch.full_like(p, -1.0)) for p in others)


# ---- statistics ----------------------------------------------------------------------------------


def shards(name: str, count: int, **changes: Any) -> list[Any]:
    from megatron import mpu

    made = []
    for rank in range(count):
        mpu.place(model=(rank, count))
        made.append(make_model(name, model_parallel_size=count, **changes))
    return made


@pytest.mark.parametrize("sharing", ["model", "layer"])
@pytest.mark.parametrize("name", [name for name in LEARNED if name not in REPLICATED])
def test_statistics_are_those_of_all_heads(monkeypatch, name, sharing):
    """Two shards: what each rank is told by `all_gather` stands in the other one's model."""
    changes = {"position_sharing": sharing, "attention_config": [[["attend"], "all"]]}
    whole = make_model(name, **changes)
    methods = own_methods(whole)
    expected = {}
    for number, method in enumerate(methods):
        for key, parameter in method.named_parameters():
            values = parameter.detach().double().flatten()
            prefix = f"position/layer{number}/" if sharing == "layer" else "position/"
            expected |= {
                f"{prefix}{key}_mean": values.mean(),
                f"{prefix}{key}_std": values.std(),
                f"{prefix}{key}_min": values.min(),
                f"{prefix}{key}_max": values.max(),
            }
    made = shards(name, 2, **changes)
    pairs = list(zip(*(list(position_parameters(m)) for m in made), strict=True))

    def all_gather(parts, values, group):
        known = next(pair for pair in pairs if torch.equal(pair[1], values))
        for part, parameter in zip(parts, known, strict=True):
            part.copy_(parameter.detach())

    monkeypatch.setattr("torch.distributed.all_gather", all_gather)
    found = training.statistics(made[1])  # this process is rank 1
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(float(value), rel=1e-6), key


def test_statistics_of_layers_come_from_all_stages(monkeypatch, alone):
    from megatron import mpu

    made = make_model(LEARNS_ONCE, position_sharing="layer")
    alone_numbers = training.statistics(made)
    assert {key.split("/")[1] for key in alone_numbers} == {"layer0", "layer1"}
    mpu.place(pipe=(1, 2))

    def all_gather_object(stages, numbers, group):
        stages[:] = [{"position/layer7/x_mean": 1.0}, numbers]

    monkeypatch.setattr("torch.distributed.all_gather_object", all_gather_object)
    found = training.statistics(made)
    assert found == {"position/layer7/x_mean": 1.0, **alone_numbers}


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_neoxs_own_methods_have_no_statistics_of_ours(name):
    assert training.statistics(make_model(name)) == {}
