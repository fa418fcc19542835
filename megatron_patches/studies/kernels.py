"""Which methods have a kernel of the distance alone, asked of the methods without loading torch here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable

from megatron_patches.studies.schema import ROOT

# In a process of its own, because a sweep lives beside its runs for days and torch takes memory.
QUESTION = """
import json, sys
from megatron_patches.positions import PositionMethod, method_class, resolve

def has_kernel(name):
    method = method_class(resolve(name))
    own = any(getattr(method, part) is not getattr(PositionMethod, part) for part in ("bias", "weight"))
    return method.tier == "table" and own

print(json.dumps({name: has_kernel(name) for name in sys.argv[1:]}))
"""
_known: dict[str, bool] = {}


def with_kernels(methods: Iterable[str]) -> set[str]:
    """Those of `methods` (values of `pos_emb`) whose models have kernels to write."""
    methods = set(methods)
    new = sorted(methods - _known.keys())
    if new:
        command = [sys.executable, "-c", QUESTION, *new]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the methods {', '.join(new)} cannot be asked: {done.stderr}")
        _known.update(json.loads(done.stdout))
    return {method for method in methods if _known[method]}
