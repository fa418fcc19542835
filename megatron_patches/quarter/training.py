"""A bare training step: the standalone engine's arithmetic on one device, without DeepSpeed.

In bfloat16 the model's weights are bfloat16 and AdamW updates a float32 copy of them, which is what
DeepSpeed does, too: no operator casts its weights again as under autocast, and norms and the residual
stream move half the bytes. Position parameters stay float32 and have no copy.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_patches.quarter.plan import PlannedRun
from megatron_patches.standalone.model import GPT, Attention
from megatron_patches.standalone.optimizer import parameter_groups
from megatron_patches.training import position_state


class Trainer:
    """A model, its float32 weights and its optimizer on one device."""

    def __init__(self, run: PlannedRun, device: torch.device, attention: str) -> None:
        self.training, self.device = run.training, device
        torch.manual_seed(run.training.seed)
        self.model = GPT(replace(run.shape, attention=attention)).to(device)
        self.model.to(getattr(torch, run.training.precision))
        groups = parameter_groups(self.model, self.training)  # type: ignore[arg-type]
        masters: dict[nn.Parameter, nn.Parameter] = {}
        for group in groups:
            for weight in group["params"]:
                masters[weight] = _master(weight)
            group["params"] = [masters[weight] for weight in group["params"]]
        self.masters = [*masters.values()]
        rounded = [(w, m) for w, m in masters.items() if w is not m]
        self._weights: list[torch.Tensor] = [weight for weight, _ in rounded]
        self._copies: list[torch.Tensor] = [master for _, master in rounded]
        params = run.training.optimizer.params
        betas = (params.betas[0], params.betas[1])
        self._updates = 0
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=params.eps, fused=True)

    def step(self, rows: Tensor, rate: float, micro: int) -> tuple[Tensor, Tensor]:
        """One update from `rows` int64 `[batch, length + 1]`, at most `micro` sequences at a time.

        Returns the mean loss in nats and the norm of the gradient before clipping; both scalars stay
        on the device, so that nothing waits for it.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        position_state.begin(self.model.own_methods(), self._updates)
        self._updates += 1
        parts = rows.split(micro)
        total = torch.zeros((), device=self.device)
        for part in parts:
            share = part.shape[0] / rows.shape[0]
            loss = self.model(part[:, :-1], part[:, 1:])
            (loss * share).backward()
            total += loss.detach() * share
            self._collect()
        norm = torch.nn.utils.clip_grad_norm_(self.masters, self._limit())
        self.optimizer.step()
        with torch.no_grad():
            if self._weights:
                torch._foreach_copy_(self._weights, self._copies)
        position_state.project(self.model.own_methods(), self.optimizer)
        return total, norm

    def _limit(self) -> float:
        return self.training.gradient_clipping or float("inf")

    @torch.no_grad()
    def _collect(self) -> None:
        """Add the bfloat16 gradients to the float32 ones of the copies, and forget them."""
        sums, shares = [], []
        for weight, master in zip(self._weights, self._copies, strict=True):
            if weight.grad is None:
                continue
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            sums.append(master.grad)
            shares.append(weight.grad.float())
            weight.grad = None
        if sums:
            torch._foreach_add_(sums, shares)


def _master(weight: nn.Parameter) -> nn.Parameter:
    """The float32 tensor that the optimizer updates: the weight itself where it is float32."""
    if weight.dtype == torch.float32:
        return weight
    return nn.Parameter(weight.detach().float())


def use_attention(model: GPT, name: str) -> None:
    """Let the model attend by another implementation from now on."""
    model.shape = replace(model.shape, attention=name)
    for module in model.modules():
        if isinstance(module, Attention):
            module.shape = model.shape
