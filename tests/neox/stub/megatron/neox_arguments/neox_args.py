"""The arguments that the patches read, with the defaults of the real ones."""

from dataclasses import dataclass
from typing import Any, Literal

ATTENTION_TYPE_CHOICES = [
    "global",
    "local",
    "sparse_fixed",
    "sparse_variable",
    "bigbird",
    "bslongformer",
    "gmlp",
    "amlp",
    "flash",
    "rwkv",
    "mamba",
]


@dataclass
class NeoXArgsModel:
    precision: Literal["fp16", "fp32", "bfloat16"] = None
    num_layers: int = None
    hidden_size: int = None
    num_attention_heads: int = None
    num_kv_heads: int = None
    seq_length: int = None
    sliding_window_width: int = None
    max_position_embeddings: int = None
    pos_emb: Literal["learned", "rotary", "sinusoidal", "rpe", "alibi", "none"] = "learned"
    rpe_num_buckets: int = 32
    rpe_max_distance: int = 128
    rotary_pct: float = 1.0
    rotary_emb_base: int = 10000
    attention_config: list = None
    apply_query_key_layer_scaling: bool = False
    use_mup: bool = False
    te_mha: bool = False
    te_fp8_mha: bool = False
    attention_dropout: float = 0.0


@dataclass
class NeoXArgsTraining:
    seed: int = 1234
    weight_decay: float = 0.1
    train_iters: int = None
    dataset_impl: Literal["gpt2", "pairwise", "online"] = "gpt2"
    load: str = None
    no_load_optim: bool = False
    train_epochs: int = None
    eval_iters: int = 100
    eval_interval: int = 1000
    save: str = None
    log_interval: int = 100
    use_wandb: bool = None
    zero_stage: int = None
    model_parallel_size: int = 1
    pipe_parallel_size: int = 0
    is_pipe_parallel: bool = False
    iteration: int = None
    do_train: int = None
    user_script: str = None
    tensorboard_writer = None  # set while it runs, no argument
    comet_experiment: Any = None
