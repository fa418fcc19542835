"""GPT whose attention has a position bias (KERPLE, ALiBi, T5) or whose input has position embeddings.

This file travels with the weights: it needs torch and transformers alone. Blocks are GPT-NeoX's.
Attention is computed for `BLOCK` queries at a time, recomputed in the backward pass, so that memory
grows linearly with the length; scores, bias and softmax are float32 whatever the model's dtype is.

Shapes: B batch, L new tokens, K tokens with those in the cache, H heads, D head size, C width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

BLOCK = 512
LOWEST = 0.01  # of every learned number of KERPLE's
# The output's field for the cache: transformers 5 renamed it.
FIELDS = {field.name for field in fields(CausalLMOutputWithPast)}
IGNORED = {"cache_position"}  # generation in transformers 4 passes it
CACHE = "cache" if "cache" in FIELDS else "past_key_values"

Numbers = dict[str, Tensor]
Tables = tuple[Tensor | None, Tensor | None]  # bias and weight, [H, K]


class Kernel(NamedTuple):
    """Learned numbers a head with their upper limits; what they add to and multiply the scores by.

    Both functions take the numbers as a mapping and distances d >= 0, and broadcast over heads.
    """

    numbers: dict[str, float]
    bias: Callable[[Numbers, Tensor], Tensor] | None = None
    weight: Callable[[Numbers, Tensor], Tensor] | None = None


def power(d: Tensor, exponent: Tensor) -> Tensor:
    """d ** exponent, 0 at d = 0, with a finite gradient there."""
    return torch.where(d > 0, d, 1.0).pow(exponent) * (d > 0)


FREE, EXPONENT = math.inf, 2.0
TWO, THREE = {"bias_p": FREE, "bias_a": FREE}, {"bias_p": FREE, "bias_a": FREE, "bias_e": EXPONENT}
POWER, WEIGHT = {"bias_p": EXPONENT, "bias_a": FREE}, {"wei_p": EXPONENT, "wei_a": FREE}


def log_bias(n: Numbers, d: Tensor) -> Tensor:
    return -n["bias_p"] * torch.log(1 + n["bias_a"] * d)


def power_bias(n: Numbers, d: Tensor) -> Tensor:
    return -n["bias_a"] * power(d, n["bias_p"])


def gauss_bias(n: Numbers, d: Tensor) -> Tensor:
    return n["bias_p"] * torch.exp(-n["bias_a"] * d)


def log3_bias(n: Numbers, d: Tensor) -> Tensor:
    return log_bias(n, power(d, n["bias_e"]))


def gauss2_bias(n: Numbers, d: Tensor) -> Tensor:
    return gauss_bias(n, d.square())


def gauss3_bias(n: Numbers, d: Tensor) -> Tensor:
    return gauss_bias(n, power(d, n["bias_e"]))


def power_weight(n: Numbers, d: Tensor) -> Tensor:
    return torch.exp(-n["wei_a"] * power(d, n["wei_p"]))


def square_weight(n: Numbers, d: Tensor) -> Tensor:
    return torch.exp(-n["wei_a"] * d.square())


# Chi, Fan, Ramadge, Rudnicky: KERPLE (arXiv 2205.09921). No lambdas: a model that holds one cannot be
# pickled.
KERPLE = {
    "kerple_log": Kernel(TWO, log_bias),
    "kerple_log3": Kernel(THREE, log3_bias),
    "kerple_power": Kernel(POWER, power_bias),
    "kerple_gauss2": Kernel(TWO, gauss2_bias),
    "kerple_gauss3": Kernel(THREE, gauss3_bias),
    "kerple_weight": Kernel(WEIGHT, weight=power_weight),
    "kerple_weight1": Kernel({"wei_a": FREE}, weight=square_weight),
    "kerple_power_weight": Kernel({**POWER, **WEIGHT}, power_bias, power_weight),
}
NOTHING = Kernel({})
METHODS = (*KERPLE, "alibi", "rpe", "sinusoidal", "learned", "none")
CHOICES = {
    "position": METHODS,
    "position_sharing": ("model", "layer"),
    "position_dtype": ("float32", "bfloat16", "float16"),
}
DEFAULTS: dict[str, Any] = {
    **{"vocab_size": 50304, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"intermediate_size": 3072, "max_position_embeddings": 512, "layer_norm_eps": 1e-5},
    **{"use_parallel_residual": False, "initializer_range": 0.02, "use_cache": True},
    **{"tie_word_embeddings": False, "attention_window": None, "position": "kerple_log"},
    **{"position_sharing": "model", "position_dtype": "float32"},
    **{"rpe_num_buckets": 32, "rpe_max_distance": 128},
}


class GPTPositionsConfig(PretrainedConfig):
    """`position`: one of `METHODS`; `position_dtype`: that in which it computes (float32: exact).

    `position_sharing`: "model", one set of numbers, or "layer", one a layer. `attention_window`: keys
    that a query sees, itself included. The two `rpe_` keys are those of T5's buckets.
    """

    model_type = "gpt_positions"

    def __init__(self, **values: Any) -> None:
        for key, default in DEFAULTS.items():
            setattr(self, key, values.pop(key, default))
        for key, known in CHOICES.items():
            if getattr(self, key) not in known:
                raise ValueError(f"{key} {getattr(self, key)!r} is none of {', '.join(known)}")
        if self.attention_window is not None and self.attention_window < 1:
            raise ValueError(f"attention_window {self.attention_window} lets a query see nothing")
        buckets, farthest = self.rpe_num_buckets, self.rpe_max_distance
        if buckets < 2 or buckets % 2 or farthest <= buckets // 2:
            raise ValueError(
                f"rpe_num_buckets {buckets} must be even and at least 2, and rpe_max_distance {farthest} "
                "more than half of it"
            )
        super().__init__(**values)


class Position(nn.Module):
    """The position method of one layer, or of all."""

    def __init__(self, config: GPTPositionsConfig) -> None:
        super().__init__()
        heads, width = config.num_attention_heads, config.hidden_size
        self.name, self.heads = config.position, heads
        self.dtype = getattr(torch, config.position_dtype)
        self.buckets, self.farthest = config.rpe_num_buckets, config.rpe_max_distance
        self.scale, self.rows = math.sqrt(width // heads), config.max_position_embeddings
        self.kernel = KERPLE.get(self.name, NOTHING)
        for key, highest in self.kernel.numbers.items():
            start = torch.rand(heads, 1, 1).clamp(min=LOWEST, max=highest)
            self.register_parameter(key, nn.Parameter(start))
        if self.name == "rpe":
            self.weight = nn.Parameter(torch.randn(self.buckets, heads) * 0.02)
        if self.name == "learned":
            self.weight = nn.Parameter(torch.randn(self.rows, width) * 0.02)
        self.register_state_dict_post_hook(Position.make_legal)

    @torch.no_grad()
    def make_legal(self, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        """In what is saved, numbers that training carried past their limits, as the model reads them.

        Else they could not be loaded again. The model's own stay as they are.
        """
        for key, highest in self.kernel.numbers.items():
            value = state[prefix + key]
            if not value.is_meta and bool(((value < LOWEST) | (value > highest)).any()):
                state[prefix + key] = value.clamp(LOWEST, highest)

    def tables(self, length: int, device: torch.device) -> Tables:
        """What is added to, and multiplies, the scores at distances 0 ... length-1: float32 [H, length]."""
        with exact(device):
            return self._tables(torch.arange(length, device=device))

    def _tables(self, d: Tensor) -> Tables:
        bias = weight = None
        if self.kernel.numbers:
            legal, d = self._legal(), d.to(self.dtype)
            bias = self.kernel.bias and self.kernel.bias(legal, d).float()
            weight = self.kernel.weight and self.kernel.weight(legal, d).float()
        elif self.name == "alibi":
            slope = torch.tensor(slopes(self.heads), device=d.device).to(self.dtype)[:, None]
            bias = (-slope * d.to(self.dtype)).float()
        elif self.name == "rpe":
            bias = (self.weight.to(self.dtype).t()[:, self._bucket(d)] * self.scale).float()
        return bias, weight

    def _legal(self) -> dict[str, Tensor]:
        """The numbers within their limits, [H, 1]; the gradient passes the limits."""
        found = {}
        for key, highest in self.kernel.numbers.items():
            value = getattr(self, key).to(self.dtype).view(-1, 1)
            found[key] = value.detach().clamp(LOWEST, highest) + (value - value.detach())
        return found

    def _bucket(self, d: Tensor) -> Tensor:
        exact = self.buckets // 2
        share = (d.float().clamp(min=exact) / exact).log() / math.log(self.farthest / exact)
        by_log = (exact + (share * (self.buckets - exact)).long()).clamp(max=self.buckets - 1)
        return torch.where(d < exact, d, by_log)

    def embed(self, x_BLC: Tensor, positions_BL: Tensor) -> Tensor:
        if self.name == "sinusoidal":
            steps = torch.arange(0, x_BLC.shape[-1], 2, device=x_BLC.device) / x_BLC.shape[-1]
            angle = positions_BL[..., None].float() * (1.0 / 10000.0**steps)
            return x_BLC + torch.cat((angle.sin(), angle.cos()), dim=-1).to(x_BLC.dtype)
        if self.name == "learned":
            if int(positions_BL.max()) >= self.rows:
                raise ValueError(f"learned positions end at {self.rows} tokens")
            return x_BLC + F.embedding(positions_BL, self.weight).to(x_BLC.dtype)
        return x_BLC

    def check(self) -> None:
        """Raises ValueError for a number that no training of this model can have left."""
        for key, tensor in self.named_parameters():
            if not torch.isfinite(tensor).all():
                raise ValueError(f"position.{key} holds NaN or infinite values")
        for key, highest in self.kernel.numbers.items():
            # bfloat16 rounds 0.01 to 0.010009765625, float16 to 0.01000213623046875.
            if not ((getattr(self, key) > 0) & (getattr(self, key) <= highest)).all():
                raise ValueError(f"position.{key} must lie in (0, {highest}]")


def exact(device: torch.device) -> torch.autocast:
    """Within it autocast rounds nothing."""
    return torch.autocast(device.type, enabled=False)


def slopes(heads: int) -> list[float]:
    """ALiBi's, in the order of its authors' code (arXiv 2108.12409)."""
    whole = 1 << (heads.bit_length() - 1)
    series = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    return series + [2.0 ** (-4.0 * (2 * i + 1) / whole) for i in range(heads - whole)]


class Seen(NamedTuple):
    """What all layers share in one call: who sees whom, at which distance."""

    keys: int
    window: int | None
    padding_BK: Tensor | None  # True at padding

    def block(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, start: int) -> Tensor:
        """Attention of `q` [B, H, Q, D], whose first query stands at position `start`."""
        with exact(q.device):
            return self._block(q, k, v, tables, start)

    def _block(self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, start: int) -> Tensor:
        bias_HK, weight_HK = tables
        query = torch.arange(start, start + q.shape[2], device=q.device)
        distance_QK = query[:, None] - torch.arange(k.shape[2], device=q.device)
        hidden = (distance_QK < 0)[None, None]
        if self.window is not None:
            hidden = hidden | (distance_QK >= self.window)
        if self.padding_BK is not None:
            hidden = hidden | self.padding_BK[:, None, None, : k.shape[2]]
        distance_QK = distance_QK.clamp(min=0)
        scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
        if weight_HK is not None:
            scores = scores * weight_HK[:, distance_QK]
        if bias_HK is not None:
            scores = scores + bias_HK[:, distance_QK]
        # A finite filler: a query under the padding sees no key, and must not become NaN.
        shares = scores.masked_fill(hidden, torch.finfo(torch.float32).min).softmax(-1)
        return (shares @ v.float()).to(q.dtype)


class Attention(nn.Module):
    def __init__(self, config: GPTPositionsConfig, index: int) -> None:
        super().__init__()
        self.index, self.heads = index, config.num_attention_heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BLC: Tensor, tables: Tables, seen: Seen, cache: Any) -> Tensor:
        batch, length, width = x_BLC.shape
        # Rows by head: query, key and value rows of head 0, then of head 1, ...
        qkv = self.query_key_value(x_BLC).view(batch, length, self.heads, 3, width // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        before, parts = seen.keys - length, []
        for first in range(0, length, BLOCK):
            last = min(first + BLOCK, length)
            visible = slice(0, before + last)
            given = (q[:, :, first:last], k[:, :, visible], v[:, :, visible], tables)
            if torch.is_grad_enabled() and length > BLOCK:
                part = checkpoint(seen.block, *given, before + first, use_reentrant=False)
            else:
                part = seen.block(*given, before + first)
            parts.append(part)
        out = torch.cat(parts, dim=2).transpose(1, 2).reshape(batch, length, width)
        mixed: Tensor = self.dense(out)
        return mixed


class Layer(nn.Module):
    def __init__(self, config: GPTPositionsConfig, index: int) -> None:
        super().__init__()
        self.parallel = config.use_parallel_residual
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = Attention(config, index)
        self.mlp = nn.ModuleDict(
            {
                "dense_h_to_4h": nn.Linear(config.hidden_size, config.intermediate_size),
                "dense_4h_to_h": nn.Linear(config.intermediate_size, config.hidden_size),
            }
        )

    def forward(self, x_BLC: Tensor, tables: Tables, seen: Seen, cache: Any) -> Tensor:
        attended_BLC = x_BLC + self.attention(self.input_layernorm(x_BLC), tables, seen, cache)
        read_BLC = self.post_attention_layernorm(x_BLC if self.parallel else attended_BLC)
        inner_BLI = F.gelu(self.mlp["dense_h_to_4h"](read_BLC))
        out: Tensor = attended_BLC + self.mlp["dense_4h_to_h"](inner_BLI)
        return out


class GPTPositionsForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = GPTPositionsConfig
    base_model_prefix = ""
    _no_split_modules = ["Layer"]
    _tied_weights_keys = {"lm_head.weight": "embed_in.weight"}
    _keep_in_fp32_modules_strict = ["position"]
    accepts_loss_kwargs = False

    def __init__(self, config: GPTPositionsConfig) -> None:
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = nn.ModuleList(
            [Position(config) for _ in (layers if config.position_sharing == "layer" else (0,))]
        )
        self.layers = nn.ModuleList([Layer(config, index) for index in layers])
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers, except that nothing may be missing, surplus or of another shape."""
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        wrong = {what: sorted(map(str, found)) for what, found in info.items() if found}
        if wrong:
            raise ValueError(f"the weights do not fit this {model.config.position} model: {wrong}")
        for position in model.position:
            position.check()
        return (model, info) if output_loading_info else model

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_in

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_in = cast("nn.Embedding", value)

    def get_output_embeddings(self) -> nn.Module:
        return cast("nn.Module", self.lm_head)

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """`attention_mask` [B, K]: 0 at padding, which stands left or right of the text, over cached
        and new tokens. Positions count from its first 1. `labels`: as `input_ids`, -100 is left out.

        `output_hidden_states` and `return_dict` (False: a tuple) default to the configuration's.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        others.setdefault("output_attentions", self.config.output_attentions)
        unknown = {
            key for key, value in others.items() if value is not None and value is not False
        } - IGNORED
        if unknown:
            raise TypeError(f"this model does not take {', '.join(sorted(unknown))}")
        x_BLC: Tensor = self.embed_in(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        before = 0 if cache is None else int(cache.get_seq_length())
        length = x_BLC.shape[1]
        padding_BK, positions_BL = self._places(attention_mask, before, length, x_BLC.device)
        methods = cast("list[Position]", list(self.position))
        x_BLC = methods[0].embed(x_BLC, positions_BL)
        seen = Seen(before + length, self.config.attention_window, padding_BK)
        all_tables = [method.tables(seen.keys, x_BLC.device) for method in methods]
        states = [x_BLC]
        for index, layer in enumerate(self.layers):
            x_BLC = layer(x_BLC, all_tables[index % len(all_tables)], seen, cache)
            states.append(x_BLC)
        states[-1] = x_BLC = self.final_layer_norm(x_BLC)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x_BLC[:, keep])
        loss = None
        if labels is not None:
            shown = logits[:, :-1].float().flatten(0, 1)
            loss = F.cross_entropy(shown, labels[:, 1:].flatten().to(logits.device))
        given: dict[str, Any] = {"loss": loss, "logits": logits, CACHE: cache}
        said = self.config
        if said.output_hidden_states if output_hidden_states is None else output_hidden_states:
            given["hidden_states"] = tuple(states)
        out = CausalLMOutputWithPast(**given)
        named = said.return_dict if return_dict is None else return_dict
        return out if named else out.to_tuple()

    @staticmethod
    def _places(
        mask: Tensor | None, before: int, length: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor]:
        """Padding [B, K], and the positions [B, L] of the new tokens."""
        if mask is None:
            return None, torch.arange(before, before + length, device=device)[None]
        if mask.dim() != 2 or mask.shape[1] != before + length:
            raise ValueError(
                f"attention_mask must be [batch, {before + length}], cached and new tokens; it is "
                f"{list(mask.shape)} (caches of a fixed size are not supported)"
            )
        real_BK = mask.bool()
        starts = (real_BK[:, 1:] & ~real_BK[:, :-1]).sum(1) + real_BK[:, 0]
        if (starts > 1).any():
            raise ValueError("attention_mask has a hole: padding stands left or right of the text")
        positions_BK = (real_BK.cumsum(1) - 1).clamp(min=0)
        return (None if bool(real_BK.all()) else ~real_BK), positions_BK[:, before:]
