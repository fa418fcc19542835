"""`scripts/neox_smoke.py`: how far the two engines may lie apart, and that the output says so."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from neox_tools import ROOT


@pytest.fixture(scope="module")
def smoke():
    spec = importlib.util.spec_from_file_location("smoke", ROOT / "scripts" / "neox_smoke.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("method", "difference", "right"),
    [
        ("alibi", 9e-6, True),
        ("alibi", 3e-5, False),
        ("cope", 3e-5, True),
        ("cope", 2e-4, False),
        ("cope", float("nan"), False),
        ("cope", None, False),
    ],
)
def test_how_far_apart_is_right(smoke, method, difference, right):
    assert smoke.Outcome(method, "attend", 4.3, 4.5, difference, 1.0).right is right


def test_a_failed_run_is_never_right(smoke):
    assert not smoke.Outcome("cope", "attend", None, None, 0.0, 1.0, error="failed: why").right


def test_what_is_allowed_is_printed_with_its_reason(smoke):
    assert smoke.allowances(["alibi", "rotary"]) == "allowed: 1e-05"
    told = smoke.allowances(["alibi", "cope"]).splitlines()
    assert told[0] == "allowed: 1e-05" and told[1].startswith("cope: 1e-04, because gradients")
