"""Keys of optimisation, hardware, data, checkpoints and logs. Names and defaults are NeoX's."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from .keys_base import (
    Fraction,
    Keys,
    NonNegative,
    NonNegativeFloat,
    Only,
    Positive,
    PositiveFloat,
    Table,
    names,
)

RESUMABLE = "every checkpoint of it can be resumed"
ONE_PROCESS = "it splits the data over processes, not the model"


def _split(text: str) -> str:
    parts = re.split(r"[,/]", text)
    try:
        shares = [float(part) for part in parts]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not sum(shares) > 0:
        raise ValueError('expects shares for train, valid and test such as "949,50,1"')
    return text


class OptimizerParams(Keys):
    lr: PositiveFloat = 1.0e-3
    betas: Annotated[
        list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)
    ] = Field(default_factory=lambda: [0.9, 0.999])
    eps: PositiveFloat = 1.0e-8
    weight_decay: Annotated[
        NonNegativeFloat | None, Only((None,), "the top-level key `weight_decay` sets it")
    ] = None
    momentum: NonNegativeFloat | None = None
    freeze_step: NonNegative | None = None
    cuda_aware: bool | None = None


class Optimizer(Keys):
    type: Annotated[
        Literal[
            "Adam",
            "adam",
            "OneBitAdam",
            "onebitadam",
            "cpu_adam",
            "cpu_torch_adam",
            "sm3",
            "madgrad_wd",
            "sgd",
            "lion",
        ],
        Only(("Adam", "adam"), "it trains with Adam"),
    ] = "Adam"
    params: OptimizerParams = OptimizerParams()


class Optimization(Keys):
    optimizer: Optimizer = Optimizer()
    min_lr: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.1
    train_iters: NonNegative
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = "linear"
    lr_decay_iters: Positive = Field(default_factory=lambda data: max(1, data["train_iters"]))
    warmup: Fraction = 0.01
    gradient_clipping: NonNegativeFloat = 1.0
    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234  # numpy's range


class Hardware(Keys):
    precision: Literal["fp32", "bfloat16", "fp16"] | None = None
    fp16: Table | None = None
    bf16: Table | None = None
    data_types: Table | None = None
    zero_optimization: Table | None = None
    pipe_parallel_size: Annotated[NonNegative, Only((0, 1), ONE_PROCESS)] = 0
    model_parallel_size: Annotated[Positive, Only((1,), ONE_PROCESS)] = 1
    checkpoint_activations: bool = False
    checkpoint_num_layers: Positive = 1
    partition_activations: bool = False
    synchronize_each_layer: bool = False
    # None: gloo on the CPU and NCCL on GPUs. NeoX alone would take NCCL everywhere.
    distributed_backend: Literal["gloo", "nccl", "mpi", "ccl", "hccl"] | None = None
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    num_nodes: int = -1
    num_gpus: Positive | None = None
    master_port: Annotated[int, Field(gt=0, lt=65536)] = 29500
    master_addr: str | None = None
    launcher: Literal["pdsh", "openmpi", "mvapich", "slurm"] = "pdsh"
    deepspeed_slurm: bool = False
    deepspeed_mpi: bool = False
    no_ssh_check: bool = False
    force_multi: bool = False
    comment: str | None = None
    account: str | None = None
    local_rank: int | None = None


class Data(Keys):
    data_path: str | None = None
    split: Annotated[str, AfterValidator(_split)] = "969, 30, 1"
    train_data_paths: list[str] | None = None
    valid_data_paths: list[str] | None = None
    test_data_paths: list[str] | None = None
    train_data_weights: list[NonNegativeFloat] | None = None
    valid_data_weights: list[NonNegativeFloat] | None = None
    test_data_weights: list[NonNegativeFloat] | None = None
    data_impl: Literal["infer", "mmap", "cached"] = "infer"
    mmap_warmup: bool = False
    tokenizer_type: Literal[
        "GPT2BPETokenizer",
        "HFTokenizer",
        "HFGPT2Tokenizer",
        "SPMTokenizer",
        "CharLevelTokenizer",
        "TiktokenTokenizer",
    ] = "GPT2BPETokenizer"
    vocab_file: str | None = None
    merge_file: str | None = None
    num_workers: NonNegative = 2


class Checkpoints(Keys):
    save: str | None = None
    load: str | None = None
    iteration: NonNegative | None = None
    checkpoint_scale: Literal["linear", "log"] = "linear"
    checkpoint_factor: Annotated[int | float, Field(gt=0)] | None = None
    extra_save_iters: list[NonNegative] | None = None
    keep_last_n_checkpoints: Positive | None = None
    finetune: bool = False
    no_save_optim: Annotated[bool, Only((False,), RESUMABLE)] = False
    no_save_rng: bool = False
    no_load_optim: Annotated[bool, Only((False,), "`finetune` starts from weights alone")] = False
    no_load_rng: bool = False
    exit_interval: Annotated[
        Positive | None, Only((None,), "`train_iters` ends a run, a signal interrupts it")
    ] = None


class Logs(Keys):
    eval_interval: Positive = 1000
    eval_iters: NonNegative = 100
    log_interval: Positive = 100
    steps_per_print: Positive = 10
    wall_clock_breakdown: bool = False
    log_dir: str | None = None
    tensorboard_dir: str | None = None
    use_wandb: bool | None = None
    wandb_project: str = "neox"
    wandb_group: str | None = None
    wandb_run_name: str | None = None
    wandb_team: str | None = None
    wandb_host: str = "https://api.wandb.ai"
    wandb_init_all_ranks: bool = False
    wandb: Table | None = None
    tensorboard: Table | None = None


# What DeepSpeed 0.19 knows under these keys, and older spellings that NeoX's files still carry.
LOSS_SCALING = names(
    """
    enabled type auto_cast loss_scale loss_scale_window initial_scale_power hysteresis
    consecutive_hysteresis min_loss_scale
    """
)
ZERO = names(
    """
    stage allgather_bucket_size allgather_partitions allgather_sequential contiguous_gradients
    cpu_offload cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint
    enable_sanity_checks ignore_unused_parameters legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings memory_efficient_linear offload_optimizer offload_param
    overlap_comm override_module_apply parameter_alignment pipeline_loading_checkpoint
    reduce_bucket_size reduce_scatter round_robin_gradients stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
    stage3_module_granularity_threshold stage3_param_persistence_threshold
    stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size
    use_multi_rank_bucket_allreduce zero_hpz_partition_size zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights
    """
)
NESTED: dict[str, frozenset[str]] = {
    "fp16": LOSS_SCALING | {"fp16", "fp16_master_weights_and_grads"},
    "bf16": LOSS_SCALING | {"bf16", "immediate_grad_update", "check_grad_overflow"},
    "data_types": frozenset({"grad_accum_dtype"}),
    "zero_optimization": ZERO,
}


def zero_stage(table: Table | None) -> Any:
    """The stage in a `zero_optimization` mapping; DeepSpeed's default is 0."""
    return (table or {}).get("stage", 0)
