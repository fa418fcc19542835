"""The mask of queries x keys is made small only where no layer of the process reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from neox_tools import INSERTED, make_args, random

ATTEND = [[["attend"], "all"]]
MIXED = [[["attend", "global"], 1]]
GLOBAL = [[["global"], "all"]]
LENGTH = 12

pytestmark = pytest.mark.usefixtures("neox")


def model(kinds: Any) -> Any:
    from megatron.model.gpt2_model import GPT2ModelPipe

    return GPT2ModelPipe(make_args(pos_emb=INSERTED[0], attention_config=kinds))


def mask() -> torch.Tensor:
    from megatron.text_generation_utils import get_attn_mask  # a module that imported it by name

    return get_attn_mask(LENGTH, torch.device("cpu"), None)


@pytest.mark.parametrize(
    ("models", "side"),
    [
        ([], LENGTH),
        ([ATTEND], 1),
        ([ATTEND, ATTEND], 1),
        ([MIXED], LENGTH),
        ([GLOBAL], LENGTH),
        ([GLOBAL, ATTEND], LENGTH),
        ([ATTEND, GLOBAL], LENGTH),
    ],
)
def test_its_size(models, side):
    for kinds in models:
        model(kinds)
    made = mask()
    assert made.shape == (1, 1, side, side) and made.dtype == torch.bool
    assert int(made.sum()) == side * (side - 1) // 2


def test_a_small_mask_never_reaches_a_layer_that_reads_it():
    attend = model(ATTEND)
    small, x = mask(), random(2, LENGTH, 32)
    attend((x, small))
    with pytest.raises(RuntimeError, match="a mask of a model whose layers all attend"):
        model(GLOBAL)((x, small))
    model(GLOBAL)((x, mask()))
