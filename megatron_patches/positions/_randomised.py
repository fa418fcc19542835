"""Randomised positions: those of a text are drawn from a range that holds every length to be read.

Ruoss et al.: Randomized Positional Encodings Boost Length Generalization of Transformers (arXiv
2305.16843), section 3: of a text of T tokens, T places of 0 ... span-1, sorted, so that no place is new in
a longer text. Of methods that see distances, T-1 distances of 1 ... span-1 take the place of 1 ... T-1.

One draw for each step of the training, and one other for reading; both follow the seed alone, so that all
ranks, a run that continues and a recomputed layer have the same.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from megatron_patches.positions._base import PositionMethod
from megatron_patches.positions._geometry import Geometry
from megatron_patches.positions._options import at_least


class Randomised(PositionMethod):
    """Comes before the class of the method that is given other places. Saves nothing of its own.

    A text can be read piece by piece once its whole length is planned (`planned_length`), for all places
    follow it. In training mode there is a new draw for each value of `step`, which engines set.

    Options: `span`, the range of the draws and the longest readable text. `draw`: which of the draws for
    reading; a trained model may be read with another.
    """

    follows_length = True
    evaluation_options = ("draw",)

    def __init__(
        self, geometry: Geometry, *, span: int = 16384, draw: int = 0, **common: Any
    ) -> None:
        super().__init__(geometry, **common)
        self.span = at_least(self.name, "span", span, 1)
        self.draw = at_least(self.name, "draw", draw, 0)
        self.max_length = span

    def can_read(self, length: int) -> None:
        """Raises ValueError beyond `span`, too."""
        if length > self.span:
            raise ValueError(
                f"{self.name} cannot read {length} tokens: its places end at span={self.span}, with which "
                "it was trained"
            )
        super().can_read(length)

    def take(self, among: int, count: int) -> Tensor:
        """`count` different numbers of 0 ... among-1, rising: int64 [count], on the CPU."""
        purpose = f"step {self.step}" if self.training else f"draw {self.draw}"
        key = hashlib.blake2b(f"{self.geometry.seed}, {purpose}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)
        order = torch.randperm(among, generator=generator, device="cpu")
        return order[:count].sort().values

    def of_text(self, length: int | None) -> int:
        """The planned length, or `length`. Raises ValueError for one beyond `span` or the plan, or None."""
        if length is None and self.planned_length is None:
            raise ValueError(f"{self.name} needs the length of the whole text")
        if length is not None and length > (self.planned_length or length):
            raise ValueError(
                f"{self.name}: {length} tokens of a text that was planned with {self.planned_length}"
            )
        whole = self.planned_length or length
        assert whole is not None
        self.can_read(whole)
        return whole

    def _options(self) -> dict[str, Any]:
        return {"span": self.span, "draw": self.draw, **super()._options()}


class RandomisedPlaces(Randomised):
    """For methods that see positions."""

    def places(self, positions: Tensor, length: int | Tensor | None) -> Tensor:
        """Drawn places of `positions` ([L] or [B, L]) in a text of `length` tokens, or [B] of them."""
        if isinstance(length, Tensor) and length.dim() and self.planned_length is None:
            rows = positions.expand(len(length), positions.shape[-1])
            # A row of padding alone has no length; where it ends matters to nobody.
            each = [
                self.places(row, max(1, n)) for row, n in zip(rows, length.tolist(), strict=True)
            ]
            return torch.stack(each)
        if isinstance(length, Tensor):
            length = int(length.max())
        drawn = self.take(self.span, self.of_text(length)).to(positions.device)
        return drawn[positions.clamp(max=len(drawn) - 1)]


class RandomisedEmbedding(RandomisedPlaces):
    """For methods that add to the embeddings of the tokens."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """As the method embeds it, at drawn places. A row's text ends with its last position.

        Raises ValueError for positions that do not start with 0, unless the length is planned.
        """
        ends = positions[..., -1] + 1
        if self.planned_length is None and bool(positions[..., 0].any()):
            raise ValueError(
                f"{self.name}: a text that is read piece by piece needs `planned_length`"
            )
        return super().embed(x, self.places(positions, ends))


class RandomisedDistances(Randomised):
    """For methods that see distances alone."""

    def stretch(self, length: int) -> Tensor:
        """0, then drawn distances, int64 [length]."""
        drawn = self.take(self.span - 1, self.of_text(length) - 1)[: length - 1] + 1
        device = next((t.device for t in [*self.parameters(), *self.buffers()]), None)
        return torch.cat([drawn.new_zeros(1), drawn]).to(device)

    def closed_form(self) -> None:
        """None: the distances are drawn."""
        return None
