"""What a position method may do, and the rules that all methods share.

Shapes: H heads owned here, B batch, L length, C hidden size, D head size. A distance is
query position - key position >= 0, an integer or floating tensor of any shape. Nothing checks that
it is not negative (that would read the data back from a GPU); that is the caller's duty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from megatron_patches.positions._closed_form import ClosedForm
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._precise import Precise


class PositionMethod(Precise):
    """One way of telling attention where tokens are. Every hook defaults to doing nothing.

    Floating parameters and buffers stay in fp32 whatever dtype the model is cast to; bf16 holds
    integers exactly up to 256 only. `to_float64_` is the one way to another dtype.

    Options of every method:
        precision: "exact", or "as_published": round distances and parameters to `model_dtype` first
            and compute in it, as the KERPLE authors' runs did. Refused where no reference exists.
        model_dtype: "float32", "bfloat16", "float16" or the torch dtype; "as_published" needs it.
    """

    name: ClassVar[str] = ""  # the file's stem
    tier: ClassVar[Literal["table", "positional", "content"]] = "table"
    place: ClassVar[Literal["attention", "embedding"]] = "attention"
    # Attribute of the layer's attention or of the embedding that holds the module in GPT-NeoX.
    module_name: ClassVar[str] = "position"
    mixes_heads: ClassVar[bool] = False  # `score` needs all heads of the model: no `head_range`
    # Whether a token's place depends on how long the whole text is: `planned_length`, or without one as much
    # as is given, so that it is read in one piece. `transform` then counts positions without the padding.
    follows_length: ClassVar[bool] = False
    # Why gradients jump where rounding differs, so that two ways of computing drift apart; "": they do not.
    rounding_jumps: ClassVar[str] = ""
    # Options that a trained model may be read with in other values; they change no parameter's shape.
    evaluation_options: ClassVar[tuple[str, ...]] = ()

    # These two may depend on the options: an instance may set them.
    sharing: Literal["model", "layer"] = "model"
    # Keys that a cache keeps: as `transform` left them, or as they were, to be transformed at each length.
    cache: Literal["transformed", "raw"] = "transformed"
    score_scale: float | None = None  # None: 1/sqrt(head_dim of the model)
    max_length: int | None = None  # longest readable input; None: no limit
    # Optimiser steps so far, set by who trains, for methods that draw something anew in each.
    step: int = 0
    # Tokens of the whole text, set by who reads it piece by piece.
    planned_length: int | None = None
    bounds: dict[str, tuple[float, float]]  # parameter -> legal interval
    # Saved tensor -> its dimension that runs over heads; None: replicated under tensor parallel.
    head_dim_of: dict[str, int | None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__module__.rpartition(".")[2]

    def __init__(
        self,
        geometry: Geometry,
        *,
        precision: str = "exact",
        model_dtype: str | torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.heads, self.head_dim = geometry.heads, geometry.head_dim
        self.first_head, self.owned_heads = geometry.owned
        if self.mixes_heads and self.owned_heads < self.heads:
            raise ValueError(
                f"{self.name} mixes the scores of all {self.heads} heads: it cannot own "
                f"{self.owned_heads} of them; set model_parallel_size to 1"
            )
        self.bounds = {}
        self.head_dim_of = {}
        self.choose_precision(precision, model_dtype)

    # ---- the hooks -------------------------------------------------------------------------------

    def bias(self, distance: Tensor, query_position: Tensor | None = None) -> Tensor | None:
        """Added to the scaled scores: fp32 [H, *distance.shape], or None: nothing to add.

        Tier "table" ignores `query_position`.
        """
        return None

    def weight(self, distance: Tensor) -> Tensor | None:
        """Multiplies the scaled scores before the bias: fp32 [H, *distance.shape], or None."""
        return None

    def closed_form(self) -> ClosedForm | None:
        """`bias` as a formula that fused kernels know, or None: they read `table`.

        Says nothing about `weight`. None under "as_published", whose roundings no formula repeats.
        """
        return None

    def transform(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        *,
        hidden: Tensor | None = None,
        total_length: int | Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, H, L, D] at `positions` ([L] or [B, L]) before their product.

        `total_length` counts the tokens of the whole text, of each row where it is int64 [B] (padding
        does not count). The result is a function of the arguments alone, whatever was read before.
        """
        return q, k

    @property
    def transforms(self) -> bool:
        """Whether `transform` changes queries or keys."""
        return type(self).transform is not PositionMethod.transform

    def rope_parameters(self) -> dict[str, Any] | None:
        """`transform` in the terms of transformers' `rope_parameters`; None: they have none for it."""
        return None

    def decay(self, hidden: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Gates from the layer's input [B, L, C]: fp32 log decay [B, H, L], and a gain; None: no gates.

        Attention adds to the score of query i and key j gain_i * (sum of the log decays of the tokens
        j+1 ... i); a gain of None counts as 1. A method with gates is of tier "content"; its `bias`
        depends on the distance alone.
        """
        return None

    def stretch(self, length: int) -> Tensor | None:
        """What `bias` and `weight` take for the distances 0 ... length-1 of a text of `length` tokens.

        int64 [length], increasing from 0; None: the distances themselves. For tier "table".
        """
        return None

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Token embeddings [B, L, C] with their absolute positions ([L] or [B, L]) added."""
        return x

    def score(
        self,
        scores_BHQK: Tensor,
        distance_QK: Tensor,
        query_position_Q: Tensor,
        *,
        query_BHQD: Tensor,
        visible_QK: Tensor,
    ) -> Tensor:
        """New scores from unmasked, finite, whole key rows. Tier "content" must define it."""
        raise NotImplementedError(f"{self.name} (tier {self.tier}) does not rewrite scores")

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """The same as `embed`, so that hooks on module calls see it."""
        return self.embed(x, positions)

    # ---- services --------------------------------------------------------------------------------

    @property
    def gated(self) -> bool:
        """Whether attention must be given what `decay` returns."""
        return type(self).decay is not PositionMethod.decay

    @property
    def rewrites_scores(self) -> bool:
        """Whether `score` must be called: tier "content", unless the gates are all there is to it."""
        own = type(self).score is not PositionMethod.score
        return self.tier == "content" and (own or not self.gated)

    @property
    def length_decides(self) -> bool:
        """Whether a token is placed, or turned, by how long the text is that it is read in.

        Padding that counts into the length then changes what is computed for the tokens before it.
        """
        return self.follows_length or self.cache == "raw"

    @property
    def whole_rows(self) -> bool:
        """Whether attention must keep all heads and all keys of a query together."""
        return self.tier == "positional" or self.rewrites_scores

    @property
    def rows_by_distance(self) -> int:
        """Query positions below this have a bias of the distance alone, that of `table`.

        For tier "positional", where it saves looking at whole rows.
        """
        return 0

    @property
    def floats_per_score(self) -> int:
        """Numbers kept for each score on the way to its weight, about: the more, the fewer rows at a time."""
        return 8 if self.rewrites_scores else 2

    def can_read(self, length: int) -> None:
        """Return if an input of `length` tokens is possible.

        Raises:
            ValueError: length below 1, or beyond `max_length`.
        """
        if length < 1:
            raise ValueError(f"{self.name} cannot read {length} tokens")
        if self.max_length is not None and length > self.max_length:
            raise ValueError(
                f"{self.name} cannot read {length} tokens: its table ends at "
                f"max_length={self.max_length}"
            )

    def table(self, length: int) -> Tensor | None:
        """`bias` of the distances 0 ... length-1, stretched: fp32 [H, length], differentiable; or None."""
        return self.bias(self._distances(length))

    def weight_table(self, length: int) -> Tensor | None:
        """`weight` of the distances 0 ... length-1, stretched: fp32 [H, length], differentiable; or None."""
        return self.weight(self._distances(length))

    def _distances(self, length: int) -> Tensor:
        stretched = self.stretch(length)
        if stretched is not None:
            return stretched
        tensors = [*self.parameters(), *self.buffers()]
        return torch.arange(length, device=tensors[0].device if tensors else None)

    def own(self, key: str, values: Tensor) -> None:
        """Register a parameter whose name may be that of a hook.

        GPT-NeoX saves T5's and the learned table as `weight`, which is the name of a hook here, and
        nn.Module's usual ways refuse the name of a method. Read the values with `get_parameter`.
        """
        self._parameters[key] = nn.Parameter(values)

    def get_parameter(self, target: str) -> nn.Parameter:
        """As in nn.Module; also finds what `own` registered, and what `torch.func` put in its place."""
        place, _, key = target.rpartition(".")
        owned = self.get_submodule(place)._parameters
        if owned.get(key) is None:
            raise AttributeError(f"{self.name} has no parameter {target}")
        return cast(nn.Parameter, owned[key])  # by index: ZeRO-3 gathers on this access

    @torch.no_grad()
    def project_(self) -> None:
        """Move stored parameters back into `bounds`, in place. Call after each optimiser step."""
        for key, (low, high) in self.bounds.items():
            self.get_parameter(key).clamp_(low, high)

    @torch.no_grad()
    def statistics(
        self, all_heads: Callable[[Tensor, int], Tensor] | None = None
    ) -> dict[str, float]:
        """`<parameter>_mean|std|min|max` of the legal values of the per-head parameters.

        The standard deviation is the unbiased one, 0 for a single value. `all_heads(values, dim)` puts
        the heads of all tensor-parallel ranks together along `dim`; None: the heads owned here.
        """
        found: dict[str, float] = {}
        for key, parameter in self.named_parameters():
            dimension = self.head_dim_of.get(key)
            if dimension is None or parameter.numel() == 0:
                continue
            whole = parameter if all_heads is None else all_heads(parameter, dimension)
            low, high = self.bounds.get(key, (-float("inf"), float("inf")))
            values = whole.double().clamp(low, high).flatten()
            std = values.std() if values.numel() > 1 else torch.zeros_like(values[0])
            numbers = torch.stack([values.mean(), std, values.min(), values.max()]).tolist()
            kinds = ("mean", "std", "min", "max")
            found |= {f"{key}_{kind}": n for kind, n in zip(kinds, numbers, strict=True)}
        return found

    def settings(self) -> dict[str, Any]:
        """What fixes the method's function, as plain data, the same on every rank.

        Keys: name, heads, head_dim, max_length, options. Belongs into a checkpoint's metadata.
        """
        return {
            "name": self.name,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "max_length": self.max_length,
            "options": self._options(),
        }

    def _options(self) -> dict[str, Any]:
        """Resolved options; a method with options of its own adds them."""
        dtype = self.published_dtype
        return {
            "precision": self.precision,
            "model_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
        }
