"""The places of GPT-NeoX that the patches touch: names, signatures, and pieces of source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """`module` is a path such as megatron/training.py, `name` a dotted name inside it."""

    module: str
    name: str
    why: str
    # Its first parameters, in this order. None: not a function, or of no matter.
    parameters: tuple[str, ...] | None = None
    contains: tuple[str, ...] = ()  # pieces of its source, as `ast.unparse` writes it

    @property
    def place(self) -> str:
        return f"{self.module}: {self.name}"


def _p(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ARGUMENTS = "megatron/neox_arguments/arguments.py"
FIELDS = "megatron/neox_arguments/neox_args.py"
MODEL = "megatron/model/gpt2_model.py"
LAYER = "megatron/model/transformer.py"
POSITIONS = "megatron/model/positional_embeddings.py"
MPU_LAYERS = "megatron/mpu/layers.py"
TRAINING = "megatron/training.py"
MPU = "megatron/mpu/initialize.py"
DATA = "megatron/data/data_utils.py"
DATASET = "megatron/data/gpt2_dataset.py"

SEAMS = (
    Seam("deepy.py", "main", "starts the launcher", _p("input_args"), ("consume_deepy_args",)),
    Seam(FIELDS, "NeoXArgsModel.pos_emb", "gets our methods as values", None, ("Literal",)),
    Seam(FIELDS, "ATTENTION_TYPE_CHOICES", "gets the attention type `attend`", None, ("global",)),
    Seam(
        ARGUMENTS,
        "NeoXArgs.calculate_derived",
        "checks run after it",
        _p("self"),
        ("expand_attention_types", "in ATTENTION_TYPE_CHOICES"),
    ),
    Seam(ARGUMENTS, "NeoXArgs.validate_types", "reads the types of fields", _p("self")),
    Seam(
        MODEL,
        "GPT2ModelPipe.__init__",
        "shared parameters are tied after it",
        _p("self neox_args num_tokentypes parallel_output topology use_cache"),
        ("self.init_specs()",),
    ),
    Seam(
        MODEL,
        "GPT2ModelPipe.init_specs",
        "gives the layers their position method",
        _p("self"),
        ("ParallelTransformerLayerPipe", "rpe=", "LayerSpec"),
    ),
    Seam(
        LAYER,
        "ParallelSelfAttention.__init__",
        "learns the attention type `attend`",
        _p(
            "self neox_args attention_mask_func init_method output_layer_init_method layer_number "
            "rpe rotary use_cache parallel_output"
        ),
        (
            "self.rpe = rpe",
            "self.pos_emb = neox_args.pos_emb",
            "neox_args.attention_config[layer_number]",
            "max_seq_len=neox_args.seq_length",
            "self.norm_factor = math.sqrt(self.hidden_size_per_attention_head)",
        ),
    ),
    Seam(
        LAYER,
        "ParallelSelfAttention.attention",
        "adds `rpe`, calls `alibi_embed`; replaced in layers of type `attend`",
        _p("self query_layer key_layer value_layer layer_past attention_mask"),
        (
            "self.rpe(query_layer.size(0), key_layer.size(0))",
            "attention_scores = self.alibi_embed(attention_scores)",
            "if self.pos_emb == 'alibi'",
        ),
    ),
    Seam(
        LAYER,
        "ParallelSelfAttention.forward",
        "calls `attention` with [length, batch, heads, head_dim]",
        _p("self hidden_states attention_mask layer_past"),
        ("self.attention(query_layer, key_layer, value_layer, layer_past, attention_mask)",),
    ),
    Seam(
        LAYER,
        "ParallelTransformerLayer.__init__",
        "hands `rpe` to its attention",
        _p(
            "self neox_args attention_mask_func init_method output_layer_init_method layer_number rpe"
        ),
        ("rpe=rpe",),
    ),
    Seam(
        POSITIONS,
        "AliBi.forward",
        "its bias is rounded and its cache outgrown",
        _p("self x"),
        ("cached_seq_len",),
    ),
    Seam(POSITIONS, "AliBi.bias", "as forward", _p("self seq_len_q seq_len_k device dtype")),
    Seam(
        MPU_LAYERS,
        "ParallelRelativePositionBias.forward",
        "counts queries from 0",
        _p("self q_len k_len"),
        ("_rel_pos_bucket_cached", "_q_len_cached"),
    ),
    Seam(
        MPU_LAYERS,
        "ParallelRelativePositionBias._relative_position_bucket",
        "gives T5's buckets",
        _p("self relative_position num_buckets max_distance"),
    ),
    Seam(
        TRAINING,
        "forward_step",
        "returns one value with pipeline stages",
        _p("data_iterator model neox_args timers return_logits"),
        ("model.eval_batch(data_iterator, return_logits=return_logits)",),
    ),
    Seam(
        TRAINING,
        "train_step",
        "parameters are projected after it",
        _p("neox_args timers data_iterator model optimizer lr_scheduler"),
    ),
    Seam(
        TRAINING,
        "evaluate",
        "its loss goes into the log",
        _p("neox_args forward_step_fn data_iterator model"),
        ("'lm_loss'",),
    ),
    Seam(
        TRAINING,
        "evaluate_and_print_results",
        "names the split and the iteration",
        _p(
            "neox_args prefix forward_step_func data_iterator model iteration verbose timers "
            "chart_name"
        ),
    ),
    Seam(
        TRAINING,
        "get_batch_sequential",
        "makes the mask without pipeline stages",
        _p("forward_input neox_args"),
        ("return (forward_input[0], forward_input[1], attention_mask)",),
    ),
    Seam(
        TRAINING,
        "pretrain",
        "evaluates without training",
        _p("neox_args"),
        ("neox_args.do_train and neox_args.train_iters > 0", "shift_and_wrap_data_loaders"),
    ),
    Seam(
        TRAINING,
        "get_optimizer",
        "takes parameter groups",
        _p("model neox_args"),
        (
            "get_params_for_weight_decay_optimization(model, neox_args)",
            "param.model_parallel = False",
        ),
    ),
    Seam(
        "megatron/model/utils.py",
        "get_params_for_weight_decay_optimization",
        "position parameters get a group of their own",
        _p("module neox_args"),
    ),
    Seam(
        "megatron/logging.py",
        "training_log",
        "statistics are logged after it",
        _p(
            "neox_args timers loss_dict total_loss_dict learning_rate iteration loss_scale "
            "report_memory_flag skipped_iter model optimizer noise_scale_logger"
        ),
    ),
    Seam(
        "megatron/logging.py",
        "tb_wandb_log",
        "writes to TensorBoard and wandb",
        _p("key value iteration_no use_wandb tensorboard_writer comet_experiment"),
    ),
    Seam(
        DATA,
        "build_train_valid_test_data_loaders",
        "reads at `seq_length_val`, or without training",
        _p("neox_args"),
        ("Must specify either train_epochs or train_iters",),
    ),
    Seam(
        DATA,
        "build_the_dataset",
        "passes the length as the seventh argument",
        None,
        (
            "GPT2Dataset(name, data_prefix, documents, indexed_dataset, num_samples, num_epochs, seq_length,",
        ),
    ),
    Seam(
        DATA,
        "build_train_valid_test_datasets",
        "passes the length as the seventh argument",
        None,
        ("GPT2Dataset(name, data_prefix, documents, indexed_dataset,",),
    ),
    Seam(
        DATA,
        "shift_and_wrap_data_loaders",
        "makes the iterators",
        _p("neox_args data_loaders loop"),
        ("batch_sampler.start_iter",),
    ),
    Seam(
        DATASET,
        "GPT2Dataset.__init__",
        "takes the length as its seventh argument",
        _p(
            "self name data_prefix documents indexed_dataset num_samples num_epochs seq_length seed"
        ),
    ),
    Seam(
        DATASET,
        "_build_index_mappings",
        "reuses index maps by their file name alone",
        _p(
            "name data_prefix documents sizes label_dataset num_samples num_epochs seq_length seed "
            "packing_impl use_shared_fs allow_chopped"
        ),
        ("'_doc_idx.npy'", "'_sample_idx.npy'", "'_shuffle_idx.npy'", "'_{}_indexmap'", "'_ac'"),
    ),
    Seam(
        "megatron/utils.py",
        "get_attn_mask",
        "makes the [1, 1, length, length] mask",
        _p("seq_length device sliding_window_width"),
    ),
    Seam(
        "megatron/checkpointing.py",
        "check_checkpoint_args",
        "compares lengths that only a learned table needs",
        _p("neox_args checkpoint_args"),
    ),
    Seam(
        "megatron/checkpointing.py",
        "save_ds_checkpoint",
        "whole weights are written after it",
        _p("iteration model neox_args"),
        ("get_checkpoint_tag(iteration)",),
    ),
    Seam("megatron/checkpointing.py", "get_checkpoint_tag", "names it", _p("iteration")),
    Seam(
        "megatron/checkpointing.py",
        "load_checkpoint",
        "files are looked through before it",
        _p("neox_args model optimizer lr_scheduler inference iteration"),
    ),
    Seam(
        "megatron/initialize.py",
        "initialize_megatron",
        "refuses to run without a GPU",
        _p("neox_args allow_no_cuda"),
    ),
    Seam(
        "megatron/text_generation_utils.py",
        "stream_tokens",
        "starts from an empty cache",
        _p("neox_args model context_tokens"),
    ),
    Seam(MODEL, "GPT2ModelPipe.clear_cache", "empties the cache", _p("self")),
    Seam("megatron/model/utils.py", "SequentialWrapper.clear_cache", "empties it", _p("self")),
    Seam(MPU, "get_pipe_parallel_group", "ties stages", ()),
    Seam(MPU, "get_pipe_parallel_rank", "counts tied parameters once", ()),
    Seam(MPU, "get_pipe_parallel_world_size", "ties stages where there are several", ()),
    Seam(MPU, "get_model_parallel_rank", "owns a range of heads", ()),
    Seam(MPU, "get_model_parallel_world_size", "owns a range of heads", ()),
    Seam(MPU, "get_model_parallel_group", "puts the heads together for the log", ()),
    Seam(POSITIONS, "AliBi.__init__", "keeps its slopes", None, ("self.register_buffer('slopes'",)),
    Seam(ARGUMENTS, "NeoXArgs.consume_deepy_args", "is what --dry-run calls"),
    Seam(ARGUMENTS, "NeoXArgs.get_deepspeed_main_args", "is what --dry-run calls", _p("self")),
)
