"""Corrections of updates and gradients, and what pipeline stages share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from neox_tools import INSERTED, NATIVE, STUB, leaf, make_args, random

from megatron_patches.neox import fixes_model, install, uninstall


@pytest.mark.parametrize("off", [False, True])
def test_an_update_before_training_is_forgotten(clean, monkeypatch, off):
    import deepspeed

    def initialize(model, optimizer=None):
        if optimizer is not None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        return model, optimizer

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    install(home=STUB, fixes_off=["hidden_update"] if off else [])

    def train(hidden: bool) -> tuple[torch.Tensor, float]:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
        if hidden:
            assert deepspeed.initialize("model", optimizer=optimizer) == ("model", optimizer)
        for _ in range(3):
            weight.grad = torch.tensor([1.0, -2.0, 0.5])
            optimizer.step()
        return weight.detach(), optimizer.param_groups[0]["lr"]

    (found, rate), (plain, _) = train(True), train(False)
    assert torch.equal(found, plain) is not off
    assert rate == 0.1
    assert deepspeed.initialize("model") == ("model", None)
    uninstall()  # before the real function comes back, over which it would put this one
    assert deepspeed.initialize is initialize


class Grid:
    """DeepSpeed's grid, as far as clipping asks it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def get_tensor_model_parallel_rank(self) -> int:
        return self.rank

    def get_model_parallel_group(self) -> str:
        return "all stages and shards"


def rank_of(whole: dict[str, torch.Tensor], stage: int, shard: int) -> list[torch.nn.Parameter]:
    """What one of 2 stages x 2 shards holds of the gradients `whole`."""
    held = []
    for name, grad in whole.items():
        owner, parallel, shared = name.split()
        if owner not in ("both", f"stage{stage}"):
            continue
        part = grad.chunk(2)[shard] if parallel == "sharded" else grad
        parameter = torch.nn.Parameter(torch.zeros_like(part))
        parameter.grad = part.clone()
        parameter.model_parallel = parallel == "sharded"
        if shared == "tied":
            parameter.ds_pipe_replicated = stage > 0
        held.append(parameter)
    held.append(torch.nn.Parameter(torch.ones(2)))  # without a gradient
    return held


def kinds(owner: str) -> list[str]:
    return [f"{owner} sharded", f"{owner} replicated"]


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_over_stages_and_shards(monkeypatch, limit):
    names = [f"{owner} own" for stage in (0, 1) for owner in kinds(f"stage{stage}")]
    names += [f"{owner} tied" for owner in kinds("both")]
    whole = {name: random(4, seed=seed) for seed, name in enumerate(names)}
    union = [leaf(grad) for grad in whole.values()]
    for parameter, grad in zip(union, whole.values(), strict=True):
        parameter.grad = grad.clone()
    norm = float(torch.nn.utils.clip_grad_norm_(union, limit))
    clipped = {name: p.grad for name, p in zip(whole, union, strict=True)}

    places = [(stage, shard) for stage in (0, 1) for shard in (0, 1)]
    sums: list[torch.Tensor] = []

    def collect(total, group):
        assert group == "all stages and shards"
        sums.append(total.clone())

    monkeypatch.setattr("torch.distributed.all_reduce", collect)
    for stage, shard in places:
        fixes_model.clip_over_stages(rank_of(whole, stage, shard), float("inf"), Grid(shard))
    monkeypatch.setattr(
        "torch.distributed.all_reduce", lambda total, group: total.copy_(torch.stack(sums).sum())
    )
    for stage, shard in places:
        held = rank_of(whole, stage, shard)
        found = fixes_model.clip_over_stages(held, limit, Grid(shard))
        assert found == pytest.approx(norm, rel=1e-6)
        for parameter, expected in zip(held, rank_of(clipped, stage, shard), strict=True):
            if expected.grad is not None:
                torch.testing.assert_close(parameter.grad, expected.grad)


def test_deepspeeds_pipeline_clips_that_way(neox, monkeypatch):
    from deepspeed.runtime.pipe.engine import PipelineEngine

    monkeypatch.setattr("torch.distributed.all_reduce", lambda total, group: None)
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    engine = SimpleNamespace(
        module=SimpleNamespace(parameters=lambda: iter([parameter])),
        gradient_clipping=lambda: 1.0,
        grid=Grid(0),
    )
    PipelineEngine.clip_fp32_gradients(engine)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


def test_a_stage_without_gradients_still_takes_part(monkeypatch):
    asked = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda total, group: asked.append(group))
    assert fixes_model.clip_over_stages([torch.nn.Parameter(torch.ones(2))], 1.0, Grid(0)) == 0.0
    assert len(asked) == 1


# ---- pipeline stages -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", INSERTED)
@pytest.mark.parametrize("off", [False, True])
def test_copies_of_shared_parameters_are_tied_over_stages(clean, alone, name, off):
    install(home=STUB, fixes_off=["rpe_pipeline"] if off else [])
    from megatron import mpu
    from megatron.model.gpt2_model import GPT2ModelPipe

    args = {"pos_emb": name, "position_sharing": "model"}
    assert GPT2ModelPipe(make_args(**args)).get_tied_weights_and_groups() == []
    for rank in (0, 1):
        mpu.place(pipe=(rank, 2))
        made = GPT2ModelPipe(make_args(**args))
        pairs = made.get_tied_weights_and_groups()
        rpe = made.sequential[0].attention.rpe
        own = [] if off and name in NATIVE else list(rpe.parameters())
        assert [id(parameter) for parameter, _ in pairs] == [id(p) for p in own]
        assert all(group is mpu.get_pipe_parallel_group() for _, group in pairs)
        assert all(p.ds_pipe_replicated is (rank > 0) for p in own)


@pytest.mark.parametrize("name", INSERTED)
def test_parameters_of_single_layers_are_not_tied(neox, alone, name):
    from megatron import mpu
    from megatron.model.gpt2_model import GPT2ModelPipe

    mpu.place(pipe=(1, 2))
    made = GPT2ModelPipe(make_args(pos_emb=name, position_sharing="layer"))
    assert made.get_tied_weights_and_groups() == []


@pytest.mark.parametrize(
    ("stages", "length", "dynamic"), [(2, 24, True), (2, 12, False), (1, 24, False)]
)
def test_another_validation_length_over_stages(neox, alone, stages, length, dynamic):
    from megatron import mpu
    from megatron.model.gpt2_model import GPT2ModelPipe

    mpu.place(pipe=(0, stages))
    made = GPT2ModelPipe(make_args(pos_emb=INSERTED[0], seq_length_val=length))
    assert getattr(made, "dynamic_shape", False) is dynamic
