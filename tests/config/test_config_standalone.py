"""The standalone engine refuses, by key and place, what it would compute differently."""

from __future__ import annotations

import pytest

from megatron_patches.config import ConfigError, check_standalone

REFUSED = [
    "hidden_dropout=0.1",
    "attention_dropout=0.1",
    "norm=rmsnorm",
    "activation=swiglu",
    "gpt_j_tied=true",
    "init_method=orthogonal",
    "output_layer_init_method=single_residual_scaled_normal",
    "model_parallel_size=2",
    "pipe_parallel_size=2",
    "attention_config=[[[flash],2]]",
    "attention_config=[[[global,sparse_fixed],1]]",
    "attention_config=[mamba,mamba]",
    "apply_query_key_layer_scaling=true",
    "opt_pos_emb_offset=2",
    "num_kv_heads=2",
    "moe_num_experts=8",
    "use_mup=true",
    "te_mha=true",
    "use_qk_layernorm=true",
    "use_bias_in_mlp=false",
    "num_unique_layers=1",
    "optimizer.type=lion",
    "optimizer.params.weight_decay=0.1",
    "scheduler={type: WarmupLR}",
    "eod_mask_loss=true",
    "train_impl=dpo",
    "pack_impl=unpacked",
    "train_label_data_paths=[x]",
    "fp16_lm_cross_entropy=true",
    "curriculum_learning={enabled: true}",
    "deepspeed_extra_args={bf16: {enabled: true}}",
    "deepspeed=false",
    "expansion_factor=2.0",
    "lr_decay_fraction=0.5",
    "train_iters=0",
    "iteration=5",
]
ACCEPTED = [
    "pipe_parallel_size=1",
    "attention_config=[[[global],2]]",
    "num_kv_heads=4",
    "scaled_upper_triang_masked_softmax_fusion=true",
    "bias_gelu_fusion=true",
    "rope_fusion=true",
    "gpt_j_residual=true",
    "no_weight_tying=true",
    "optimizer.type=adam",
    "sliding_window_width=8",
    "mamba_inner_func_fusion=true",
    "rms_norm_epsilon=1.0e-6",
    "fp32_allreduce=true",
    "use_comet=true",
    "position_options={x: 1}",
]


@pytest.mark.parametrize("override", REFUSED)
def test_what_would_change_the_maths_is_refused(config, override):
    made = config("", override)
    with pytest.raises(ConfigError) as caught:
        check_standalone(made)
    line = str(caught.value)
    assert line.startswith(f"`{override.partition('=')[0]}` (--set): the standalone engine cannot")
    assert "\n" not in line


@pytest.mark.parametrize("override", ACCEPTED)
def test_what_leaves_the_maths_alone_is_accepted(config, override):
    check_standalone(config("", override))


@pytest.mark.parametrize("overrides", [["hidden_dropout=0.1"], ["train_iters=0"], ["iteration=5"]])
def test_a_model_is_read_whatever_its_training_was(config, overrides):
    check_standalone(config("", *overrides), training=False)


def test_a_step_to_start_from_needs_what_it_is_a_step_of(config):
    check_standalone(config("", "iteration=5", "load=checkpoints/other"))
    with pytest.raises(ConfigError, match="`iteration` .* it names the step of a `load`"):
        check_standalone(config("", "iteration=5"))


def test_all_refusals_come_in_one_error_with_their_lines(config):
    made = config("hidden_dropout: 0.1\nnorm: rmsnorm\noptimizer:\n  type: sgd\n")
    with pytest.raises(ConfigError) as caught:
        check_standalone(made)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    for number in (8, 9, 11):
        assert any(f"run.yml:{number})" in line for line in lines)


def test_flash_attention_points_to_our_own_key(config):
    with pytest.raises(ConfigError, match="choose with `attention_impl`"):
        check_standalone(config("", "attention_config=[[[flash],2]]"))
