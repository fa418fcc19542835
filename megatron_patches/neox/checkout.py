"""The user's GPT-NeoX checkout: where it is, whether it is one, which commit it stands at."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from megatron_patches.config import ConfigError

# Commits at which every seam was run, not only read.
KNOWN_COMMITS = ("ea7aefd8f8e183256992d9fede4d7c71a46d67a5",)
VARIABLE = "NEOX_HOME"
_PROOF = ("deepy.py", "train.py", "megatron/neox_arguments/neox_args.py", "megatron/training.py")


@dataclass(frozen=True)
class Checkout:
    home: Path
    commit: str  # 40 hex digits, or "unknown" where git cannot tell

    @property
    def known(self) -> bool:
        return self.commit in KNOWN_COMMITS


def find(home: str | Path | None = None) -> Checkout:
    """The checkout at `home`, or the one that `NEOX_HOME` names.

    Raises ConfigError that says what to set: nothing named, no such folder, not a checkout.
    """
    named = home or os.environ.get(VARIABLE)
    if not named:
        raise ConfigError(
            f"{VARIABLE} is not set: name a GPT-NeoX checkout, for example "
            f"{VARIABLE}=~/gpt-neox (git clone of EleutherAI/gpt-neox at {KNOWN_COMMITS[0][:8]})"
        )
    path = Path(named).expanduser().resolve()
    said = str(home) if home else f"{VARIABLE}={named}"
    if not path.is_dir():
        raise ConfigError(f"{said}: no such folder")
    missing = [name for name in _PROOF if not (path / name).is_file()]
    if missing:
        raise ConfigError(
            f"{said}: not a GPT-NeoX checkout, it has no {', '.join(missing)}; "
            "name the folder that holds deepy.py and megatron/"
        )
    return Checkout(path, commit_of(path))


def commit_of(home: Path) -> str:
    """40 hex digits of HEAD where `home` is the top of a git work tree, else "unknown"."""
    try:
        done = subprocess.run(
            ["git", "-C", str(home), "rev-parse", "--show-toplevel", "HEAD"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    lines = done.stdout.split("\n")
    # A copy without its own .git may lie inside another repository, whose commit says nothing.
    if done.returncode or len(lines) < 2 or Path(lines[0]).resolve() != home:
        return "unknown"
    return lines[1].strip()
