"""Retrieval tests: a toy text of bytes with its tokenizer, checkpoints of random models, an oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import standalone_tools as tools
import torch
import yaml
from torch import Tensor, nn

from data_prep.indexed import write_indexed
from data_prep.tokenizing import load_tokenizer
from megatron_patches.config import from_mapping
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.model import GPT

ENTRIES = 272  # of the embedding: 257 of the byte tokenizer, and padding
LETTERS = list(map(chr, range(33, 127)))


def write_text(folder: Path, *, tokens: int = 3000, fingerprint: str | None = None) -> None:
    """`train`, `valid` and `test` of random words as bytes, with the tokenizer's file."""
    tokenizer = load_tokenizer("byte")
    tokenizer.save(folder)
    random = np.random.RandomState(5)
    words = ["".join(random.choice(LETTERS, random.randint(2, 9))) for _ in range(tokens // 2)]
    text = " ".join(words)[: tokens - 1]
    ids = np.append(tokenizer.encode_array(text), tokenizer.eod)
    sidecar = {"tokenizer": {**tokenizer.describe()}, "text_bytes": tokens}
    if fingerprint is not None:
        sidecar["tokenizer"]["fingerprint"] = fingerprint
    for part in ("train", "valid", "test"):
        write_indexed(folder / part, [ids], vocab_size=tokenizer.vocab_size, sidecar=sidecar)


def checkpoint(text: Path, folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A run folder with random weights, written without any training."""
    base = {"padded_vocab_size": ENTRIES, "vocab_file": str(text / "tokenizer.json")}
    wanted = {"tokenizer_type": "HFTokenizer", **base, **changes}
    settings = tools.settings(text, folder, **wanted)
    torch.manual_seed(seed)
    model = GPT(shape_of(from_mapping(settings), ENTRIES))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Louder than at a start of training: the text must matter to the losses.
            parameter.data.mul_(4.0)
    step = folder / "global_step3"
    step.mkdir(parents=True)
    torch.save({"module": model.state_dict()}, step / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step3")
    (folder / "config.yml").write_text(yaml.safe_dump(settings))
    return folder


class Oracle(nn.Module):
    """Reads a text as an ideal copier: what followed the longest earlier match of the last tokens.

    It has what a `GPT` offers to the scoring. A text without a match of `least` tokens gets even
    odds.
    """

    def __init__(self, model: GPT, least: int = 4) -> None:
        super().__init__()
        self.shape, self.position_method, self.least = model.shape, model.position_method, least
        self.strength = nn.Parameter(torch.tensor(12.0))

    def hidden(self, tokens_BL: Tensor, *, last: int) -> Tensor:
        odds = torch.zeros(len(tokens_BL), last, self.shape.vocabulary)
        for row, text in enumerate(tokens_BL.tolist()):
            for at in range(last):
                followed = self._follower(text[: len(text) - last + at + 1])
                if followed is not None:
                    odds[row, at, followed] = self.strength
        return odds

    def _follower(self, read: list[int]) -> int | None:
        best, found = self.least - 1, None
        for end in range(len(read) - 1, 0, -1):
            size = 0
            while size < end and read[end - 1 - size] == read[-1 - size]:
                size += 1
            if size > best:
                best, found = size, read[end]
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden
