"""Log-likelihoods of texts in batches, under every position method, against one text at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_patches import positions
from megatron_patches.hf.likelihood import Scorer
from megatron_patches.standalone.model import GPT, ModelShape

WORDS: Any = SimpleNamespace(vocab_size=50, eod=None)
TRAINED, LONGEST = 12, 20  # tokens
SCALED = ["dynamic_linear", "dynamic_ntk", "dynamic_yarn"]
CASES = [(name, {}) for name in positions.names()]
CASES += [("rotary", {"scaling": kind}) for kind in SCALED]


def model(name: str, options: dict[str, Any]) -> GPT:
    given = {"layers": 2, "hidden_size": 24, "heads": 2, "vocabulary": 50, "init_method_std": 0.3}
    span = {"span": 64} if "span" in positions.options(name) else {}
    options = {**options, **span}
    table = positions.build(name, heads=2, head_dim=12, hidden_size=24, max_length=99, **options)
    # A table must hold the longest text; the others read on past what they were trained on.
    length = LONGEST if table.max_length == 99 else TRAINED
    shape = ModelShape(**given, seed=4, pos_emb=name, max_length=length, position_options=options)
    return GPT(shape).eval()


@torch.no_grad()
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("batch_size", [3, None])
def test_a_score_does_not_depend_on_the_batch(name, options, batch_size):
    made = model(name, options)
    generator = torch.Generator().manual_seed(1)
    texts = [
        torch.randint(0, 50, (n + 1,), generator=generator).tolist()
        for n in (8, LONGEST, 14, 8, 3, 14)
    ]
    found = Scorer(made, WORDS, LONGEST, batch_size).score([(t[:-3], t[-3:]) for t in texts])
    for (value, greedy), text in zip(found, texts, strict=True):
        rows = made(torch.tensor([text[:-1]]))[0, -3:].double()
        wanted = sum(float(row.log_softmax(-1)[i]) for row, i in zip(rows, text[-3:], strict=True))
        assert value == pytest.approx(wanted, abs=1e-4)
        assert greedy == (rows.argmax(-1).tolist() == text[-3:])


def test_texts_of_one_length_are_still_read_together(monkeypatch):
    made, seen = model("rotary", {"scaling": "dynamic_ntk"}), []
    hidden = GPT.hidden
    monkeypatch.setattr(
        GPT, "hidden", lambda m, ids: seen.append(tuple(ids.shape)) or hidden(m, ids)
    )
    pairs = [([1] * n, [2, 3]) for n in (5, 9, 5, 9, 5)]
    Scorer(made, WORDS, LONGEST, 4).score(pairs)
    assert seen == [(2, 10), (3, 6)]
    seen.clear()
    Scorer(model("kerple_log", {}), WORDS, LONGEST, 4).score(pairs)
    assert seen == [(4, 10), (1, 6)]
