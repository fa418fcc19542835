"""DeepSpeed's side: what the patches rely on is compared before anything is replaced."""

from __future__ import annotations

import importlib

import pytest
from neox_tools import STUB

from megatron_patches.neox import MovedSeam, engine_seams, install


def test_this_deepspeed_fits():
    engine_seams.check()


@pytest.mark.parametrize("place", engine_seams.PLACES, ids=lambda place: place[1])
def test_a_place_that_is_gone(clean, monkeypatch, place):
    module, name, _ = place
    *owners, last = name.split(".")
    owner = importlib.import_module(f"deepspeed.{module}")
    for part in owners:
        owner = getattr(owner, part)
    monkeypatch.delattr(owner, last)
    if owners and hasattr(owner, last):  # the base class has one of its own
        monkeypatch.setattr(owner, last, None)
    with pytest.raises(MovedSeam, match=rf"DeepSpeed .* does not fit.*{name} is gone"):
        engine_seams.check()


@pytest.mark.parametrize(
    "place", [p for p in engine_seams.PLACES if p[2]], ids=lambda place: place[1]
)
def test_a_place_that_does_something_else(clean, monkeypatch, place):
    module, name, piece = place
    owner = importlib.import_module(f"deepspeed.{module}")
    *owners, last = name.split(".")
    for part in owners:
        owner = getattr(owner, part)
    monkeypatch.setattr(owner, last, lambda self: None)
    with pytest.raises(MovedSeam) as caught:
        install(home=STUB)
    assert f"{name} no longer contains `{piece}`" in str(caught.value)
