"""NeoX keys that the standalone engine does not need and that leave its maths alone.

They are checked like all others and reach the engine `neox` as written. Names and defaults are
NeoX's.
"""

from __future__ import annotations

from typing import Any, Literal

from .keys_base import Keys, Table


class DeepSpeedExtras(Keys):
    fp32_allreduce: bool = False
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    sparse_gradients: bool = False
    dump_state: bool = False
    flops_profiler: Table | None = None
    communication_data_type: str | bool | None = None
    activation_checkpointing: Table | None = None
    csv_monitor: Table | None = None
    comms_logger: Table | None = None
    checkpoint: Table | None = None
    pipe_partition_method: str = "type:transformer|mlp"
    global_num_gpus: int | None = None
    lazy_mpu_init: bool = False
    deepspeed_activation_checkpointing: bool = True
    contiguous_checkpointing: bool = False
    checkpoint_in_cpu: bool = False
    profile_backward: bool = False
    # NeoX reads its loss scale from `fp16`; these stay for its older files.
    hysteresis: int = 2
    loss_scale: float | None = None
    loss_scale_window: float = 1000.0
    min_scale: float = 1.0


class Monitoring(Keys):
    use_comet: bool | None = None
    comet_workspace: str | None = None
    comet_project: str | None = None
    comet_experiment_name: str | None = None
    comet_tags: list[str] | None = None
    comet_others: Table | None = None
    peak_theoretical_tflops: float | None = None
    log_grad_pct_zeros: bool = False
    log_param_norm: bool = False
    log_grad_norm: bool = False
    log_optimizer_states: bool = False
    log_gradient_noise_scale: bool = False
    gradient_noise_scale_n_batches: int = 5
    gradient_noise_scale_cpu_offload: bool = False
    memory_profiling: bool = False
    memory_profiling_path: str | None = None
    profile: bool = False
    profile_step_start: int = 10
    profile_step_stop: int = 12
    char_level_ppl: bool = False
    adlr_autoresume: bool = False
    adlr_autoresume_interval: int = 1000
    onnx_safe: bool = False
    checkpoint_validation_with_forward_pass: bool = False
    # False would require the schedule in a checkpoint to equal the one here; here it always wins.
    override_lr_scheduler: bool = False


class Generation(Keys):
    text_gen_type: str | None = None
    precompute_model_name: str | None = None
    temperature: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    return_logits: bool = False
    maximum_tokens: int = 64
    prompt_end: str = "\n"
    sample_input_file: str | None = None
    sample_output_file: str = "samples.txt"
    num_samples: int = 1
    recompute: bool = False
    eval_results_prefix: str = ""
    eval_tasks: list[str] | None = None


class OtherArchitectures(Keys):
    """Options of parts that are refused when they are switched on (`keys_refused`)."""

    rms_norm_epsilon: float = 1.0e-8
    scalenorm_epsilon: float = 1.0e-8
    param_sharing_style: str = "grouped"
    use_flashattn_swiglu: bool = False
    rotary_save_freqs_buffer: bool = False
    gmlp_attn_dim: int = 64
    sequence_parallel: bool = False
    output_layer_parallelism: Literal["column"] = "column"
    mamba_selective_scan_fusion: bool = False
    mamba_causal_conv_fusion: bool = False
    mamba_inner_func_fusion: bool = False
    mamba_selective_fp32_params: bool = True
    mamba_use_bias_in_conv: bool = True
    mamba_use_bias_in_linears: bool = False
    dim_att: int | None = None
    head_size: int | None = None
    ffn_dim: int | None = None
    te_fp8_format: Literal["e4m3", "hybrid"] = "hybrid"
    te_fp8_wgrad: bool = True
    te_fp8_amax_history_len: int = 1
    te_fp8_amax_compute_algo: str = "most_recent"
    te_fp8_margin: int = 0
    base_shapes_file: str | None = None
    mup_init_scale: float = 1.0
    mup_attn_temp: float = 1.0
    mup_output_temp: float = 1.0
    mup_embedding_mult: float = 1.0
    mup_rp_embedding_mult: float = 1.0
    mup_width_scale: int = 2
    moe_expert_interval: int = 1
    moe_top_k: int = 1
    moe_router_type: Literal["sinkhorn", "topk"] = "sinkhorn"
    moe_lbl_in_fp32: bool = False
    moe_jitter_eps: float | None = None


class OtherObjectives(Keys):
    """Options of objectives and data forms that are refused when they are switched on."""

    use_shared_fs: bool = True
    short_seq_prob: float = 0.1
    weighted_sampler_alpha: float = 1.0
    allow_chopped: bool = True
    dpo_fp32: bool = True
    dpo_reference_free: bool = False
    dpo_beta: float = 0.1
    kto_fp32: bool = True
    kto_desirable_weight: float = 1.0
    kto_undesirable_weight: float = 1.0
    kto_beta: float = 0.1
    z_loss: float = 0.0
    fp32_reinforce: bool = True
    kl_impl: Literal["abs", "mse", "kl", "full"] = "mse"
    kl_div_beta: float = 0.1
    reinforce_leave_one_out: bool = False
    s3_chunk_size: int = 104_857_600
    weight_server_port: Any = 6000
    online_dataserver_ips: Any = "localhost"
    online_dataserver_ports: Any = 10000


class NeoxOnly(OtherObjectives, OtherArchitectures, Generation, Monitoring, DeepSpeedExtras): ...
