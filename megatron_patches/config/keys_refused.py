"""NeoX keys that would change what the standalone engine computes, with the values that do not.

The engine `neox` takes them all. Names and defaults are NeoX's.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from .keys_base import Keys, Only, Positive, Table

LANGUAGE_MODEL = "it trains next-token prediction on packed text alone"
NO_TE = "it has no Transformer Engine layers"
NO_MUP = "it has no muP scaling"
BIASED = "its linear layers and LayerNorms carry biases"
LAUNCHED_AS_SAID = "it trains with the batch, lengths and weights that the file says"

# A list of paths that only other objectives read.
OtherPaths: TypeAlias = Annotated[list[str] | None, Only((None,), LANGUAGE_MODEL)]


class RefusedModel(Keys):
    # None or num_attention_heads is plain attention; `check_standalone` compares the two.
    num_kv_heads: Positive | None = None
    mlp_multiple_of: Annotated[Positive, Only((1,), "set `intermediate_size`")] = 1
    expansion_factor: Annotated[float | None, Only((None,), "set `intermediate_size`")] = None
    use_qk_layernorm: Annotated[bool, Only((False,), "its queries and keys are not normed")] = False
    sparsity_config: Annotated[Table | None, Only((None, {}), "its attention is dense")] = None
    sparse_attention: Annotated[Table | None, Only((None, {}), "its attention is dense")] = None
    num_unique_layers: Annotated[
        Positive | None, Only((None,), "each layer has its own weights")
    ] = None
    use_bias_in_norms: Annotated[bool, Only((True,), BIASED)] = True
    use_bias_in_attn_linear: Annotated[bool, Only((True,), BIASED)] = True
    use_bias_in_mlp: Annotated[bool, Only((True,), BIASED)] = True
    soft_prompt_tuning: Annotated[Table | None, Only((None,), LANGUAGE_MODEL)] = None
    moe_num_experts: Annotated[Positive, Only((1,), "it has no mixture of experts")] = 1
    te_columnparallel: Annotated[bool, Only((False,), NO_TE)] = False
    te_rowparallel: Annotated[bool, Only((False,), NO_TE)] = False
    te_layernorm_mlp: Annotated[bool, Only((False,), NO_TE)] = False
    te_mha: Annotated[bool, Only((False,), NO_TE + ", and these would drop the bias")] = False
    te_fp8_mha: Annotated[bool, Only((False,), NO_TE + ", and these would drop the bias")] = False
    use_mup: Annotated[bool, Only((False,), NO_MUP)] = False
    coord_check: Annotated[bool, Only((False,), NO_MUP)] = False
    save_base_shapes: Annotated[bool, Only((False,), NO_MUP)] = False


class RefusedTraining(Keys):
    deepspeed: Annotated[bool, Only((True,), "it trains on DeepSpeed")] = True
    deepspeed_extra_args: Annotated[
        Table | None, Only((None, {}), "they could change anything: write the keys themselves")
    ] = None
    scheduler: Annotated[Table | None, Only((None,), "`lr_decay_style` sets the schedule")] = None
    amp: Annotated[Table | None, Only((None,), "set `precision`")] = None
    fp16_lm_cross_entropy: Annotated[bool, Only((False,), "its loss is fp32")] = False
    curriculum_learning: Annotated[Table | None, Only((None,), LAUNCHED_AS_SAID)] = None
    data_efficiency: Annotated[Table | None, Only((None,), LAUNCHED_AS_SAID)] = None
    elasticity: Annotated[Table | None, Only((None,), LAUNCHED_AS_SAID)] = None
    autotuning: Annotated[Table | None, Only((None,), LAUNCHED_AS_SAID)] = None
    autotuning_run: Annotated[str | None, Only((None,), LAUNCHED_AS_SAID)] = None
    compression_training: Annotated[Table | None, Only((None,), LAUNCHED_AS_SAID)] = None
    deepscale: Annotated[bool, Only((False,), LAUNCHED_AS_SAID)] = False
    deepscale_config: Annotated[str | None, Only((None,), LAUNCHED_AS_SAID)] = None
    use_bnb_optimizer: Annotated[bool, Only((False,), "it trains with Adam in 32 bits")] = False
    lr_decay_fraction: Annotated[float | None, Only((None,), "set `lr_decay_iters`")] = None
    use_checkpoint_lr_scheduler: Annotated[
        bool, Only((False,), "the schedule is the one written here")
    ] = False
    train_epochs: Annotated[Positive | None, Only((None,), "set `train_iters`")] = None
    s3_path: Annotated[str | None, Only((None,), "it saves to a folder")] = None
    serve_model_weights: Annotated[bool, Only((False,), "it serves no weights")] = False


class RefusedData(Keys):
    eod_mask_loss: Annotated[bool, Only((False,), "it scores every token")] = False
    weight_by_num_documents: Annotated[bool, Only((False,), "set `train_data_weights`")] = False
    pack_impl: Annotated[
        Literal["packed", "pack_until_overflow", "unpacked"], Only(("packed",), LANGUAGE_MODEL)
    ] = "packed"
    dataset_impl: Annotated[
        Literal["gpt2", "pairwise", "online"], Only(("gpt2",), LANGUAGE_MODEL)
    ] = "gpt2"
    train_impl: Annotated[
        Literal["normal", "dpo", "rm", "kto", "reinforce"], Only(("normal",), LANGUAGE_MODEL)
    ] = "normal"
    train_label_data_paths: OtherPaths = None
    train_reward_data_paths: OtherPaths = None
    valid_label_data_paths: OtherPaths = None
    valid_reward_data_paths: OtherPaths = None
    test_label_data_paths: OtherPaths = None
    test_reward_data_paths: OtherPaths = None
    pos_train_data_paths: OtherPaths = None
    neg_train_data_paths: OtherPaths = None
    pos_train_label_data_paths: OtherPaths = None
    neg_train_label_data_paths: OtherPaths = None
    pos_valid_data_paths: OtherPaths = None
    neg_valid_data_paths: OtherPaths = None
    pos_valid_label_data_paths: OtherPaths = None
    neg_valid_label_data_paths: OtherPaths = None
    pos_test_data_paths: OtherPaths = None
    neg_test_data_paths: OtherPaths = None
    pos_test_label_data_paths: OtherPaths = None
    neg_test_label_data_paths: OtherPaths = None


class NeoxRefused(RefusedData, RefusedTraining, RefusedModel): ...
