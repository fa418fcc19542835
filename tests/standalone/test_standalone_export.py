"""Checkpoints for GPT-NeoX: the files it writes itself, cut for its shards, moments by name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import standalone_tools as tools
import torch

from megatron_patches.config import Config, ConfigError, from_mapping, load_run_config
from megatron_patches.positions import names
from megatron_patches.standalone import GPT, CheckpointError, export, load_model, moments
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.export import Form
from megatron_patches.standalone.moments import Moments, NoMoments
from megatron_patches.standalone.neox_entries import entries, random_states
from megatron_patches.standalone.weights import merge_shards, safe_load

SCRIPT = tools.ROOT / "checkpoints" / "convert.py"
NEOX = sorted((tools.GOLDENS / "neox" / "checkpoints").iterdir(), key=lambda path: path.name)
FORK = sorted(
    path
    for path in (tools.GOLDENS / "fork").iterdir()
    if (path / "layer_00-model_00-model_states.pt").is_file()
)
FORK_CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 12,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "no_weight_tying": True,
    "make_vocab_size_divisible_by": 64,
    "train_iters": 1,
    "train_micro_batch_size_per_gpu": 1,
}
# ZeRO's own, which an optimizer at ZeRO 0 does not have.
ZERO = {"optimizer", "param_shapes", "shared_params"}


def form_of(golden: Path) -> Form:
    method, stages, shards = golden.name.rsplit("-", 2)
    return Form("single" if stages == "pp0" else "layers", int(shards.removeprefix("mp")))


def a_model(**changes: Any) -> tuple[GPT, Config]:
    """A tiny model with random weights, biases and norms included, and its configuration."""
    merged = {**tools.TINY, "train_iters": 20, "save": "somewhere", **changes}
    config = from_mapping({key: value for key, value in merged.items() if value is not None})
    model = GPT(shape_of(config, config.padded_vocab_size))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            # legal for every position method
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.1)
    return model, config


def some_moments(model: GPT) -> Moments:
    generator = torch.Generator().manual_seed(3)
    found = Moments({}, {}, {})
    for number, (key, parameter) in enumerate(model.named_parameters()):
        found.steps[key] = 100 + number
        found.mean[key] = torch.randn(parameter.shape, generator=generator)
        found.square[key] = torch.rand(parameter.shape, generator=generator)
    return found


def assert_same_moments(found: Moments, wanted: Moments) -> None:
    assert found.steps == wanted.steps
    tools.assert_same(found.mean, wanted.mean)
    tools.assert_same(found.square, wanted.square)


def stored(folder: Path, rank: int = 0) -> dict[str, Any]:
    return safe_load(folder / f"mp_rank_{rank:02d}_model_states.pt")


# ---- the files of NeoX itself --------------------------------------------------------------------


@pytest.mark.parametrize("golden", NEOX, ids=lambda path: path.name)
def test_the_files_are_those_of_neox(golden, tmp_path):
    source = golden / "global_step30"
    config = load_run_config(golden)
    target = export.export(
        load_model(golden), tmp_path, step=30, config=config, form=form_of(golden)
    )
    assert {f.name for f in target.glob("*.pt")} == {f.name for f in source.glob("*.pt")}
    for file in source.glob("*.pt"):
        wanted, found = safe_load(file), safe_load(target / file.name)
        assert set(found) == set(wanted)
        if file.name.startswith("mp_rank"):
            for key in set(wanted) - ZERO - {"module"}:
                assert type(found[key]) is type(wanted[key]), key
                if "rng" not in key:
                    assert found[key] == wanted[key], key
            assert found["torch_rng_state"].shape == wanted["torch_rng_state"].shape
            assert found["cuda_rng_state"].shape == wanted["cuda_rng_state"].shape
            found, wanted = found["module"], wanted["module"]
            assert (found is None) == (wanted is None)
        if wanted is not None:
            tools.assert_same(found, wanted)
            assert all(found[key].dtype == tensor.dtype for key, tensor in wanted.items())


@pytest.mark.parametrize("golden", NEOX, ids=lambda path: path.name)
def test_the_groups_are_those_of_neox(golden):
    """NeoX names the parameters of its groups; it knows no group for position parameters."""
    wanted = [list(group) for group in stored(golden / "global_step30")["param_shapes"]]
    model = load_model(golden)
    prefix = "sequential." if form_of(golden).layout == "layers" else ""
    layouts = {
        place: [list(group.keys) for group in moments.groups(model, 0.1, place=place)]
        for place in ("last", "decaying", "plain")
    }
    found = [[key.removeprefix(prefix) for key in group] for group in layouts["last"]]
    if model.position_parameters():
        learned = found.pop()
        assert learned and all(".attention." in key for key in learned)
        assert [[key for key in group if key not in learned] for group in wanted] == found
        full = [prefix + key for group in wanted for key in group]
        assert full in [[k for group in layouts[p] for k in group] for p in ("decaying", "plain")]
    else:
        assert found == wanted


@pytest.mark.parametrize("golden", [*NEOX, *FORK], ids=lambda path: path.name)
def test_to_two_shards_of_layers_and_back(golden, tmp_path):
    config = load_run_config(golden) if golden in NEOX else None
    if config is None:
        config = from_mapping({**FORK_CONFIG, "pos_emb": golden.name.removesuffix("-bf16")})
    model = load_model(golden, config=config)
    dtype = {torch.bfloat16: "bfloat16"}.get(next(model.parameters()).dtype, "fp32")
    export.export(model, tmp_path / "two", step=5, config=config, form=Form("layers", 2, dtype))
    again = load_run_config(tmp_path / "two")
    two = load_model(tmp_path / "two")
    export.export(two, tmp_path / "one", step=5, config=again, form=Form("single", 1, dtype))
    one = load_model(tmp_path / "one")
    assert (one.state_dict().keys()) == model.state_dict().keys()
    tools.assert_same(one.state_dict(), model.state_dict())
    assert not list(tmp_path.glob("two/global_step5/*-model_02-*"))
    assert len(list(tmp_path.glob("two/global_step5/layer_*_model_states.pt"))) in (0, 10)
    assert len(list(tmp_path.glob("two/global_step5/layer_*-model_*-model_states.pt"))) == 10


@pytest.mark.parametrize("layout", ["single", "layers"])
@pytest.mark.parametrize("sharing", ["model", "layer"])
@pytest.mark.parametrize("method", names())
def test_every_method_is_cut_and_read_again(method, sharing, layout, tmp_path):
    model, config = a_model(pos_emb=method, position_sharing=sharing)
    adam = some_moments(model)
    target = export.export(
        model, tmp_path, step=3, config=config, form=Form(layout, 4), moments=adam
    )
    read = load_model(tmp_path)
    tools.assert_same(read.state_dict(), model.state_dict())
    assert_same_moments(moments.read_moments(target, read), adam)


def test_a_tied_output_has_no_file_of_its_own(tmp_path):
    model, config = a_model(no_weight_tying=False)
    target = export.export(model, tmp_path, step=1, config=config, form=Form("layers", 2))
    assert sorted(f.name for f in target.glob("layer_*-model_01-*")) == [
        f"layer_{number:02d}-model_01-model_states.pt" for number in (0, 2, 3, 5)
    ]
    tools.assert_same(load_model(tmp_path).state_dict(), model.state_dict())


def test_shards_hold_no_more_than_their_part(tmp_path):
    """A view would be saved with the whole tensor behind it."""
    model, config = a_model()
    target = export.export(model, tmp_path, step=1, config=config, form=Form("single", 4))
    for tensor in stored(target, 1)["module"].values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_cutting_is_the_inverse_of_merging():
    model, _ = a_model(pos_emb="rpe")
    state = export.whole(model, torch.float32)
    shards = export.cut(state, model, 2)
    assert shards[1]["sequential.2.attention.rpe.weight"].shape == (32, 2)
    rows = state["sequential.3.attention.query_key_value.weight"]
    assert torch.equal(shards[1]["sequential.3.attention.query_key_value.weight"], rows[24:])
    columns = state["sequential.3.attention.dense.weight"]
    assert torch.equal(shards[1]["sequential.3.attention.dense.weight"], columns[:, 8:])
    tools.assert_same(merge_shards(shards, model), state)


# ---- moments -------------------------------------------------------------------------------------


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


def _list(state: dict[str, Any]) -> None:
    state["state"] = [1]


@pytest.mark.parametrize(
    "damage",
    [_without, _short, _wrong_shape, _not_finite, _text, _no_groups, _odd_step, _list],
)
def test_an_optimizer_of_something_else_is_refused(damage, tmp_path):
    model, config = a_model()
    state = moments.optimizer_state(moments.groups(model, 0.1), config, 4, some_moments(model))
    damage(state)
    with pytest.raises(CheckpointError, match=r"mp_rank_00.*--fresh-optimizer") as caught:
        moments.read_moments(_one_file(tmp_path, {"optimizer": state}), model)
    assert not isinstance(caught.value, NoMoments)


# ---- configuration and the other entries ---------------------------------------------------------


def written(form: Form, **changes: Any) -> Config:
    model, config = a_model(**changes)
    return export.neox_config(config, model, form, Path("there"))


def test_the_configuration_follows_the_form():
    config = written(Form("layers", 2, "bfloat16"), finetune=True, load="base", iteration=9)
    assert (config.pipe_parallel_size, config.model_parallel_size) == (1, 2)
    assert config.effective_precision == "bfloat16" and config.load == config.save == "there"
    assert config.finetune and config.iteration is None
    config = written(Form("single", 1, "fp32"), finetune=True, load="base")
    assert (config.pipe_parallel_size, config.model_parallel_size) == (0, 1)
    assert not config.finetune  # it continues
    assert written(Form(), save=None).save is None


def test_older_keys_of_precision_give_way():
    old = {"precision": None, "fp16": {"enabled": True, "loss_scale": 0}}
    assert written(Form(dtype="fp16"), **old).fp16 == old["fp16"]
    changed = written(Form(dtype="fp32"), **old)
    assert changed.fp16 is None and changed.effective_precision == "fp32"


def test_only_weights_can_be_loaded_under_zero():
    assert written(Form(), zero_optimization={"stage": 1}).finetune
    assert not written(Form(), zero_optimization={"stage": 0}).finetune


@pytest.mark.parametrize(
    ("stored_divisor", "stored_shards", "rows", "shards", "wanted"),
    [
        (64, 1, 128, 1, 64),
        (64, 1, 128, 2, 64),
        (64, 2, 128, 2, 64),
        (64, 2, 128, 1, 128),  # NeoX could need 64 rows only
        (128, 1, 128, 2, 64),  # NeoX would need 256
        (128, 1, 64, 1, 64),  # `padded_vocab_size` in the run's file, which NeoX does not follow
    ],
)
def test_neox_pads_the_vocabulary_to_the_stored_rows(
    stored_divisor, stored_shards, rows, shards, wanted
):
    config = written(
        Form("single", shards),
        make_vocab_size_divisible_by=stored_divisor,
        model_parallel_size=stored_shards,
        padded_vocab_size=rows,
    )
    assert config.make_vocab_size_divisible_by == wanted


def test_shards_that_do_not_divide_are_refused():
    with pytest.raises(
        ConfigError, match=r"num_attention_heads 4.*choose --tensor-parallel 1 or 2"
    ):
        written(Form("single", 3))
    with pytest.raises(ConfigError, match=r"padded vocabulary 66.*choose --tensor-parallel 1 or 2"):
        written(Form("single", 4), padded_vocab_size=66)
    with pytest.raises(ConfigError, match="intermediate_size 65"):
        written(Form("single", 2), intermediate_size=65)


def test_positions_as_published_belong_to_one_dtype():
    with pytest.raises(ConfigError, match="position_precision.*leave --dtype out"):
        written(Form(dtype="bfloat16"), position_precision="as_published")
    written(Form(), position_precision="as_published")


def test_a_weight_too_large_for_half_precision(tmp_path):
    model, config = a_model()
    with torch.no_grad():
        model.sequential["2"].mlp.linear1.bias[0] = 1e6
    with pytest.raises(
        CheckpointError, match=r"sequential\.2\.mlp\.linear1\.bias.*choose bfloat16"
    ):
        export.export(model, tmp_path / "to", step=1, config=config, form=Form(dtype="fp16"))
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == []


def test_half_precision_keeps_the_positions_exact(tmp_path):
    model, config = a_model()
    target = export.export(
        model, tmp_path, step=1, config=config, form=Form("layers", 1, "bfloat16")
    )
    layer = safe_load(target / "layer_02-model_00-model_states.pt")
    kinds = {key: tensor.dtype for key, tensor in layer.items()}
    assert {kinds.pop(f"attention.rpe.{k}") for k in ("bias_p", "bias_a")} == {torch.float32}
    assert set(kinds.values()) == {torch.bfloat16}
    tools.assert_same(load_model(tmp_path).state_dict(), model.bfloat16().state_dict())


def test_progress_and_schedule():
    _, config = a_model(gradient_accumulation_steps=3, warmup=0.1)
    found = entries(config, 64, 7, 0, 1)
    assert (found["iteration"], found["global_steps"], found["global_samples"]) == (7, 7, 84)
    assert found["lr_scheduler"] == {
        "start_lr": 1e-2,
        "warmup_iter": 2.0,
        "num_iters": 7,
        "decay_style": "cosine",
        "end_iter": 20,
        "min_lr": 0.0,
    }


def test_random_states_of_both_kinds_of_device():
    _, config = a_model()
    cpu = random_states(config, 1)
    torch.Generator().set_state(cpu["cuda_rng_state"])
    drawn = torch.Generator().manual_seed(config.seed).get_state()
    assert torch.equal(cpu["torch_rng_state"], drawn)
    shard = torch.Generator().manual_seed(config.seed + 2719).get_state()
    assert torch.equal(cpu["rng_tracker_states"]["model-parallel-rng"], shard)
    _, config = a_model(distributed_backend="nccl")
    gpu = random_states(config, 1)["cuda_rng_state"]
    assert gpu.dtype == torch.uint8 and gpu.view(torch.int64).tolist() == [config.seed, 0]


# ---- writing -------------------------------------------------------------------------------------


def test_what_is_there_is_never_overwritten(tmp_path):
    model, config = a_model()
    export.export(model, tmp_path, step=1, config=config, form=Form())
    with pytest.raises(CheckpointError, match=r"global_step1: exists; choose another"):
        export.export(model, tmp_path, step=1, config=config, form=Form())
    with pytest.raises(CheckpointError, match=r"config\.yml: of another run or form"):
        export.export(model, tmp_path, step=2, config=config, form=Form("layers"))
    export.export(model, tmp_path, step=2, config=config, form=Form())
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert (tmp_path / "global_step1" / "configs" / "config.yml").is_file()


@pytest.mark.parametrize("fault", [OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing_that_looks_finished(fault, tmp_path, monkeypatch):
    model, config = a_model()
    export.export(model, tmp_path, step=1, config=config, form=Form("single", 2))
    before = (tmp_path / "latest").read_text()
    real, count = torch.save, [0]

    def failing(content, file):
        count[0] += 1
        if count[0] == 2:
            Path(file).write_bytes(b"half")
            raise fault
        real(content, file)

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(type(fault)):
        export.export(model, tmp_path, step=2, config=config, form=Form("single", 2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.yml",
        "global_step1",
        "latest",
    ]
    assert (tmp_path / "latest").read_text() == before
    monkeypatch.undo()
    (tmp_path / "writing-global_step7").mkdir()  # of a conversion that was killed
    export.export(model, tmp_path, step=2, config=config, form=Form("single", 2))
    assert not list(tmp_path.glob("writing-*"))


def test_latest_comes_last(tmp_path, monkeypatch):
    model, config = a_model()

    def failing(path, text):
        if path.name == "latest":
            assert (tmp_path / "global_step1" / "mp_rank_00_model_states.pt").is_file()
            assert (tmp_path / "config.yml").is_file()
            raise OSError("disk full")
        path.write_text(text)

    monkeypatch.setattr(export, "write_text", failing)
    with pytest.raises(OSError, match="disk full"):
        export.export(model, tmp_path, step=1, config=config, form=Form())
    assert not (tmp_path / "latest").exists()


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def convert() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_of_ours_with_its_moments(convert, trained, tmp_path, capsys):
    to = tmp_path / "to"
    asked = [str(trained), str(to), "--layout", "layers", "--tensor-parallel", "2"]
    assert convert.main(asked) == 0
    said = capsys.readouterr().out
    assert f"wrote {to}/global_step12: kerple_log" in said
    assert "Adam continues with its moments" in said
    assert "make_vocab_size_divisible_by: 32" in said  # TINY sets 64 rows itself
    read, source = load_model(to), load_model(trained)
    tools.assert_same(read.state_dict(), source.state_dict())
    assert_same_moments(
        moments.read_moments(to / "global_step12", read),
        moments.read_moments(trained / "global_step12", source),
    )
    assert stored(to / "global_step12")["iteration"] == 12


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fresh-optimizer"], "Adam starts fresh, as asked"),
        (["--dtype", "bfloat16"], "config.yml sets `finetune: true`"),
        (["--dtype", "bfloat16"], "Adam starts fresh: moments are converted for fp32"),
    ],
)
def test_it_says_when_adam_starts_fresh(convert, trained, tmp_path, capsys, options, said):
    assert convert.main([str(trained), str(tmp_path / "to"), *options]) == 0
    assert said in capsys.readouterr().out
    assert stored(tmp_path / "to" / "global_step12")["optimizer"]["state"] == {}
    assert load_run_config(tmp_path / "to").finetune == ("--dtype" in options)


def test_the_authors_files_need_a_configuration(convert, tmp_path, capsys):
    import yaml

    source = next(path for path in FORK if path.name == "kerple_log")
    assert convert.main([str(source), str(tmp_path / "to")]) == 2
    assert "neither config.yml nor a step folder" in capsys.readouterr().err
    file = tmp_path / "model.yml"
    file.write_text(yaml.safe_dump({**FORK_CONFIG, "pos_emb": "kerple_log"}))
    assert convert.main([str(source), str(tmp_path / "to"), "--config", str(file)]) == 0
    assert "Adam starts fresh" in capsys.readouterr().out
    module = stored(tmp_path / "to" / "global_step0")["module"]
    assert "sequential.2.mlp.linear1.weight" in module


def test_errors_are_one_line_and_an_exit_code(convert, trained, tmp_path, capsys):
    def fails(*arguments: str) -> tuple[int, str]:
        code = convert.main([*arguments])
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith("error: ")
        return code, error

    to = str(tmp_path / "to")
    code, error = fails(str(tmp_path / "nowhere"), to)
    assert code == 1 and "no such checkpoint folder" in error
    code, error = fails(str(trained), to, "--tensor-parallel", "3")
    assert code == 2 and "choose --tensor-parallel 1 or 2" in error
    assert not Path(to).exists()
    assert convert.main([str(trained), to]) == 0
    capsys.readouterr()
    code, error = fails(str(trained), to)
    assert code == 1 and "global_step12: exists" in error
    with pytest.raises(SystemExit) as caught:
        convert.main([str(trained)])
    assert caught.value.code == 2


def test_weights_of_an_unknown_dtype_need_one_named(convert, trained, tmp_path, capsys):
    source = tmp_path / "wide"
    model, config = load_model(trained).double(), load_run_config(trained)
    export.export(model, source, step=1, config=config, form=Form())
    file = source / "global_step1" / "mp_rank_00_model_states.pt"
    content = safe_load(file)
    content["module"] = {key: tensor.double() for key, tensor in content["module"].items()}
    torch.save(content, file)
    assert convert.main([str(source), str(tmp_path / "to")]) == 2
    assert "choose --dtype" in capsys.readouterr().err


def test_the_script_runs_from_anywhere(trained, tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(trained), "to", "--fresh-optimizer"],
        cwd=tmp_path,
        env=tools.clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "to" / "latest").read_text() == "global_step12"


def test_a_shape_that_is_not_the_models_is_no_fit(tmp_path):
    """Two matrices of one size must not trade places: the order decides, the shapes only confirm."""
    model, config = a_model()
    layout = moments.groups(model, 0.1)
    turned = [replace(layout[0], keys=layout[0].keys[::-1]), *layout[1:]]
    state = moments.optimizer_state(turned, config, 4, some_moments(model))
    with pytest.raises(CheckpointError, match="does not fit"):
        moments.read_moments(_one_file(tmp_path, {"optimizer": state}), model)
