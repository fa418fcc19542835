"""Perplexity at many lengths: one process, one model, a row a length."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from data_prep.errors import DataError
from megatron_patches.analysis.aggregate import EPS
from megatron_patches.analysis.rows import Row, append_rows, cell_key, read_rows
from megatron_patches.config import Config, ConfigError
from megatron_patches.standalone import checkpoint, provenance
from megatron_patches.standalone.describe import attention_bytes
from megatron_patches.standalone.scoring import TOKENS_PER_PASS, score
from megatron_patches.standalone.text_bytes import bits_per_byte, byte_counts, scored_bytes
from megatron_patches.standalone.texts import Request, open_text

__all__ = ["Evaluation", "Request", "trained_options"]


def trained_options(config: Config) -> dict[str, Any]:
    """What makes a trained model more than its method's name: it tells variants apart in tables."""
    keys = (
        *("position_options", "position_init", "position_precision", "position_sharing"),
        *("position_weight_decay", "sliding_window_width", "variant"),
    )
    defaults = type(config).model_fields
    return {
        key: value
        for key in keys
        if (value := getattr(config, key)) != defaults[key].get_default(call_default_factory=True)
    }


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
        # Found once: a run that still trains may name a newer step while this one is read.
        folder = checkpoint.step_folder(path)
        self.step = checkpoint.step_number(folder)
        self.model = checkpoint.load_model(
            folder,
            config=self.config,
            attention=attention,
            attention_eps=attention_eps,
            device=device,
            window=request.window,
            position_options=request.position_options,
        )
        try:
            self.text = open_text(self.config, request, self.step, self.model.shape.vocabulary)
        except DataError:
            raise
        except ValueError as error:  # a question that cannot be asked, whatever the text
            raise ConfigError(str(error)) from error
        self.datasets = self.text.datasets
        self.run_record = provenance.read_run(path)
        self._check_tokenizer()
        self.byte_counts = byte_counts(self.datasets)
        self.common = self._common_fields()

    def _check_tokenizer(self) -> None:
        trained = self.run_record.get("tokenizer", "unknown")
        here = provenance.tokenizer_fingerprint(self.datasets)
        if "unknown" not in (trained, here) and trained != here:
            raise DataError(
                f"{self.datasets[0].prefix} was prepared with tokenizer {here}, the model was "
                f"trained with {trained}"
            )

    def _common_fields(self) -> dict[str, Any]:
        config, request = self.config, self.request
        return {
            "method": config.pos_emb,
            "dataset": config.dataset_name,
            "seed": config.seed,
            "train_length": config.seq_length,
            "protocol": request.protocol,
            "split": request.split,
            "last_k": request.last_k,
            "tokenizer": provenance.tokenizer_fingerprint(self.datasets),
            "data": provenance.data_fingerprint(self.datasets, self.text.cut),
            # of the training: the text of an evaluation has a fingerprint of its own
            "config_sha": provenance.trained_sha(self.path, config),
            "git_sha": provenance.git_sha(),
            "engine": self.run_record.get("engine", "unknown"),
            "trained_on": self.run_record.get("data"),
            "attention": self.model.attention_name(),
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
            "step": self.step,
            "parameters": self.model.parameter_count(),
            "options": self._variant(),
            "documents_isolated": False,
        }

    def _variant(self) -> dict[str, Any]:
        found = trained_options(self.config)
        if self.model.shape.attention_eps:
            found[EPS] = self.model.shape.attention_eps
        if self.request.window is not None:
            found["sliding_window_width"] = self.request.window
        if self.request.position_options:
            found["eval_position_options"] = dict(self.request.position_options)
        return found

    def _cell(self, length: int) -> dict[str, Any]:
        return {**self.common, "eval_length": length, "stride": self.text.stride_at(length)}

    def row(self, length: int, advance: Callable[[int], None] = lambda tokens: None) -> Row:
        """One cell; a refusal or failure is a row, too, so that nothing goes missing in silence."""
        cell = self._cell(length)
        nothing: dict[str, Any] = {
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
            reading = self.text.at(length)
            result = score(
                self.model,
                reading.tokens,
                reading.windows,
                batch_size=self.request.batch_size,
                by_position=self.request.protocol == "position",
                advance=advance,
            )
            perplexity = math.exp(result.loss)
        except (ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
            seconds = time.perf_counter() - begun
            message = str(error).splitlines()[0] if str(error) else type(error).__name__
            return Row(**cell, **nothing, seconds=seconds, status="failed", message=message)
        counts = self.byte_counts
        size = None if counts is None else scored_bytes(reading.tokens, reading.windows, counts)
        return Row(
            **cell,
            loss=result.loss,
            perplexity=perplexity,
            bits_per_byte=bits_per_byte(result.loss, result.tokens, size),
            tokens=result.tokens,
            windows=len(reading.windows),
            seconds=result.seconds,
            message=reading.note,
            window_losses=[float(f"{value:.9g}") for value in result.windows],
            position_losses=result.positions,
        )

    def expected_memory(self) -> str:
        """A line on the attention's peak at the longest length, before anything is computed."""
        length = max(self.request.lengths)
        batch = self.request.batch_size or max(1, TOKENS_PER_PASS // length)
        impl, shape = self.model.attention_name(), self.model.shape
        weight = next(self.model.parameters())
        peak = attention_bytes(
            shape,
            impl,
            batch,
            length,
            itemsize=weight.element_size(),
            whole_rows=self.model.position_method.whole_rows,
            device=weight.device.type,
        )
        return f"attention: {impl}, about {peak / 1e6:.0f} MB a layer at {length} tokens"

    def finished(self, output: str | Path) -> set[int]:
        """Lengths whose cell is in `output` already: a refusal answers, too, a failure does not."""
        if not Path(output).exists():
            return set()
        done = {cell_key(row) for row in read_rows(output) if row.status != "failed"}
        return {n for n in self.request.lengths if cell_key(self._cell(n)) in done}

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
                    + (f"  note: {row.message}" if row.message else "")
                )
            else:
                say(f"{name}: {row.status}: {row.message}")
        return rows
