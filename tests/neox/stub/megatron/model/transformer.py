"""Attention with dense scores, the only one that reads `rpe` and `alibi_embed`."""

import math

import torch

from megatron import mpu

from .positional_embeddings import AliBi, RotaryEmbedding


class ParallelSelfAttention(torch.nn.Module):
    def __init__(
        self,
        neox_args,
        attention_mask_func,
        init_method,
        output_layer_init_method,
        layer_number,
        rpe=None,
        rotary=False,
        use_cache=False,
        parallel_output=False,
    ):
        super().__init__()
        size = mpu.get_model_parallel_world_size()
        self.mask_func, self.use_cache = attention_mask_func, use_cache
        self.hidden_size_per_attention_head = neox_args.hidden_size // neox_args.num_attention_heads
        self.heads = neox_args.num_attention_heads // size
        self.kv_heads = (neox_args.num_kv_heads or neox_args.num_attention_heads) // size
        self.pos_emb = neox_args.pos_emb
        self.attention_type = neox_args.attention_config[layer_number]
        assert self.attention_type in ("global", "flash"), self.attention_type
        width = self.hidden_size_per_attention_head
        self.query_key_value = torch.nn.Linear(
            neox_args.hidden_size, (self.heads + 2 * self.kv_heads) * width
        )
        self.norm_factor = math.sqrt(self.hidden_size_per_attention_head)
        if neox_args.apply_query_key_layer_scaling:
            self.norm_factor *= max(1, layer_number)
        self.rpe = rpe
        if self.pos_emb == "alibi":
            self.alibi_embed = AliBi(
                neox_args.num_attention_heads,
                neox_args.model_parallel_size,
                mpu.get_model_parallel_rank(),
            )
        self.rotary_emb = None
        if rotary:
            self.rotary_emb = RotaryEmbedding(
                int(width * neox_args.rotary_pct),
                base=neox_args.rotary_emb_base,
                max_seq_len=neox_args.seq_length,
            )

    def attention(self, query_layer, key_layer, value_layer, layer_past, attention_mask):
        """[batch, heads, queries, width] from [length, batch, heads, width]."""
        attention_scores = (
            torch.einsum("qbhd,kbhd->bhqk", query_layer, key_layer) / self.norm_factor
        ).to(torch.cuda.current_device())
        if self.rpe is not None:
            attention_scores += self.rpe(query_layer.size(0), key_layer.size(0))
        if self.pos_emb == "alibi":
            attention_scores = self.alibi_embed(attention_scores)
        masked = self.mask_func(attention_scores, attention_mask)
        return masked.softmax(-1) @ value_layer.permute(1, 2, 0, 3)

    def forward(self, hidden_states, attention_mask, layer_past=None):
        """hidden_states [length, batch, hidden]; layer_past: keys and values seen before."""
        length, batch, _ = hidden_states.shape
        width = self.hidden_size_per_attention_head
        mixed = self.query_key_value(hidden_states).view(length, batch, -1, width)
        query_layer, *rest = mixed.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        key_layer, value_layer = (t.repeat_interleave(self.heads // self.kv_heads, 2) for t in rest)
        first = 0 if layer_past is None else layer_past[0].size(0)
        if self.rotary_emb is not None:
            query_layer = self.rotary_emb(query_layer, first)
            key_layer = self.rotary_emb(key_layer, first)
        if layer_past is not None:
            key_layer = torch.cat([layer_past[0], key_layer])
            value_layer = torch.cat([layer_past[1], value_layer])
        context = self.attention(query_layer, key_layer, value_layer, layer_past, attention_mask)
        flat = context.permute(2, 0, 1, 3).reshape(length, batch, -1)
        return (flat, (key_layer, value_layer)) if self.use_cache else flat


class ParallelTransformerLayer(torch.nn.Module):
    def __init__(
        self,
        neox_args,
        attention_mask_func,
        init_method,
        output_layer_init_method,
        layer_number,
        rpe=None,
        rotary=False,
        use_cache=False,
    ):
        super().__init__()
        self.input_layernorm = torch.nn.LayerNorm(neox_args.hidden_size)
        self.attention = ParallelSelfAttention(
            neox_args,
            attention_mask_func=attention_mask_func,
            init_method=init_method,
            output_layer_init_method=output_layer_init_method,
            layer_number=layer_number,
            rpe=rpe,
            use_cache=use_cache,
            rotary=rotary,
        )

    def forward(self, hidden_states, attention_mask):
        return hidden_states + self.attention(self.input_layernorm(hidden_states), attention_mask)


class ParallelTransformerLayerPipe(ParallelTransformerLayer):
    def forward(self, args):
        hidden_states, attention_mask = args
        return super().forward(hidden_states, attention_mask), attention_mask
