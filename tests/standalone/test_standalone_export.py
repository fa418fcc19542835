"""Checkpoints for GPT-NeoX: the files that it writes itself, cut for its shards, never half written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import standalone_tools as tools
import torch
from export_cases import (
    FORK,
    FORK_CONFIG,
    NEOX,
    a_model,
    assert_same_moments,
    form_of,
    some_moments,
    stored,
)

from megatron_patches.config import Config, ConfigError, from_mapping, load_run_config
from megatron_patches.positions import names
from megatron_patches.standalone import CheckpointError, export, load_model, moments
from megatron_patches.standalone.export import Form
from megatron_patches.standalone.neox_entries import entries, random_states
from megatron_patches.standalone.weights import merge_shards, safe_load

# ZeRO's own, which an optimizer at ZeRO 0 does not have.
ZERO = {"optimizer", "param_shapes", "shared_params"}


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
    tools.assert_same(one.state_dict(), model.state_dict())
    assert len(list(tmp_path.glob("two/global_step5/layer_*-model_*-model_states.pt"))) == 10


@pytest.mark.parametrize(("sharing", "layout"), [("model", "single"), ("layer", "layers")])
@pytest.mark.parametrize("method", names())
def test_every_method_is_cut_and_read_again(method, sharing, layout, tmp_path):
    model, config = a_model(pos_emb=method, position_sharing=sharing)
    adam = some_moments(model)
    if model.position_method.mixes_heads:
        with pytest.raises(ConfigError, match=f"{method} mixes .*choose --tensor-parallel 1"):
            export.export(model, tmp_path, step=3, config=config, form=Form(layout, 4))
        assert not list(tmp_path.iterdir())
        return
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


def test_buffers_are_named_as_in_their_layout(tmp_path):
    model, config = a_model(pos_emb="alibi")
    for layout, prefix in (("single", "sequential."), ("layers", "")):
        target = export.export(model, tmp_path / layout, step=1, config=config, form=Form(layout))
        wanted = [f"{prefix}{layer}.attention.alibi_embed.slopes" for layer in (2, 3)]
        assert stored(target)["buffer_names"] == wanted


def test_shards_hold_no_more_than_their_part(tmp_path):
    """A view would be saved with the whole tensor behind it."""
    model, config = a_model()
    target = export.export(model, tmp_path, step=1, config=config, form=Form("single", 4))
    for tensor in stored(target, 1)["module"].values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_tensors_inside_a_network_of_the_method_are_its_own():
    """By their names: cut along heads, and float32 in a bfloat16 file."""
    model, _ = a_model(pos_emb="fire")
    state = export.whole(model, torch.bfloat16)
    key = "sequential.2.attention.rpe.mlp.2.weight"
    assert state[key].dtype == torch.float32 and state[key].shape == (4, 32)
    assert [shard[key].shape for shard in export.cut(state, model, 2)] == [(2, 32)] * 2


def test_cutting_is_the_inverse_of_merging():
    model, _ = a_model(pos_emb="rpe")
    state = export.whole(model, torch.float32)
    shards = export.cut(state, model, 2)
    assert shards[1]["sequential.2.attention.rpe.weight"].shape == (32, 2)
    rows = state["sequential.3.attention.query_key_value.weight"]
    assert torch.equal(shards[1]["sequential.3.attention.query_key_value.weight"], rows[24:])
    columns = state["sequential.3.attention.dense.weight"]
    assert torch.equal(shards[1]["sequential.3.attention.dense.weight"], columns[:, 8:])
    tools.assert_same(merge_shards(shards, model, "run"), state)


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
    schedule = found["lr_scheduler"]
    assert (schedule["warmup_iter"], schedule["num_iters"], schedule["end_iter"]) == (2.0, 7, 20)


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
