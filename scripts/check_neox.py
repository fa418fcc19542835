"""Compare a GPT-NeoX checkout with what the patches need, and print what moved."""

import argparse
import sys
from pathlib import Path

# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_patches.neox import SEAMS, find  # noqa: E402
from megatron_patches.neox.fields import differences, fields  # noqa: E402
from megatron_patches.neox.seams import compare  # noqa: E402
from megatron_patches.standalone.arguments import FAILED, guarded, parser  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    made = parser(
        f"{__doc__} Exit code 0: everything fits, 1: something moved, 2: there is no checkout.",
        "python scripts/check_neox.py --home ~/gpt-neox",
    )
    made.add_argument("--home", metavar="DIR", help="the checkout (default: what NEOX_HOME names)")
    made.add_argument("--all", action="store_true", help="print the places that fit as well")
    return made


def report(arguments: argparse.Namespace) -> int:
    checkout = find(arguments.home)
    known = "known to fit" if checkout.known else "not tried with these patches"
    print(f"{checkout.home}: commit {checkout.commit} ({known})")
    moved = 0
    for seam, reason in compare(checkout.home):
        moved += reason is not None
        if reason or arguments.all:
            state = f"moved: {reason}" if reason else "ok"
            print(f"  {seam.place} ({seam.why}): {state}")
    lines = differences(checkout.home)
    for line in lines:
        print(f"  {line}")
    if moved or lines:
        print(f"{moved} of {len(SEAMS)} places moved, {len(lines)} configuration keys differ")
        return FAILED
    print(f"fits: {len(SEAMS)} places, {len(fields(checkout.home))} configuration keys")
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    return guarded(lambda: report(options), options.debug)


if __name__ == "__main__":
    sys.exit(main())
