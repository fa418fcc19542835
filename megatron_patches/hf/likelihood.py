"""Log-likelihoods of continuations, and texts up to a stop string, under a model of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data_prep.tokenizer import Tokenizer
from megatron_patches.standalone.generate import continuations
from megatron_patches.standalone.model import GPT

TOKENS_PER_PASS = 4096  # inputs are batched up to this many tokens unless told otherwise
Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context, at least one, and of what follows


@dataclass(frozen=True)
class Scorer:
    """`max_length` is the longest input in tokens: contexts lose their beginning beyond it.

    `batch_size`: inputs at a time; None: as many as `TOKENS_PER_PASS` allows.
    """

    model: GPT
    words: Tokenizer
    max_length: int
    batch_size: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a length that the position method cannot read."""
        self.model.position_method.can_read(self.max_length)

    @torch.no_grad()
    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """For each pair the sum of the continuation's log-probabilities in nats, and whether each of
        its tokens is the likeliest.

        Raises ValueError for an empty context, or a continuation that does not fit `max_length`.
        """
        cut = [self._fitting(context, continuation) for context, continuation in pairs]
        found: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(cut)), key=lambda i: -len(cut[i][0]))
        while order:
            longest = len(cut[order[0]][0])
            size = self.batch_size or max(1, TOKENS_PER_PASS // longest)
            group = order[:size]
            # Padding would lengthen the shorter texts, and so move their tokens.
            if any(method.length_decides for method in self.model.methods):
                group = [i for i in group if len(cut[i][0]) == longest]
            order = order[len(group) :]
            found |= dict(zip(group, self._together([cut[i] for i in group]), strict=True))
        return [found[i] for i in range(len(cut))]

    def _fitting(self, context: Sequence[int], continuation: Sequence[int]) -> Pair:
        """Input and targets: the last token is never read, the first of all never predicted."""
        if not context:
            raise ValueError("a context has no tokens: nothing predicts what follows")
        if len(continuation) > self.max_length:
            raise ValueError(
                f"a continuation has {len(continuation)} tokens, max_length is {self.max_length}"
            )
        text = [*context, *continuation][-(self.max_length + 1) :]
        return text[:-1] if continuation else text, list(continuation)

    def _together(self, group: Sequence[Pair]) -> list[tuple[float, bool]]:
        longest = len(group[0][0])
        # Padding stands right: causal attention keeps it from everything that is scored.
        ids_BL = torch.zeros(len(group), longest, dtype=torch.int64)
        for row, (text, _) in enumerate(group):
            ids_BL[row, : len(text)] = torch.as_tensor(text)
        device = next(self.model.parameters()).device
        hidden_BLC = self.model.hidden(ids_BL.to(device))
        found = []
        for row, (text, targets) in enumerate(group):
            states = hidden_BLC[row, len(text) - len(targets) : len(text)]
            found.append(self._sum(states, torch.as_tensor(targets, device=device).long()))
        return found

    def _sum(self, hidden_TC: Tensor, targets_T: Tensor) -> tuple[float, bool]:
        if not len(targets_T):
            return 0.0, True
        # float32: a loss from bfloat16 logits falls on a coarse grid
        logits_TV = self.model.logits(hidden_TC).float()
        chosen_T = logits_TV.log_softmax(-1).gather(1, targets_T[:, None])
        return float(chosen_T.double().sum()), bool((logits_TV.argmax(-1) == targets_T).all())

    def write(
        self, contexts: Sequence[Sequence[int]], until: Sequence[str], tokens: int, **how: Any
    ) -> list[str]:
        """Continuations of at most `tokens` tokens, cut before the first of the strings `until`.

        `how`: `temperature`, `top_k`, `seed` of `generate`. Raises ValueError where `tokens` leaves no
        room for a context.
        """
        room = self.max_length - tokens
        if room < 1:
            raise ValueError(
                f"{tokens} new tokens leave no context within max_length {self.max_length}"
            )
        cut = [context[-room:] for context in contexts]
        found = []
        for new in continuations(self.model, self.words, cut, tokens, **how):
            text = self.words.decode(new)
            ends = [text.find(string) for string in until if string and string in text]
            found.append(text[: min(ends)] if ends else text)
        return found
