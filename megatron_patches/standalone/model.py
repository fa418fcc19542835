"""GPT with GPT-NeoX's parameter names, layer numbers and row order, so that weights move both ways.

`state_dict` keys are those of NeoX's sequential layout for n layers: `sequential.0` embedding,
`sequential.2` to `sequential.{n+1}` the layers, `sequential.{n+3}` the last norm, `sequential.{n+4}`
the output. 1 and n+2 are functions without weights in NeoX, so these numbers are missing here.

Shape suffixes: B batch, L length, C hidden width, H heads, D head dimension, V padded vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_patches.attention import attend
from megatron_patches.attention.problem import Problem, Sight
from megatron_patches.attention.selection import choose
from megatron_patches.positions import PositionMethod
from megatron_patches.standalone.cache import Cache, check_plan, positions_of
from megatron_patches.standalone.shape import ModelShape, initialise, position_methods


class Embedding(nn.Module):
    def __init__(self, shape: ModelShape, position: PositionMethod | None) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocabulary, shape.hidden_size)
        self._position_name = position.module_name if position is not None else None
        if position is not None:
            self.add_module(position.module_name, position)

    def forward(self, tokens_BL: Tensor, positions: Tensor) -> Tensor:
        """`positions` is [L] or [B, L]."""
        x_BLC = self.word_embeddings(tokens_BL)
        if self._position_name is not None:
            x_BLC = getattr(self, self._position_name)(x_BLC, positions)
        return x_BLC


class Attention(nn.Module):
    def __init__(self, shape: ModelShape, index: int, method: PositionMethod) -> None:
        super().__init__()
        self.shape, self.index = shape, index
        self.query_key_value = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.dense = nn.Linear(shape.hidden_size, shape.hidden_size)
        # An embedding method adds nothing to the scores and must not appear here in the state dict.
        if method.place == "attention":
            self.add_module(method.module_name, method)
        self._method = (method,)  # a tuple hides it from nn.Module's registration

    def forward(
        self,
        x_BLC: Tensor,
        cache: Cache | None,
        padding_BK: Tensor | None,
        last: int | None = None,
    ) -> Tensor:
        batch, length, width = x_BLC.shape
        shape, (method,) = self.shape, self._method
        # NeoX orders the rows by head: query, key and value rows of head 0, then of head 1, ...
        qkv = self.query_key_value(x_BLC).view(batch, length, shape.heads, 3, shape.head_dim)
        q, k, v = qkv.permute(3, 0, 2, 1, 4).unbind(0)
        if cache is not None:
            q, k, v = self._extend(cache, method, q, k, v)
        gates = self._gates(cache, method, x_BLC, last)
        if last is not None:
            q = q[:, :, -last:]
        o_BHLD = attend(
            q,
            k,
            v,
            method,
            impl=shape.attention,
            eps=shape.attention_eps,
            window=shape.window,
            key_padding_mask=padding_BK,
            transformed=cache is not None and method.cache == "transformed",
            gates=gates,
        )
        return self.dense(o_BHLD.transpose(1, 2).reshape(batch, q.shape[2], width))

    def _extend(
        self, cache: Cache, method: PositionMethod, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Append the new keys and values; the queries are then the last of all positions."""
        if method.cache == "transformed":
            total = cache.length + q.shape[2]
            positions_L = torch.arange(cache.length, total, device=q.device)
            q, k = method.transform(q, k, positions_L, total_length=total)
        old_k, old_v = cache.keys[self.index], cache.values[self.index]
        if old_k is not None and old_v is not None:
            k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        cache.keys[self.index], cache.values[self.index] = k, v
        return q, k, v

    def _gates(
        self, cache: Cache | None, method: PositionMethod, x_BLC: Tensor, last: int | None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Log decays of all keys, and gains of the queries; a cache keeps the log decays."""
        gates = method.decay(x_BLC)
        if gates is None:
            return None
        log_decay, gain = gates
        if cache is not None:
            old = cache.log_decays[self.index]
            log_decay = log_decay if old is None else torch.cat([old, log_decay], dim=2)
            cache.log_decays[self.index] = log_decay
        if gain is not None and last is not None:
            gain = gain[:, :, -last:]
        return log_decay, gain


class MLP(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        inner = shape.intermediate_size or 4 * shape.hidden_size
        self.linear1 = nn.Linear(shape.hidden_size, inner)
        self.linear2 = nn.Linear(inner, shape.hidden_size)

    def forward(self, x_BLC: Tensor) -> Tensor:
        return self.linear2(F.gelu(self.linear1(x_BLC)))


class Layer(nn.Module):
    def __init__(self, shape: ModelShape, index: int, method: PositionMethod) -> None:
        super().__init__()
        self.parallel = shape.parallel_residual
        self.input_layernorm = nn.LayerNorm(shape.hidden_size, eps=shape.layernorm_epsilon)
        self.attention = Attention(shape, index, method)
        self.post_attention_layernorm = nn.LayerNorm(shape.hidden_size, eps=shape.layernorm_epsilon)
        self.mlp = MLP(shape)

    def forward(
        self,
        x_BLC: Tensor,
        cache: Cache | None,
        padding_BK: Tensor | None,
        last: int | None = None,
    ) -> Tensor:
        """`last`: attend to everything, for that many last positions only."""
        attention = self.attention(self.input_layernorm(x_BLC), cache, padding_BK, last)
        if last is not None:
            x_BLC = x_BLC[:, -last:]
        if self.parallel:
            return x_BLC + attention + self.mlp(self.post_attention_layernorm(x_BLC))
        x_BLC = x_BLC + attention
        return x_BLC + self.mlp(self.post_attention_layernorm(x_BLC))


class LastNorm(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.hidden_size, eps=shape.layernorm_epsilon)

    def forward(self, x_BLC: Tensor) -> Tensor:
        return self.norm(x_BLC)


class Output(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.final_linear = nn.Linear(shape.hidden_size, shape.vocabulary, bias=False)

    def forward(self, x_BLC: Tensor) -> Tensor:
        return self.final_linear(x_BLC)


class GPT(nn.Module):
    """Decoder-only transformer: `model(tokens_BL)` gives logits, with `labels_BL` the mean loss."""

    def __init__(self, shape: ModelShape) -> None:
        """Raises ValueError when the heads do not divide the width or the method refuses its options."""
        super().__init__()
        if shape.hidden_size % shape.heads:
            raise ValueError(
                f"hidden_size {shape.hidden_size} is not divisible by "
                f"num_attention_heads {shape.heads}"
            )
        self.shape = shape
        self.methods = position_methods(shape)
        first = self.methods[0]
        n = shape.layers
        self.sequential = nn.ModuleDict()
        self.sequential["0"] = Embedding(shape, first if first.place == "embedding" else None)
        for index in range(n):
            self.sequential[str(index + 2)] = Layer(shape, index, self.methods[index])
        self.sequential[str(n + 3)] = LastNorm(shape)
        if not shape.tied_output:
            self.sequential[str(n + 4)] = Output(shape)
        self._layers = range(2, n + 2)
        self._exact: dict[nn.Parameter, Tensor] = {}
        initialise(self, shape)

    @property
    def position_method(self) -> PositionMethod:
        """The method of the first layer; of all layers unless `position_sharing` is `layer`."""
        return self.methods[0]

    def hidden(
        self,
        tokens_BL: Tensor,
        cache: Cache | None = None,
        padding_BK: Tensor | None = None,
        *,
        last: int | None = None,
    ) -> Tensor:
        """States after the last norm, `[B, L, C]`; `logits` turns (parts of) them into logits.

        Args:
            tokens_BL: int64 token ids.
            cache: tokens are appended to it; None reads `tokens_BL` as a whole sequence.
            padding_BK: bool, True at padding, over cached and new tokens together. Padding stands left
                or right of the text; absolute positions count from the first real token. Methods whose
                `follows_length` is true raise ValueError.
            last: return `[B, last, C]`, the last positions; the last layer computes no others.
        """
        check_plan(self.methods, cache, padding_BK)
        positions = positions_of(tokens_BL, 0 if cache is None else cache.length, padding_BK)
        x_BLC = self.sequential["0"](tokens_BL, positions)
        recompute = self.shape.checkpoint_activations and self.training and cache is None
        for number in self._layers:
            layer = self.sequential[str(number)]
            wanted = last if number == self._layers[-1] else None
            if recompute:
                x_BLC = checkpoint(layer, x_BLC, cache, padding_BK, wanted, use_reentrant=False)
            else:
                x_BLC = layer(x_BLC, cache, padding_BK, wanted)
        if cache is not None:
            cache.length += tokens_BL.shape[1]
        return self.sequential[str(self.shape.layers + 3)](x_BLC)

    @property
    def _word_embeddings(self) -> nn.Embedding:
        first = self.sequential["0"]
        assert isinstance(first, Embedding)
        return first.word_embeddings

    def logits(self, hidden_BLC: Tensor) -> Tensor:
        if self.shape.tied_output:
            return F.linear(hidden_BLC, self._word_embeddings.weight)
        return self.sequential[str(self.shape.layers + 4)](hidden_BLC)

    def forward(self, tokens_BL: Tensor, labels_BL: Tensor | None = None) -> Tensor:
        logits_BLV = self.logits(self.hidden(tokens_BL))
        if labels_BL is None:
            return logits_BLV
        # float32: a loss from bfloat16 logits falls on a coarse grid
        return F.cross_entropy(logits_BLV.float().flatten(0, 1), labels_BL.flatten())

    @torch.no_grad()
    def token_losses(
        self, tokens_BL: Tensor, labels_BL: Tensor, *, first: int = 0, block: int = 1024
    ) -> Tensor:
        """float32 `[B, L - first]` losses in nats of the positions from `first` on.

        Logits exist for `block` positions at a time, so a long window needs no room for all of them.
        """
        hidden_BLC = self.hidden(tokens_BL)
        losses = []
        for start in range(first, tokens_BL.shape[1], block):
            part = slice(start, start + block)
            logits = self.logits(hidden_BLC[:, part]).float()
            losses.append(
                F.cross_entropy(logits.transpose(1, 2), labels_BL[:, part], reduction="none")
            )
        return torch.cat(losses, dim=1)

    def set_deepspeed_parallelism(self, *_: object, **__: object) -> None:
        """DeepSpeed calls this on every module between casting the model and making its optimizer.

        Its cast goes past `nn.Module`, so the position parameters, which stay float32, are put back.
        """
        for parameter, value in self._exact.items():
            parameter.data = value.to(parameter.device)

    def remember_positions(self) -> None:
        """Keep the float32 position parameters for `set_deepspeed_parallelism`; before `initialize`."""
        self._exact = {p: p.detach().clone() for m in self.methods for p in m.parameters()}

    def own_methods(self) -> list[PositionMethod]:
        """Each position method once: one, or one a layer."""
        return list(dict.fromkeys(self.methods))

    def position_parameters(self) -> list[nn.Parameter]:
        """Learned parameters of the attention's position method, each once."""
        found = {id(p): p for m in self.methods if m.place == "attention" for p in m.parameters()}
        return list(found.values())

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def attention_name(self) -> str:
        """What attends without gradients: the named implementation, or what `auto` takes here."""
        if self.shape.attention != "auto":
            return self.shape.attention
        weight = self._word_embeddings.weight
        q = weight.new_zeros(1, self.position_method.owned_heads, 1, self.shape.head_dim)
        return choose(Problem(q, q, q, self.position_method, 1.0, Sight()))
