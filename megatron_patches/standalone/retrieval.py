"""Retrieval beside perplexity: a trained model asked passkeys and copies by length and depth.

B: texts of a batch, L: tokens of a window, A: tokens of an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data_prep.errors import DataError
from data_prep.tokenizer import Tokenizer
from data_prep.tokenizing import load_tokenizer
from megatron_patches.analysis.retrieval_rows import (
    SCORES,
    RetrievalRow,
    append_retrieval,
    read_retrieval,
    retrieval_key,
    scores,
)
from megatron_patches.config import Config, ConfigError
from megatron_patches.standalone import evaluate, provenance
from megatron_patches.standalone.data import sources, token_stream
from megatron_patches.standalone.evaluate import Evaluation
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.retrieval_tasks import TASKS, Task, make_tasks
from megatron_patches.standalone.scoring import TOKENS_PER_PASS


@dataclass(frozen=True)
class Request:
    """What to ask: every task at every length (tokens) and depth (0 to 1), ``samples`` questions.

    ``window`` is a `sliding_window_width`, or ``blockwise:b``, used instead of the trained one;
    ``position_options`` are options of the position method in the same sense.
    """

    lengths: tuple[int, ...]
    tasks: tuple[str, ...] = TASKS
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 8
    split: str = "valid"
    window: int | str | None = None
    position_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answers:
    """By question: mean loss of the answer in nats, and how many of its tokens were the likeliest."""

    losses: list[float]
    correct: list[int]


@torch.no_grad()
def answer_scores(
    model: GPT, text_BL: Tensor, answer: int, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Losses in nats (float32 `[B, A]`) and likeliest ids (int64 `[B, A]`) of the last tokens.

    Args:
        text_BL: int64 ids; the model reads all but the last.
        answer: A, the number of tokens at the end to score. Logits exist for these alone.
        vocabulary: ids from here on are padding of the embedding, which `generate` never writes.
    """
    hidden_BAC = model.hidden(text_BL[:, :-1], last=answer)
    logits_BAV = model.logits(hidden_BAC).float()
    losses = F.cross_entropy(logits_BAV.transpose(1, 2), text_BL[:, -answer:], reduction="none")
    return losses, logits_BAV[..., :vocabulary].argmax(-1)


def ask(model: GPT, texts: np.ndarray, answer: int, vocabulary: int) -> Answers:
    """`answer_scores` of int64 `texts` [questions, L + 1], batched; float64 means.

    Raises FloatingPointError when a loss is not finite.
    """
    size = max(1, TOKENS_PER_PASS // (texts.shape[1] - 1))
    device = next(model.parameters()).device
    losses, correct = [], []
    for start in range(0, len(texts), size):
        text_BL = torch.from_numpy(texts[start : start + size]).to(device)
        loss_BA, best_BA = answer_scores(model, text_BL, answer, vocabulary)
        losses += loss_BA.double().mean(1).tolist()
        correct += (best_BA == text_BL[:, -answer:]).sum(1).tolist()
    if not np.isfinite(losses).all():
        raise FloatingPointError("the loss of an answer is not finite")
    return Answers(losses, correct)


class Retrieval:
    """A trained model and the questions that it is asked; `run` gives one row a cell."""

    def __init__(
        self,
        path: str | Path,
        request: Request,
        *,
        config: Config | None = None,
        attention: str = "auto",
        device: str | torch.device = "cpu",
    ) -> None:
        """Loads and checks everything; raises CheckpointError, ConfigError or DataError."""
        self.request = request
        evaluation = Evaluation(
            path,
            evaluate.Request(
                request.lengths,
                split=request.split,
                window=request.window,
                position_options=request.position_options,
            ),
            config=config,
            attention=attention,
            device=device,
        )
        self.model = evaluation.model
        tokenizer = tokenizer_of(evaluation.config)
        written = provenance.tokenizer_fingerprint(evaluation.datasets)
        if written not in ("unknown", tokenizer.fingerprint):
            raise DataError(
                f"{evaluation.config.vocab_file} is tokenizer {tokenizer.fingerprint}, the text was "
                f"prepared with {written}"
            )
        self.vocabulary = tokenizer.vocab_size
        if self.vocabulary > self.model.shape.vocabulary:
            raise DataError(
                f"{evaluation.config.vocab_file} has {self.vocabulary} entries, the model "
                f"{self.model.shape.vocabulary}: another tokenizer"
            )
        tokens, _ = token_stream(evaluation.config, request.split)
        self.tasks = make_tasks(request.tasks, tokens, tokenizer, request.samples)
        self.common = _common_fields(evaluation, tokenizer)

    def cells(self) -> list[tuple[Task, int, float]]:
        """Task, length and depth of every row, short windows first."""
        return [
            (task, length, depth)
            for length in dict.fromkeys(self.request.lengths)
            for task in self.tasks
            for depth in dict.fromkeys(self.request.depths)
        ]

    def cell_fields(self, task: Task, length: int, depth: float) -> dict[str, Any]:
        """All of a row that is known before the model runs."""
        return {
            **self.common,
            "task": task.name,
            "source": task.source,
            "eval_length": length,
            "depth": float(depth),
            "samples": self.request.samples,
            "answer_tokens": task.answer_tokens,
            "questions": task.fingerprint,
        }

    def row(self, task: Task, length: int, depth: float) -> RetrievalRow:
        """One cell; a refusal or failure is a row, too, so that nothing goes missing in silence."""
        cell = self.cell_fields(task, length, depth)
        begun = time.perf_counter()
        try:
            self.model.position_method.can_read(length)
            task.filler_tokens(length)
        except ValueError as error:
            return _without_scores(cell, "refused", error, 0.0)
        try:
            # Text and control go through the same shapes one after the other: where the needle
            # cannot be seen, every operation is the same and so is every bit of the losses.
            text, control = (
                ask(
                    self.model,
                    task.texts(length, depth, control=other),
                    task.answer_tokens,
                    self.vocabulary,
                )
                for other in (False, True)
            )
        except (DataError, ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
            return _without_scores(cell, "failed", error, time.perf_counter() - begun)
        samples: dict[str, Any] = {
            "losses": [float(f"{value:.9g}") for value in text.losses],
            "control_losses": [float(f"{value:.9g}") for value in control.losses],
            "correct": text.correct,
            "control_correct": control.correct,
        }
        samples |= scores(**samples, answer_tokens=task.answer_tokens)
        return RetrievalRow(
            **cell,
            **samples,
            distance=task.distance(length, depth),
            seconds=time.perf_counter() - begun,
        )

    def finished(self, output: str | Path) -> set[tuple[Any, ...]]:
        """Keys of the cells that are in `output` already: a refusal answers, too, a failure does not."""
        if not Path(output).exists():
            return set()
        return {retrieval_key(row) for row in read_retrieval(output) if row.status != "failed"}

    def run(
        self, output: str | Path | None, say: Callable[[str], None], *, resume: bool = False
    ) -> list[RetrievalRow]:
        """Rows of all cells, each appended to `output` as soon as it is known.

        `resume` leaves out the cells that `output` already has an answer to.
        """
        done = self.finished(output) if resume and output is not None else set()
        rows = []
        for task, length, depth in self.cells():
            if retrieval_key(self.cell_fields(task, length, depth)) in done:
                continue
            row = self.row(task, length, depth)
            if output is not None:
                append_retrieval(output, [row])
            rows.append(row)
            say(described(row))
        return rows


def described(row: RetrievalRow) -> str:
    """A row in one line."""
    name = f"{row.method}, {row.task} ({row.source}) at {row.eval_length}, depth {row.depth:g}"
    if row.status != "ok":
        return f"{name}: {row.status}: {row.message}"
    return (
        f"{name}: gain {row.gain:.4f} nats a token, token accuracy {row.token_accuracy:.3f}, "
        f"exact {row.exact:.3f}  ({row.samples} samples, {row.seconds:.1f} s)"
    )


def _without_scores(
    cell: dict[str, Any], status: str, error: Exception, seconds: float
) -> RetrievalRow:
    nothing: dict[str, Any] = dict.fromkeys(("distance", *SCORES))
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    return RetrievalRow(**cell, **nothing, seconds=seconds, status=status, message=message)


def _common_fields(evaluation: Evaluation, tokenizer: Tokenizer) -> dict[str, Any]:
    """What an evaluation says of model and training; the text here is a whole split."""
    taken = (
        *("method", "dataset", "seed", "train_length", "split", "config_sha", "git_sha", "engine"),
        *("attention", "dtype", "step", "parameters", "options", "trained_on"),
    )
    config, split = evaluation.config, evaluation.request.split
    whole = all(documents is None for _, documents in sources(config, split))
    cut = "" if whole else f"{config.split}|{split}"
    return {
        **{name: evaluation.common[name] for name in taken},
        "tokenizer": tokenizer.fingerprint,
        "data": provenance.data_fingerprint(evaluation.datasets, cut),
    }


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer that a configuration names. Raises ConfigError where it names none."""
    if config.vocab_file is None:
        raise ConfigError("`vocab_file` names no tokenizer, which needle and question need")
    gpt2 = config.tokenizer_type == "GPT2BPETokenizer"
    return load_tokenizer(Path(config.vocab_file).parent if gpt2 else config.vocab_file)
