"""Adam's moments on their way between optimizers: by name, in NeoX's order, cut like the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from export_cases import NEOX, a_model, assert_same_moments, form_of, some_moments, stored

from megatron_patches.config import load_run_config
from megatron_patches.standalone import CheckpointError, export, load_model, moments
from megatron_patches.standalone.export import Form
from megatron_patches.standalone.moments import NoMoments


@pytest.mark.parametrize("golden", NEOX, ids=lambda path: path.name)
def test_the_groups_are_those_of_neox(golden):
    """NeoX names the parameters of its groups; by itself it has no group for position parameters."""
    prefix = "sequential." if form_of(golden).layout == "layers" else ""
    shapes = stored(golden / "global_step30")["param_shapes"]
    wanted = [[prefix + key for key in group] for group in shapes]
    model = load_model(golden)
    last, decaying, plain = (
        [list(group.keys) for group in moments.groups(model, 0.1, place=place)]
        for place in ("last", "decaying", "plain")
    )
    if not model.position_parameters():
        assert last == decaying == plain == wanted
        return
    assert wanted in (decaying, plain)
    learned = last.pop()
    assert learned and all(".attention." in key for key in learned)
    assert last == [[key for key in group if key not in learned] for group in wanted]


def test_moments_of_our_own_run_by_name(trained):
    """The engine's numbers against those of an optimizer built anew in the engine's own order."""
    from megatron_patches.standalone.optimizer import parameter_groups

    folder, model = trained / "global_step12", load_model(trained)
    found = moments.read_moments(folder, model)
    assert set(found.steps.values()) == {12}
    raw = stored(folder)["optimizer"]["state"]
    name_of = {id(p): key for key, p in model.named_parameters()}
    order = [p for g in parameter_groups(model, load_run_config(trained)) for p in g["params"]]
    assert len(order) == len(raw) == len(found.mean)
    for number, parameter in enumerate(order):
        assert torch.equal(raw[number]["exp_avg"], found.mean[name_of[id(parameter)]])
        assert torch.equal(raw[number]["exp_avg_sq"], found.square[name_of[id(parameter)]])


@pytest.mark.parametrize("decay", [0.1, 0.0])
@pytest.mark.parametrize("on_positions", [True, False])
def test_an_optimizer_in_neox_order_takes_the_same_next_update(decay, on_positions, tmp_path):
    model, config = a_model(weight_decay=decay, position_weight_decay=on_positions)
    adam = some_moments(model)
    target = export.export(model, tmp_path, step=6, config=config, form=Form(), moments=adam)
    optimizer = stored(target)["optimizer"]
    layout = moments.groups(model, decay, decay if on_positions else 0.0)
    main = (
        ["weight_decay_params", "no_weight_decay_params"] if decay else ["no_weight_decay_params"]
    )
    assert [g["name"] for g in optimizer["param_groups"]] == [*main, "position_params"]
    assert layout[-1].keys == (
        "sequential.2.attention.rpe.bias_p",
        "sequential.2.attention.rpe.bias_a",
    )
    rates = [decay, 0.0][: len(main)] if decay else [0.0]
    wanted = [*rates, decay if on_positions else 0.0]
    assert [g["weight_decay"] for g in optimizer["param_groups"]] == wanted

    parameters = dict(model.named_parameters())
    copies = {key: p.detach().clone().requires_grad_() for key, p in parameters.items()}
    loaded = torch.optim.AdamW([{"params": [copies[k] for k in g.keys]} for g in layout])
    loaded.load_state_dict(optimizer)
    single = torch.optim.AdamW(
        [{"params": [p], "weight_decay": _rate(layout, key)} for key, p in parameters.items()],
        lr=optimizer["param_groups"][0]["lr"],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for key, parameter in parameters.items():
        parameter.grad = torch.ones_like(parameter)
        copies[key].grad = torch.ones_like(parameter)
        single.state[parameter] = {
            "step": torch.tensor(float(adam.steps[key])),
            "exp_avg": adam.mean[key].clone(),
            "exp_avg_sq": adam.square[key].clone(),
        }
    loaded.step()
    single.step()
    for key, parameter in parameters.items():
        torch.testing.assert_close(copies[key], parameter, rtol=0, atol=1e-7)


def _rate(layout: list[moments.Group], key: str) -> float:
    return next(group.weight_decay for group in layout if key in group.keys)


def test_moments_are_cut_like_the_weights(tmp_path):
    model, config = a_model()
    adam = some_moments(model)
    target = export.export(
        model, tmp_path, step=6, config=config, form=Form("layers", 2), moments=adam
    )
    keys = [key for group in moments.groups(model, 0.1) for key in group.keys]
    state = stored(target, 1)["optimizer"]["state"]
    assert {type(entry["step"]) for entry in state.values()} == {int}
    parts = {key: state[keys.index(key)]["exp_avg"] for key in keys}
    for key, part in (
        ("sequential.0.word_embeddings.weight", slice(32, None)),
        ("sequential.2.attention.rpe.bias_a", slice(2, None)),
        ("sequential.2.mlp.linear1.bias", slice(32, None)),
        ("sequential.2.mlp.linear2.bias", slice(None)),
    ):
        assert torch.equal(parts[key], adam.mean[key][part])
    key = "sequential.3.mlp.linear2.weight"
    assert torch.equal(parts[key], adam.mean[key][:, 32:])


@pytest.mark.parametrize("place", ["last", "decaying", "plain"])
@pytest.mark.parametrize("decay", [0.1, 0.0])
def test_moments_are_found_wherever_neox_keeps_the_position_parameters(place, decay, tmp_path):
    model, config = a_model()
    adam = some_moments(model)
    layout = moments.groups(model, decay, place=place)
    state = moments.optimizer_state(layout, config, 4, adam)
    torch.save({"optimizer": state}, tmp_path / "mp_rank_00_model_states.pt")
    assert_same_moments(moments.read_moments(tmp_path, model), adam)


def test_apex_counts_updates_in_the_group(tmp_path):
    model, config = a_model()
    state = moments.optimizer_state(moments.groups(model, 0.1), config, 4, some_moments(model))
    for entry in state["state"].values():
        del entry["step"]
    for number, group in enumerate(state["param_groups"]):
        group["step"] = number
    torch.save({"optimizer": state}, tmp_path / "mp_rank_00_model_states.pt")
    found = moments.read_moments(tmp_path, model)
    assert found.steps["sequential.0.word_embeddings.weight"] == 0
    assert found.steps["sequential.2.attention.rpe.bias_a"] == 2


def test_without_moments_the_groups_are_there_and_the_state_is_empty(tmp_path):
    model, config = a_model()
    optimizer = stored(export.export(model, tmp_path, step=6, config=config, form=Form()))[
        "optimizer"
    ]
    assert optimizer["state"] == {}
    assert [len(g["params"]) for g in optimizer["param_groups"]] == [10, 18, 2]
    assert not any("step" in group for group in optimizer["param_groups"])


def _one_file(folder: Path, content: object) -> Path:
    torch.save(content, folder / "mp_rank_00_model_states.pt")
    return folder


def test_checkpoints_without_readable_moments_say_why(tmp_path):
    model, config = a_model()
    state = moments.optimizer_state(moments.groups(model, 0.1), config, 4, some_moments(model))
    with pytest.raises(NoMoments, match="weights alone"):
        moments.read_moments(tmp_path, model)
    with pytest.raises(NoMoments, match="partitions of ZeRO"):
        moments.read_moments(_one_file(tmp_path, {"optimizer": None}), model)
    with pytest.raises(NoMoments, match="done nothing yet"):
        moments.read_moments(_one_file(tmp_path, {"optimizer": {**state, "state": {}}}), model)
    lion = {number: {"exp_avg": torch.ones(1)} for number in state["state"]}
    with pytest.raises(NoMoments, match="not trained with Adam"):
        moments.read_moments(_one_file(tmp_path, {"optimizer": {**state, "state": lion}}), model)
    with pytest.raises(NoMoments, match="half precision"):
        moments.read_moments(tmp_path, a_model()[0].bfloat16())
    torch.save({}, tmp_path / "layer_00-model_00-model_states.pt")
    torch.save({}, tmp_path / "mp_rank_01_model_states.pt")
    with pytest.raises(NoMoments, match="several pipeline stages"):
        moments.read_moments(tmp_path, model)


def _without(state: dict[str, Any]) -> None:
    del state["state"][3]


def _short(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()


def _wrong_shape(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = torch.ones(2, 2)


def _not_finite(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg_sq"][0, 0] = float("nan")


def _text(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = "text"


def _no_groups(state: dict[str, Any]) -> None:
    state["param_groups"] = [1, 2, 3]


def _odd_step(state: dict[str, Any]) -> None:
    state["state"][0]["step"] = "many"


def _endless(state: dict[str, Any]) -> None:
    state["state"][0]["step"] = float("inf")


def _backwards(state: dict[str, Any]) -> None:
    state["state"][0]["step"] = -5


def _negative_square(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg_sq"].neg_()


def _whole_numbers(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].long()


def _half(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].half()


def _sparse(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].to_sparse()


def _list(state: dict[str, Any]) -> None:
    state["state"] = [1]


@pytest.mark.parametrize(
    "damage",
    [
        *(_without, _short, _wrong_shape, _not_finite, _text, _no_groups, _odd_step, _list),
        *(_endless, _backwards, _negative_square, _whole_numbers, _half, _sparse),
    ],
)
def test_an_optimizer_of_something_else_is_refused(damage, tmp_path):
    model, config = a_model()
    state = moments.optimizer_state(moments.groups(model, 0.1), config, 4, some_moments(model))
    damage(state)
    with pytest.raises(CheckpointError, match=r"mp_rank_00.*--fresh-optimizer") as caught:
        moments.read_moments(_one_file(tmp_path, {"optimizer": state}), model)
    assert not isinstance(caught.value, NoMoments)


def test_a_shape_that_is_not_the_models_is_no_fit(tmp_path):
    """Two matrices of one size must not trade places: the order decides, the shapes only confirm."""
    model, config = a_model()
    layout = moments.groups(model, 0.1)
    turned = [replace(layout[0], keys=layout[0].keys[::-1]), *layout[1:]]
    state = moments.optimizer_state(turned, config, 4, some_moments(model))
    with pytest.raises(CheckpointError, match="does not fit"):
        moments.read_moments(_one_file(tmp_path, {"optimizer": state}), model)


def test_shards_whose_moments_disagree_are_refused(tmp_path):
    model, config = a_model()
    adam, form = some_moments(model), Form("single", 2)
    target = export.export(model, tmp_path, step=6, config=config, form=form, moments=adam)
    content = stored(target, 1)
    keys = [key for group in moments.groups(model, 0.1) for key in group.keys]
    number = keys.index("sequential.5.norm.weight")
    content["optimizer"]["state"][number]["exp_avg"] += 1
    torch.save(content, target / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match=r"sequential\.5\.norm\.weight: should be the same"):
        moments.read_moments(target, model)


def test_shards_that_count_different_updates_are_refused(tmp_path):
    model, config = a_model()
    adam, form = some_moments(model), Form("single", 2)
    target = export.export(model, tmp_path, step=6, config=config, form=form, moments=adam)
    content = stored(target, 1)
    content["optimizer"]["state"][0]["step"] += 1
    torch.save(content, target / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="shards count different updates"):
        moments.read_moments(target, model)
