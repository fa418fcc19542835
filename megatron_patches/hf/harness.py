"""Our checkpoints as a model of EleutherAI's lm-evaluation-harness (package `lm_eval`)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from megatron_patches.config import ConfigError
from megatron_patches.hf.carrying import model_tokenizer
from megatron_patches.hf.likelihood import Scorer
from megatron_patches.hf.reading import is_hugging_face, read_model, tokenizer_file
from megatron_patches.standalone.checkpoint import load_model, read_config

NAME = "megatron_patches"  # under which `lm_eval` knows the model once `register` was called
SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k"}
NEW_TOKENS = 256  # as the harness has it where a task says nothing


def scorer(
    checkpoint: str | Path,
    *,
    tokenizer: str | Path | None = None,
    max_length: int | None = None,
    batch_size: int | str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    attention: str = "auto",
) -> Scorer:
    """A checkpoint ready to score.

    Args:
        checkpoint: run folder, step folder, or a Hugging Face folder that `read_model` takes.
        tokenizer: file or folder; default: the configuration's, or the one in the folder.
        max_length: longest input in tokens; default: the training length. A position method that
            extrapolates may be given more.
        batch_size: inputs at a time; None or "auto": up to 4096 tokens.
        dtype: float32, bfloat16 or float16; None: as stored.

    Raises ConfigError, CheckpointError or DataError, as `load_model`; ValueError for a length that
    the method cannot read.
    """
    kind = getattr(torch, dtype) if dtype in ("float32", "bfloat16", "float16") else None
    if dtype is not None and kind is None:
        raise ConfigError(f"dtype {dtype}: choose float32, bfloat16 or float16")
    if is_hugging_face(Path(checkpoint)):
        model, config = read_model(checkpoint)
        model = model.to(device=device, dtype=kind)
        tokenizer = tokenizer or tokenizer_file(Path(checkpoint))
    else:
        config = read_config(checkpoint, None)
        model = load_model(
            checkpoint, config=config, device=device, dtype=kind, attention=attention
        )
    words = model_tokenizer(checkpoint, config, tokenizer, model)
    size = None if batch_size in (None, "auto") else int(batch_size)
    return Scorer(model, words, int(max_length or config.seq_length), size)


def writing(asked: dict[str, Any]) -> dict[str, Any]:
    """A task's generation settings as `Scorer.write` takes them; None stands for one not given.

    0 is a setting: a temperature of 0 takes the likeliest token, a `top_k` of 0 is off, as in
    transformers, and `max_gen_toks` of 0 writes nothing. ConfigError for a setting that is not known here.
    """
    given = {key: value for key, value in asked.items() if value is not None}
    unknown = sorted(set(given) - SETTINGS)
    if unknown:
        raise ConfigError(f"generation with {', '.join(unknown)} is not supported")
    until = given.get("until", [])
    how: dict[str, Any] = {
        "until": [until] if isinstance(until, str) else until,
        "tokens": int(given.get("max_gen_toks", NEW_TOKENS)),
    }
    if given.get("do_sample"):
        how["temperature"] = float(given.get("temperature", 1.0))
        how["top_k"] = given.get("top_k") or None
    return how


@lru_cache(maxsize=1)
def register() -> type:
    """Let `lm_eval` know the model `megatron_patches`; returns its class. ConfigError without lm_eval.

    Then `lm_eval.simple_evaluate(model="megatron_patches", model_args={"checkpoint": FOLDER}, ...)`; the
    arguments are those of `scorer`.
    """
    try:
        import lm_eval.models  # noqa: F401 - the harness registers its own only while its table is empty
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
    except ImportError as error:
        raise ConfigError(f"this needs lm_eval: pip install '.[hf]' ({error})") from error

    @register_model(NAME)
    class Harness(TemplateLM):
        """Requests of the harness, answered by a `Scorer`."""

        def __init__(self, checkpoint: str, max_batch_size: Any = None, **settings: Any) -> None:
            super().__init__()
            self.scorer = scorer(checkpoint, **settings)

        @property
        def eot_token_id(self) -> int:
            eod = self.scorer.words.eod
            if eod is None:
                raise ConfigError(
                    "the tokenizer has no end of text, which stands for an empty context"
                )
            return eod

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            return self.scorer.words.encode(string)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return self.scorer.score([(context, text) for _, context, text in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            return [self._rolling(request.args[0]) for request in requests]

        def _rolling(self, text: str) -> float:
            from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.scorer.max_length,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            return sum(value for value, _ in self.scorer.score(pairs))

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [self._write(*request.args) for request in requests]

        def _write(self, context: str, asked: dict[str, Any]) -> str:
            start = self.tok_encode(context) or [self.prefix_token_id]
            (text,) = self.scorer.write([start], **writing(asked))
            return text

    return Harness
