"""All targets by name."""

from __future__ import annotations

import importlib

from fuzz_target import Target

MODULES = (
    *("fuzz_checkpoints", "fuzz_folders", "fuzz_texts", "fuzz_settings", "fuzz_results"),
    "fuzz_traces",
)


def targets() -> dict[str, Target]:
    found = [target for name in MODULES for target in importlib.import_module(name).TARGETS]
    return {target.name: target for target in found}
