"""Keys that shape the network and its attention. Names and defaults are NeoX's."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from megatron_patches import positions

from .keys_base import Fraction, Keys, NonNegative, Only, Positive, PositiveFloat

Init: TypeAlias = Literal[
    "normal",
    "scaled_normal",
    "orthogonal",
    "scaled_orthogonal",
    "xavier_uniform",
    "xavier_normal",
    "wang_init",
    "small_init",
    "single_residual_scaled_normal",
]
BUILT_IN_INITS = Only(
    ("normal", "scaled_normal", "small_init", "wang_init"),
    "it has no other initialiser",
)
NO_DROPOUT = Only((0.0,), "it has no dropout, as the papers trained without")
NO_KERNELS = "its attention is chosen with `attention_impl`"

# Both compute softmax attention with the position method; in NeoX they differ in memory alone.
ORDINARY_ATTENTION = frozenset({"global", "attend"})


def _attention_layout(value: list[Any] | None) -> list[Any] | None:
    attention_types(value)
    return value


def attention_types(layout: list[Any] | None) -> set[str]:
    """The attention kinds in NeoX's `attention_config`: `[[[kind, ...], repeats], ...]` or a list.

    ValueError for any other form.
    """
    kinds: set[str] = set()
    for item in layout or []:
        names = item[0] if isinstance(item, list) and len(item) == 2 else [item]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("expects [[[kind, ...], repeats], ...]")
        kinds.update(names)
    return kinds


class Shape(Keys):
    num_layers: Positive
    hidden_size: Positive
    num_attention_heads: Positive
    seq_length: Positive
    max_position_embeddings: Positive
    intermediate_size: Positive = Field(default_factory=lambda data: 4 * data["hidden_size"])
    norm: Annotated[
        Literal[
            "layernorm",
            "rmsnorm",
            "non_parametric_layernorm",
            "scalenorm",
            "te_rmsnorm",
            "te_layernorm",
        ],
        Only(("layernorm",), "its blocks use LayerNorm"),
    ] = "layernorm"
    layernorm_epsilon: PositiveFloat = 1.0e-5
    activation: Annotated[
        Literal[
            "gelu",
            "geglu",
            "relu",
            "softsign",
            "swish",
            "mish",
            "silu",
            "reglu",
            "swiglu",
            "bilinear",
            "glu",
        ],
        Only(("gelu",), "its MLP uses GELU"),
    ] = "gelu"
    gpt_j_residual: bool = False
    gpt_j_tied: Annotated[bool, Only((False,), "each branch has its own LayerNorm")] = False
    no_weight_tying: bool = False
    make_vocab_size_divisible_by: Positive = 128
    padded_vocab_size: Positive | None = None
    init_method: Annotated[Init, BUILT_IN_INITS] = "normal"
    output_layer_init_method: Annotated[Init, BUILT_IN_INITS] = "scaled_normal"
    init_method_std: PositiveFloat = 0.02
    hidden_dropout: Annotated[Fraction, NO_DROPOUT] = 0.0
    attention_dropout: Annotated[Fraction, NO_DROPOUT] = 0.0
    use_cpu_initialization: bool = False


class Attention(Keys):
    pos_emb: Annotated[str, AfterValidator(positions.resolve)] = "learned"
    rotary_pct: Annotated[float, Field(gt=0, le=1)] = 1.0
    rotary_emb_base: Positive = 10000
    rpe_num_buckets: Positive = 32
    rpe_max_distance: Positive = 128
    opt_pos_emb_offset: Annotated[NonNegative, Only((0,), "only OPT's tables need an offset")] = 0
    attention_config: Annotated[list[Any] | None, AfterValidator(_attention_layout)] = None
    sliding_window_width: Positive | None = None
    apply_query_key_layer_scaling: Annotated[
        bool, Only((False,), "it multiplies every position bias by the layer's number")
    ] = False
    attention_softmax_in_fp32: bool = False
    # Fused kernels change the speed, not the maths: the standalone engine takes them as said.
    scaled_upper_triang_masked_softmax_fusion: bool = False
    scaled_masked_softmax_fusion: bool = False
    bias_gelu_fusion: bool = False
    bias_dropout_fusion: bool = False
    rope_fusion: bool = False
    layernorm_fusion: bool = False
    rmsnorm_fusion: bool = False
    fused_kernels_build_path: str | None = None
