"""Continue a text with a trained model, with a key/value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_patches.standalone.model import GPT, Cache


@torch.no_grad()
def generate(
    model: GPT,
    prompt_BL: Tensor,
    tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
    vocabulary: int | None = None,
) -> Tensor:
    """Append up to `tokens` ids to `prompt_BL`; int64 `[B, L + n]`.

    Args:
        prompt_BL: int64, all of one length, at least one token.
        temperature: 0 takes the likeliest token; otherwise sampling from logits / temperature.
        top_k: sample among the k likeliest.
        seed: of the sampling, which uses a generator of its own.
        stop: end early once every row has produced this id.
        vocabulary: ids from here on are padding of the embedding and are never produced.

    Raises:
        ValueError: empty prompt, or a total length that the position method cannot read.
    """
    if prompt_BL.shape[1] == 0:
        raise ValueError("the prompt has no tokens")
    model.position_method.can_read(prompt_BL.shape[1] + tokens)
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    cache = Cache.empty(model.shape.layers)
    text, new = prompt_BL.to(device), prompt_BL.to(device)
    done = torch.zeros(len(text), dtype=torch.bool, device=device)
    for _ in range(tokens):
        logits = model.logits(model.hidden(new, cache)[:, -1:]).float()[:, 0]
        if vocabulary is not None:
            logits[:, vocabulary:] = float("-inf")
        new = _choose(logits, temperature, top_k, generator)
        text = torch.cat([text, new], dim=1)
        if stop is not None:
            done |= new[:, 0] == stop
            if bool(done.all()):
                break
    return text


def _choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> Tensor:
    if temperature == 0.0:
        return logits_BV.argmax(-1, keepdim=True)
    if top_k is not None:
        least = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, float("-inf"))
    return torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator)
