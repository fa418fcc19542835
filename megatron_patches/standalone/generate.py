"""Continue texts with a trained model, with a key/value cache."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.tokenizer import Tokenizer
from megatron_patches.config import ConfigError
from megatron_patches.standalone.cache import Cache, planned
from megatron_patches.standalone.model import GPT


def left_padded(prompts: Sequence[Sequence[int]], filler: int = 0) -> tuple[Tensor, Tensor]:
    """Prompts of any lengths as one batch: ids int64 `[B, L]` and where they are padding, bool `[B, L]`.

    Raises ValueError where there is no prompt or an empty one.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("the prompt has no tokens")
    longest = max(len(prompt) for prompt in prompts)
    ids_BL = torch.full((len(prompts), longest), filler, dtype=torch.int64)
    padding_BL = torch.ones(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids_BL[row, longest - len(prompt) :] = torch.as_tensor(prompt)
        padding_BL[row, longest - len(prompt) :] = False
    return ids_BL, padding_BL


def batches_of(model: GPT, lengths: Sequence[int]) -> list[list[int]]:
    """Which texts, by their number, can be continued in one batch: all, or those of one length in tokens.

    Padding would move the tokens of methods whose places follow the length of the text, and those
    of a blockwise window.
    """
    apart = isinstance(model.shape.window, tuple)
    if not apart and not any(method.length_decides for method in model.own_methods()):
        return [list(range(len(lengths)))] if lengths else []
    groups: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        groups.setdefault(length, []).append(number)
    return list(groups.values())


def read_prompts(given: Sequence[str] | None, file: Path | None) -> list[str]:
    """Texts to continue: those given, then those of a JSON-lines file; standard input without either.

    Raises ConfigError for a line that is not `{"text": "..."}`, for an empty text and for one that is not
    Unicode.
    """
    found = list(given or [])
    if file is not None:
        found += _texts_of(file)
    elif given is None:
        found.append(sys.stdin.read())
    if not found or not all(found):
        raise ConfigError("a prompt is empty: --prompt TEXT, --prompts FILE.jsonl, standard input")
    for text in found:
        # A lone surrogate: bytes of the command line, or an escape in JSON, that stand for no character.
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigError(f"the prompt {ascii(text)[:80]} is not valid Unicode")
    return found


def _texts_of(file: Path) -> list[str]:
    try:
        # utf-8-sig: editors of Windows put a mark before the text. JSON may hold other ends of lines.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 ({error})") from error
    while lines and not lines[-1].strip():
        lines.pop()
    found = []
    for number, line in enumerate(lines, 1):
        try:
            text = json.loads(line)["text"]
            if not isinstance(text, str):
                raise TypeError(f"the text is {json.dumps(text)[:40]}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            where = f"{file}:{number}"
            raise ConfigError(f'{where}: expected {{"text": "..."}} ({error!r})') from error
        found.append(text)
    return found


@torch.no_grad()
def generate(
    model: GPT,
    prompt_BL: Tensor,
    tokens: int,
    *,
    padding_BL: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
    vocabulary: int | None = None,
) -> Tensor:
    """Append up to `tokens` ids to `prompt_BL`; int64 `[B, L + n]`.

    Args:
        prompt_BL: int64, all of one length, at least one token.
        padding_BL: bool, True at padding, which stands left of the prompts (`left_padded`). A row then
            gives what its prompt gives alone, up to rounding.
        temperature: 0 takes the likeliest token; otherwise sampling from logits / temperature.
        top_k: sample among the k likeliest; None, or more than there are: among all.
        seed: of the sampling, which uses a generator of its own.
        stop: a row that has produced this id repeats it; end early once all have.
        vocabulary: ids from here on are padding of the embedding and are never produced.

    Raises:
        ValueError: empty prompt, padding that does not stand left, padding under a blockwise window or with
            places that follow the length of the text, a total length that the position method cannot
            read, or a setting without a meaning (named).
    """
    _check_settings(tokens, temperature, top_k, vocabulary)
    if prompt_BL.shape[1] == 0:
        raise ValueError("the prompt has no tokens")
    if padding_BL is not None and (
        padding_BL.shape != prompt_BL.shape
        or bool(padding_BL[:, -1].any())
        or bool((padding_BL[:, 1:] & ~padding_BL[:, :-1]).any())
    ):
        raise ValueError(
            "padding_BL must have the shape of the prompts, with True at their left only"
        )
    if padding_BL is not None and isinstance(model.shape.window, tuple):
        raise ValueError(
            f"{model.shape.window[0]} windows count from the first key, padding included: continue texts of "
            "different lengths one by one"
        )
    model.position_method.can_read(prompt_BL.shape[1] + tokens)
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    cache = Cache.empty(model.shape.layers)
    text, new = prompt_BL.to(device), prompt_BL.to(device)
    padding = None if padding_BL is None else padding_BL.to(device)
    done = torch.zeros(len(text), dtype=torch.bool, device=device)
    total = prompt_BL.shape[1] + tokens
    for _ in range(tokens):
        with planned(model.own_methods(), total):
            logits = model.logits(model.hidden(new, cache, padding)[:, -1:]).float()[:, 0]
        if vocabulary is not None:
            logits[:, vocabulary:] = float("-inf")
        new = _choose(logits, temperature, top_k, generator)
        if stop is not None:
            new[done] = stop
        text = torch.cat([text, new], dim=1)
        if padding is not None:
            padding = torch.cat([padding, padding.new_zeros(len(text), 1)], dim=1)
        if stop is not None:
            done |= new[:, 0] == stop
            if bool(done.all()):
                break
    return text


def continuations(
    model: GPT, words: Tokenizer, prompts: Sequence[Sequence[int]], tokens: int, **how: Any
) -> list[list[int]]:
    """Up to `tokens` new ids for each prompt, until the text ends; in as few batches as `batches_of` allows.

    `how`: `temperature`, `top_k`, `seed` of `generate`. Raises as `generate`.
    """
    found: dict[int, list[int]] = {}
    for group in batches_of(model, [len(prompt) for prompt in prompts]):
        ids_BL, padding_BL = left_padded([prompts[i] for i in group])
        texts = generate(
            model,
            ids_BL,
            tokens,
            padding_BL=padding_BL if bool(padding_BL.any()) else None,
            stop=words.eod,
            vocabulary=words.vocab_size,
            **how,
        )
        for i, new in zip(group, texts[:, ids_BL.shape[1] :].tolist(), strict=True):
            # What follows the first end of text belongs to longer rows of the batch.
            found[i] = new[: new.index(words.eod)] if words.eod in new else new
    return [found[i] for i in range(len(prompts))]


def continued(
    model: GPT, words: Tokenizer, prompts: Sequence[str], tokens: int, **how: Any
) -> list[str]:
    """Each prompt with its continuation, as text; arguments as in `continuations`."""
    rows = [words.encode(prompt) for prompt in prompts]
    new = continuations(model, words, rows, tokens, **how)
    return [words.decode([*row, *more]) for row, more in zip(rows, new, strict=True)]


def _check_settings(
    tokens: int, temperature: float, top_k: int | None, vocabulary: int | None
) -> None:
    if tokens < 0:
        raise ValueError(f"tokens={tokens}: give how many to append, at least 0")
    if not 0 <= temperature < math.inf:  # NaN, too
        raise ValueError(
            f"temperature={temperature}: give a number of at least 0; 0 takes the likeliest token"
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: give at least 1, or None to sample among all tokens")
    if vocabulary is not None and vocabulary < 1:
        raise ValueError(
            f"vocabulary={vocabulary}: give the tokenizer's number of entries, or None"
        )


def _choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> Tensor:
    if temperature == 0.0:
        return logits_BV.argmax(-1, keepdim=True)
    if top_k is not None:
        least = logits_BV.topk(min(top_k, logits_BV.shape[-1]), dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, float("-inf"))
    # From the largest down, so that a small temperature gives -inf at most, which is a share of 0. Beyond
    # these limits float32, and the reciprocal in its place, end in 0 or inf, and 0 * inf is no number.
    below = logits_BV - logits_BV.amax(-1, keepdim=True)
    shares = (below / min(max(temperature, 1e-30), 1e30)).softmax(-1)
    return torch.multinomial(shares, 1, generator=generator)
