"""Train with random kills, signals, full disks and damaged files; must end like an unbroken run.

Trains a small model through deepy.py, breaks it, starts the same command again, and checks after each
fault what docs/reliability.md promises. The same call goes on with a soak that was stopped. The first broken
promise ends it with exit code 1. `--table DIR` prints a finished soak as Markdown.

Example: python scripts/soak.py --minutes 60 --output results/soak
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_patches.soak.campaign import Soak
from megatron_patches.soak.journal import read
from megatron_patches.soak.promises import Broken
from megatron_patches.soak.table import markdown
from megatron_patches.standalone.arguments import guarded, number, whole


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=number(0), default=60.0, help="of faults (60)")
    parser.add_argument(
        "--seed", type=whole(0, 2**32), default=1, help="of faults, text and model (1)"
    )
    parser.add_argument("--processes", type=whole(1), default=2, help="ranks on this machine (2)")
    parser.add_argument("--iterations", type=whole(20), help="steps; default: measured")
    parser.add_argument("--output", type=Path, metavar="DIR", help="events.jsonl goes there")
    parser.add_argument("--work", type=Path, metavar="DIR", help="runs (OUTPUT/work)")
    parser.add_argument("--table", type=Path, metavar="DIR", help="print a soak as Markdown")
    options = parser.parse_args(arguments)
    if (options.output is None) == (options.table is None):
        parser.error("name --output, or --table")
    return guarded(lambda: _run(options), False)


def _run(options: argparse.Namespace) -> int:
    if options.table is not None:
        sys.stdout.write(markdown(read(options.table / "events.jsonl")))
        return 0
    work = (options.work or options.output / "work").resolve()
    soak = Soak(
        options.output,
        work,
        minutes=options.minutes,
        seed=options.seed,
        processes=options.processes,
        iterations=options.iterations,
    )
    try:
        end = soak.run()
    except Broken as broken:
        print(f"error: broken promise: {broken}", file=sys.stderr)
        return 1
    print(f"{end['faults']} faults; the run ended like an unbroken one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
