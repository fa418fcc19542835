"""Installing the patches into GPT-NeoX, and taking them out again."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_patches.config import ConfigError
from megatron_patches.neox import checkout as checkouts
from megatron_patches.neox import seams
from megatron_patches.neox.checkout import KNOWN_COMMITS, Checkout
from megatron_patches.neox.patches import Patches

FIXES_OFF = "MEGATRON_PATCHES_FIXES_OFF"  # comma-separated; the launcher hands it to the workers


@dataclass
class Installed:
    checkout: Checkout
    launcher: bool
    fixes: frozenset[str]
    patches: Patches


_installed: Installed | None = None


def install(
    home: str | Path | None = None,
    *,
    launcher: bool = False,
    fixes_off: Iterable[str] | None = None,
) -> Installed:
    """Patch the GPT-NeoX checkout in this process; a second call returns the first one's result.

    Args:
        home: the checkout; None: what `NEOX_HOME` names.
        launcher: only what parsing the arguments needs; a worker gets everything.
        fixes_off: names of `fixes.FIXES` to leave out; None: what the launcher said.

    Raises ConfigError: no checkout, another one already imported, an unknown fix, a moved seam.
    """
    global _installed
    found = checkouts.find(home)
    off = frozenset(_off() if fixes_off is None else fixes_off)
    if _installed is not None:
        same = (_installed.checkout.home, _installed.launcher) == (found.home, launcher)
        if not same or _installed.fixes != _chosen(off):
            raise ConfigError(
                f"the patches are installed already, for {_installed.checkout.home}: call uninstall() first"
            )
        return _installed
    seams.check(found)
    if not found.known:
        known = ", ".join(commit[:8] for commit in KNOWN_COMMITS)
        print(
            f"{found.home}: commit {found.commit[:8]} was not tried with these patches ({known} was); "
            f"the names and signatures of {len(seams.SEAMS)} places were compared and fit",
            file=sys.stderr,
        )
    patches = Patches()
    try:
        _apply(found, patches, launcher, _chosen(off))
    except BaseException:
        patches.undo()
        raise
    _installed = Installed(found, launcher, _chosen(off), patches)
    return _installed


def uninstall() -> None:
    """Everything as before `install`; nothing happens without one."""
    global _installed
    if _installed is not None:
        _installed.patches.undo()
        _installed = None


def _off() -> list[str]:
    return [name for name in os.environ.get(FIXES_OFF, "").split(",") if name]


def _chosen(off: frozenset[str]) -> frozenset[str]:
    from megatron_patches.neox.fixes import FIXES

    unknown = sorted(off - set(FIXES))
    if unknown:
        raise ConfigError(f"no such fix: {', '.join(unknown)}; there are {', '.join(FIXES)}")
    return frozenset(FIXES) - off


def _apply(found: Checkout, patches: Patches, launcher: bool, fixes: frozenset[str]) -> None:
    from megatron_patches.neox import cpu
    from megatron_patches.neox.fixes import FIXES

    _make_importable(found, patches)
    if cpu.wanted():
        cpu.before(patches)
    for name in sorted(fixes):
        before = FIXES[name].before
        if before is not None:
            before(patches)
    from megatron_patches.neox import arguments

    arguments.apply(patches, frozenset(FIXES) - fixes)
    if launcher:
        return
    # All modules first: a patch then reaches every module that imported the name.
    for module in ("training", "text_generation_utils", "model.transformer", "utils"):
        importlib.import_module(f"megatron.{module}")
    from megatron_patches.neox import attention, checkpoints, data, engine_seams, model, training

    engine_seams.check()

    if cpu.wanted():
        cpu.after(patches)
    data.apply(patches)
    for name in sorted(fixes):
        apply = FIXES[name].apply
        if apply is not None:
            apply(patches)
    attention.apply(patches, fixes)
    model.apply(patches, fixes)
    training.apply(patches)
    checkpoints.apply(patches)


def _make_importable(found: Checkout, patches: Patches) -> None:
    loaded = sys.modules.get("megatron")
    if loaded is not None:
        places = [Path(place).resolve() for place in getattr(loaded, "__path__", [])]
        if found.home / "megatron" not in places:
            raise ConfigError(
                f"another package named megatron is imported already ({places}), not that of {found.home}"
            )
    if str(found.home) not in sys.path:
        sys.path.insert(0, str(found.home))
        patches.add(lambda: sys.path.remove(str(found.home)))
