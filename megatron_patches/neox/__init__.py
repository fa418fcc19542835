"""GPT-NeoX with this suite's position methods, patched from outside at run time.

    NEOX_HOME=~/gpt-neox python deepy.py --engine neox train.py CONFIG.yml ...

or, with GPT-NeoX's own grammar and configuration files, `python -m megatron_patches.neox train.py ...`.
`install()` patches the current process. Only this package knows GPT-NeoX; none of its files is changed.
"""

from megatron_patches.neox.checkout import KNOWN_COMMITS, Checkout, find
from megatron_patches.neox.install import Installed, install, uninstall
from megatron_patches.neox.seams import SEAMS, MovedSeam, check

__all__ = [
    "KNOWN_COMMITS",
    "SEAMS",
    "Checkout",
    "Installed",
    "MovedSeam",
    "check",
    "find",
    "install",
    "uninstall",
]
