"""What a study must know of its methods, asked of them without loading torch here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from megatron_patches.studies.schema import ROOT

# In a process of its own, because a sweep lives beside its runs for days and torch takes memory.
QUESTION = """
import json, sys
from megatron_patches.positions import PositionMethod, method_class, resolve

def has_kernel(name):
    method = method_class(resolve(name))
    own = any(getattr(method, part) is not getattr(PositionMethod, part) for part in ("bias", "weight"))
    return method.tier == "table" and own

def facts(name):
    return {"kernel": has_kernel(name), "options": method_class(resolve(name)).evaluation_options}

print(json.dumps({name: facts(name) for name in sys.argv[1:]}))
"""
_known: dict[str, dict[str, Any]] = {}


def with_kernels(methods: Iterable[str]) -> set[str]:
    """Those of `methods` (values of `pos_emb`) whose models have kernels of the distance to write."""
    return {method for method, facts in _facts(methods).items() if facts["kernel"]}


def evaluation_options(methods: Iterable[str]) -> dict[str, list[str]]:
    """Of each of `methods` the options that a trained model may be read with in other values."""
    return {method: facts["options"] for method, facts in _facts(methods).items()}


def _facts(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    asked = set(methods)
    new = sorted(asked - _known.keys())
    if new:
        command = [sys.executable, "-c", QUESTION, *new]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the methods {', '.join(new)} cannot be asked: {done.stderr}")
        _known.update(json.loads(done.stdout))
    return {method: _known[method] for method in asked}
