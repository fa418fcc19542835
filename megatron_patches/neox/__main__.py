"""`python -m megatron_patches.neox WORKER.py [GPT-NeoX's own arguments]`: its deepy.py, patched."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from megatron_patches.config import ConfigError
from megatron_patches.neox.fixes import FIXES
from megatron_patches.neox.launch import launch

FIX_LINES = "\n".join(f"  {name:22}{fix.what}" for name, fix in FIXES.items())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line on stderr, like every other error."""
        self.exit(2, f"error: {message} (--help explains)\n")


def _processes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    made = _Parser(
        prog="python -m megatron_patches.neox",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="GPT-NeoX's own launcher with this suite's position methods in it.",
        epilog="Example: NEOX_HOME=~/gpt-neox python -m megatron_patches.neox train.py -d configs "
        f"small.yml\n\nFaults that are corrected unless --without names them:\n{FIX_LINES}",
    )
    made.add_argument("--without", action="append", default=[], metavar="FIX", choices=[*FIXES])
    made.add_argument("--cpu", type=_processes, metavar="N", help="N processes on the CPU, no GPU")
    made.add_argument("--dry-run", action="store_true", help="check, start nothing")
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    made.add_argument("worker", metavar="WORKER.py", help="train.py, eval.py or generate.py")
    options, rest = made.parse_known_args(arguments)
    if options.cpu:
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(options.cpu))
    if options.worker == "deepy.py":  # the whole command line of NeoX may follow as it is
        options.worker, *rest = rest or [""]
    try:
        launch([options.worker, *rest], fixes_off=options.without, dry_run=options.dry_run)
    except ConfigError as error:
        if options.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
