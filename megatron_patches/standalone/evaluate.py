"""Perplexity at many lengths: one process, one model, the same tokens for every length and method."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_prep.errors import DataError
from megatron_patches.analysis.rows import Row, append_rows, cell_key, read_rows
from megatron_patches.config import Config, ConfigError, config_sha
from megatron_patches.standalone import checkpoint, provenance
from megatron_patches.standalone.data import sources, token_stream
from megatron_patches.standalone.describe import attention_bytes
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.windows import Plan, Window, batches

logger = logging.getLogger(__name__)

TOKENS_PER_PASS = 4096  # windows are batched up to this many tokens unless told otherwise
POSITION_BINS = 64


@dataclass(frozen=True)
class Request:
    """What to evaluate. `lengths`, `stride`, `last_k` in tokens; `max_tokens` None = the whole split."""

    lengths: tuple[int, ...]
    protocol: str = "nonoverlap"
    split: str = "valid"
    stride: int | None = None
    last_k: int | None = None
    batch_size: int | None = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Score:
    """Losses in nats of one length: `windows` [windows] means, `positions` mean by position bin."""

    windows: list[float]
    counts: list[int]
    positions: list[float] | None
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def loss(self) -> float:
        return float(np.dot(self.windows, self.counts) / self.tokens)


def score(
    model: GPT,
    tokens: np.ndarray,
    windows: Sequence[Window],
    *,
    batch_size: int | None = None,
    by_position: bool = False,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Score:
    """Run `model` over `windows` of `tokens` (int `[T]`); float32 losses, summed in float64.

    Raises ValueError when the model cannot read windows this long, FloatingPointError when a loss
    is not finite.
    """
    length = windows[0].length
    model.position_method.can_read(length)
    size = batch_size or max(1, TOKENS_PER_PASS // length)
    device = next(model.parameters()).device
    means: list[float] = []
    sums_L = np.zeros(length) if by_position else None
    begun = time.perf_counter()
    for group in batches(windows, size):
        ids = np.stack([tokens[w.start : w.start + length + 1] for w in group]).astype(np.int64)
        text = torch.from_numpy(ids).to(device)
        losses = model.token_losses(text[:, :-1], text[:, 1:], first=group[0].score_from)
        values = losses.double().cpu().numpy()
        if not np.isfinite(values).all():
            raise FloatingPointError(
                f"the loss of the window at token {group[0].start} is not finite"
            )
        means += values.mean(axis=1).tolist()
        if sums_L is not None:
            sums_L += values.sum(axis=0)
        advance(len(group) * length)
    positions = None
    if sums_L is not None:
        bins = next(b for b in range(min(POSITION_BINS, length), 0, -1) if length % b == 0)
        positions = (sums_L / len(windows)).reshape(bins, -1).mean(axis=1).tolist()
    counts = [window.scored for window in windows]
    return Score(means, counts, positions, time.perf_counter() - begun)


class Evaluation:
    """A trained model and the text it is scored on; `run` gives one row a length."""

    def __init__(
        self,
        path: str | Path,
        request: Request,
        *,
        config: Config | None = None,
        attention: str = "auto",
        attention_eps: float = 0.0,
        device: str | torch.device = "cpu",
    ) -> None:
        """Loads and checks everything; raises CheckpointError, ConfigError or DataError."""
        self.path, self.request = Path(path), request
        self.config = checkpoint.read_config(path, config)
        self.model = checkpoint.load_model(
            path,
            config=self.config,
            attention=attention,
            attention_eps=attention_eps,
            device=device,
        )
        self.step = checkpoint.step_number(checkpoint.step_folder(path))
        self.tokens, self.datasets = token_stream(self.config, request.split)
        if request.max_tokens is not None:
            self.tokens = self.tokens[: request.max_tokens]
        try:
            self.plan = Plan(
                request.protocol, len(self.tokens), request.lengths, request.stride, request.last_k
            )
        except ValueError as error:  # a question that cannot be asked, whatever the text
            raise ConfigError(str(error)) from error
        largest = int(self.tokens.max())
        if largest >= self.model.shape.vocabulary:
            raise DataError(
                f"{self.datasets[0].prefix}: token {largest} is outside the model's vocabulary of "
                f"{self.model.shape.vocabulary}: the text was prepared with another tokenizer"
            )
        self._check_tokenizer()
        self.common = self._common_fields()

    def _check_tokenizer(self) -> None:
        trained = provenance.read_run(self.path).get("tokenizer", "unknown")
        here = provenance.tokenizer_fingerprint(self.datasets)
        if "unknown" not in (trained, here) and trained != here:
            raise DataError(
                f"{self.datasets[0].prefix} was prepared with tokenizer {here}, the model was "
                f"trained with {trained}"
            )

    def _common_fields(self) -> dict[str, Any]:
        config, request = self.config, self.request
        part = "" if all(d is None for _, d in sources(config, request.split)) else config.split
        cut = f"{part}|{request.split}" if part else ""
        if request.max_tokens is not None:
            cut += f"|first {request.max_tokens}"
        if request.protocol != "sliding":
            # Windows are aligned to the longest length, so it decides which targets are scored.
            cut += f"|aligned to {self.plan.longest}"
        return {
            "method": config.pos_emb,
            "dataset": config.dataset or "data",
            "seed": config.seed,
            "train_length": config.seq_length,
            "protocol": request.protocol,
            "split": request.split,
            "last_k": request.last_k,
            "tokenizer": provenance.tokenizer_fingerprint(self.datasets),
            "data": provenance.data_fingerprint(self.datasets, cut),
            # of the training: the text of an evaluation has a fingerprint of its own
            "config_sha": provenance.read_run(self.path).get("config_sha", config_sha(config)),
            "git_sha": provenance.git_sha(),
            "engine": provenance.read_run(self.path).get("engine", "unknown"),
            "attention": self.model.attention_name(),
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "step": self.step,
            "parameters": self.model.parameter_count(),
            "options": self._variant(),
            "documents_isolated": False,
        }

    def _variant(self) -> dict[str, Any]:
        """What makes this more than the method's name says: it tells variants apart in tables."""
        keys = (
            *("position_options", "position_init", "position_precision", "position_sharing"),
            *("position_weight_decay", "sliding_window_width"),
        )
        defaults = type(self.config).model_fields
        found = {
            key: value
            for key in keys
            if (value := getattr(self.config, key))
            != defaults[key].get_default(call_default_factory=True)
        }
        if self.model.shape.attention_eps:
            found["attention_eps"] = self.model.shape.attention_eps
        return found

    def row(self, length: int, advance: Callable[[int], None] = lambda tokens: None) -> Row:
        """One cell; a refusal or failure is a row, too, so that nothing goes missing in silence."""
        cell = {**self.common, "eval_length": length, "stride": self.plan.stride_at(length) or 1}
        nothing = {
            "loss": None,
            "perplexity": None,
            "bits_per_byte": None,
            "tokens": 0,
            "windows": 0,
        }
        begun = time.perf_counter()
        try:
            self.model.position_method.can_read(length)
        except ValueError as error:
            return Row(**cell, **nothing, seconds=0.0, status="refused", message=str(error))
        try:
            windows = self.plan.windows(length)
            result = score(
                self.model,
                self.tokens,
                windows,
                batch_size=self.request.batch_size,
                by_position=self.request.protocol == "position",
                advance=advance,
            )
            perplexity = math.exp(result.loss)
        except (ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
            seconds = time.perf_counter() - begun
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            return Row(**cell, **nothing, seconds=seconds, status="failed", message=message)
        ratio = provenance.tokens_per_byte(self.datasets)
        return Row(
            **cell,
            loss=result.loss,
            perplexity=perplexity,
            bits_per_byte=None if ratio is None else result.loss / math.log(2) * ratio,
            tokens=result.tokens,
            windows=len(windows),
            seconds=result.seconds,
            window_losses=[float(f"{value:.9g}") for value in result.windows],
            position_losses=result.positions,
        )

    def expected_memory(self) -> str:
        """A line on the attention's peak at the longest length, before anything is computed."""
        length = max(self.request.lengths)
        batch = self.request.batch_size or max(1, TOKENS_PER_PASS // length)
        impl, shape = self.model.attention_name(), self.model.shape
        itemsize = next(self.model.parameters()).element_size()
        megabytes = (
            attention_bytes(
                shape, self.model.position_method.tier, impl, batch, length, False, itemsize
            )
            / 1e6
        )
        return f"attention: {impl}, about {megabytes:.0f} MB a layer at {length} tokens"

    def finished(self, output: str | Path) -> set[int]:
        """Lengths whose cell is in `output` already with a result."""
        if not Path(output).exists():
            return set()
        done = {cell_key(row) for row in read_rows(output) if row.status == "ok"}
        cells = {
            length: {**self.common, "eval_length": length, "stride": self.plan.stride_at(length)}
            for length in self.request.lengths
        }
        return {length for length, cell in cells.items() if cell_key(cell) in done}

    def run(
        self,
        output: str | Path | None,
        say: Callable[[str], None],
        skip: Iterable[int] = (),
    ) -> list[Row]:
        """Rows of all lengths, each appended to `output` as soon as it is known."""
        rows = []
        for length in self.request.lengths:
            if length in set(skip):
                continue
            row = self.row(length)
            if output is not None:
                append_rows(output, [row])
            rows.append(row)
            name = f"{row.method} at {length}"
            if row.status == "ok":
                say(
                    f"{name}: perplexity {row.perplexity:.3f}  ({row.windows} windows, "
                    f"{row.tokens} tokens, {row.seconds:.1f} s)"
                )
            else:
                say(f"{name}: {row.status}: {row.message}")
        return rows
