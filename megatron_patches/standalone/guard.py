"""Watchdogs of one rank: losses that are not finite or explode, parameters out of bounds, evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_patches.standalone import evidence
from megatron_patches.standalone.diagnose import TrainingError, first_cause
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.runtime import World
from megatron_patches.training import position_state

if TYPE_CHECKING:
    from megatron_patches.config import Config

# A loss below this counts as this much: a model that knows its text by heart has losses of nearly 0,
# of which any ordinary loss is a large multiple. In nats a token.
LEAST_LOSS = 1.0


class Guard:
    """Looks at every logged step; every failure keeps its evidence and is a TrainingError.

    `lowest` is the lowest logged loss of the run, part of its checkpoints.
    """

    def __init__(self, config: Config, world: World, model: GPT, micro: int) -> None:
        self.config, self.world, self.model = config, world, model
        self.folder: Path = config.save_dir
        self.micro = micro  # sequences
        self.lowest = math.inf
        self._losses: list[tuple[int, float]] = []  # iteration, logged loss; the latest ones
        self._read: list[tuple[int, int]] = []  # iteration, first sample of each micro batch

    def read(self, iteration: int, first: int) -> None:
        """Samples `first` and the following ones, a micro batch, go into `iteration` on this rank."""
        self._read.append((iteration, first))

    def mean(self, iteration: int, own: torch.Tensor) -> float:
        """The mean over all ranks of their `own` losses. All ranks call it.

        Raises TrainingError, on all of them, where it is not finite.
        """
        mean = own.clone()
        if self.world.size > 1:
            torch.distributed.all_reduce(mean)
            mean /= self.world.size
        value = mean.item()
        if not math.isfinite(value):
            losses = self.of_all(own)
            raise self.not_finite(
                iteration, [r for r, x in enumerate(losses) if not math.isfinite(x)], None
            )
        return value

    def logged(self, iteration: int, loss: float, own: torch.Tensor) -> None:
        """After each logged step; `loss` is the mean over ranks of their `own` ones.

        Raises TrainingError, on all ranks, where it exploded or a parameter left its bounds.
        """
        self._losses = [*self._losses[-99:], (iteration, loss)]
        multiple = self.config.watch_loss_multiple
        limit = multiple * max(self.lowest, LEAST_LOSS)
        if multiple and not math.isinf(self.lowest) and loss > limit:
            losses = self.of_all(own)
            worst = losses.index(max(losses))
            raise self.failure(
                iteration,
                f"loss {loss:.4g} at iteration {iteration} is above {limit:.4g}, {multiple:g} times "
                f"(`watch_loss_multiple`) the lowest so far, {self.lowest:.4g}; largest on rank {worst}",
            )
        self.lowest = min(self.lowest, loss)
        for line in position_state.outside(self.model.own_methods()):
            raise self.failure(iteration, line)
        self._read = []

    def of_all(self, own: torch.Tensor) -> list[float]:
        """This number of every rank, in their order. All ranks call it."""
        return [float(row) for row in self.rows_of_all(own.reshape(1))[:, 0]]

    def rows_of_all(self, own: torch.Tensor) -> torch.Tensor:
        """`own` [n] of every rank, as [ranks, n]; all ranks call it, with the same n."""
        if self.world.size == 1 or not own.numel():
            return own.repeat(self.world.size, 1)
        parts = [torch.empty_like(own) for _ in range(self.world.size)]
        torch.distributed.all_gather(parts, own.contiguous())
        return torch.stack(parts)

    def not_finite(
        self, iteration: int, ranks: Sequence[int], text: torch.Tensor | None
    ) -> TrainingError:
        """The failure of a loss that is NaN or infinite on `ranks`; `text` as in `first_cause`."""
        if self.config.zero_stage == 3:
            text = None  # there a forward pass needs all ranks
        where = ", ".join(map(str, ranks)) or "no single one"
        return self.failure(
            iteration, f"loss is not finite at iteration {iteration} on rank {where}", text, True
        )

    def failure(
        self,
        iteration: int,
        reason: str,
        text: torch.Tensor | None = None,
        search: bool = False,
    ) -> TrainingError:
        """Keep what is known; the exception to raise."""
        rows = evidence.statistics(self.model)
        cause = first_cause(self.model, text) if search else evidence.largest(rows)
        kept = self.keep(iteration, {"reason": reason, "cause": cause, "tensors": rows})
        place = "" if "iteration" in reason else f" at iteration {iteration}"
        mine = "" if "rank" in reason else f" (seen by rank {self.world.rank})"
        return TrainingError(f"{reason}{place}{mine}: {cause}; {kept}")

    def keep(self, iteration: int, content: dict[str, Any]) -> str:
        """Write the evidence of this rank; returns where it is."""
        latest = self.folder / "latest"
        known = {
            "samples": [
                {"iteration": at, "first": first, "count": self.micro} for at, first in self._read
            ],
            "losses": [{"iteration": at, "lm_loss": loss} for at, loss in self._losses],
            "lowest_loss": None if math.isinf(self.lowest) else self.lowest,
            "last_checkpoint": latest.read_text(encoding="utf-8") if latest.is_file() else None,
        }
        return evidence.write(self.folder, iteration, self.world.rank, {**content, **known})
