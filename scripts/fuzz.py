"""Feed damaged and hostile files to every reader of the suite, in child processes with little memory.

A finding is anything but a sound reading or the project's own error: another exception, a crash, a hang,
too much memory, a file written or a program started, markup of a result in a page, and, where there
are checksums, wrong content. Each is made small and kept under tests/fuzz/seeds/.

Example: python scripts/fuzz.py --target run_yaml --seconds 60
         python scripts/fuzz.py --seconds 100 --seed 7 --output results/fuzz/own.jsonl
         python scripts/fuzz.py --table results/fuzz/own.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "fuzz")]
# Threads of libraries do not survive a fork, and memory pools of their own would count as taken.
os.environ |= {
    **{"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "RAYON_NUM_THREADS": "1"},
    **{"TOKENIZERS_PARALLELISM": "false", "ARROW_DEFAULT_MEMORY_POOL": "system"},
}

from fuzz_table import read, row, table  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--target", action="append", metavar="T", help="this one only; repeatable")
    made.add_argument("--list", action="store_true", help="print the targets")
    made.add_argument("--seconds", type=float, metavar="S", help="of random inputs a target")
    made.add_argument("--cases", type=int, metavar="N", help="random inputs a target")
    made.add_argument(
        "--shares", action="store_true", help="fewer --cases for slow readers, as in the tests"
    )
    made.add_argument("--seed", type=int, default=1, metavar="K", help="of the inputs (1)")
    made.add_argument("--output", type=Path, metavar="FILE", help="append a line a target (JSON)")
    made.add_argument(
        "--no-seeds", action="store_true", help="keep no findings under tests/fuzz/seeds/"
    )
    made.add_argument(
        "--engine",
        choices=("own", "atheris"),
        default="own",
        help="atheris: guided by coverage, for one file of each input; needs pip install atheris",
    )
    made.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="print what was tried")
    return made


def try_one(name: str, options: argparse.Namespace) -> bool:
    """Kept seeds, known attacks and random inputs of one target; True if nothing was found."""
    from fuzz_campaign import campaign, keep, replay, seeds
    from fuzz_registry import targets

    target = targets()[name]
    cases = options.cases
    if cases is not None and options.shares:
        cases = max(2, round(cases * target.share))
    before = {f"seed {key}": files for key, files in seeds(name).items()}
    known = {f"attack {key}": files for key, files in target.known().items()}
    bad = [
        f"{key}: {verdict.key or 'accepted'}\n{verdict.text}"
        for key, verdict in replay(target, {**before, **known}).items()
        if verdict.kind == "finding"
        or (verdict.kind == "accepted" and key.startswith("attack") and "harmless" not in key)
    ]
    tally = campaign(target, options.seed, cases, options.seconds)
    print(
        f"{name}: {len(before)} seeds, {len(known)} attacks, {tally.cases} random inputs: "
        f"{tally.accepted} accepted, {tally.refused} refused, {len(tally.findings)} findings, "
        f"{tally.seconds:.0f} s",
        flush=True,
    )
    for key, verdict in tally.findings.items():
        text = f"{key}\n{verdict.text}"
        if not options.no_seeds:
            text = f"{keep(target, key, tally.inputs[key]).relative_to(ROOT)}: {text}"
        bad.append(text)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        about = {"engine": "own", "seed": options.seed, "attacks": len(known), "seeds": len(before)}
        about["when"] = time.strftime("%Y-%m-%d", time.gmtime())
        with open(options.output, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row(target, tally, **about, bad=len(bad))) + "\n")
    for text in bad:
        print(f"FOUND {name} {text}", file=sys.stderr)
    return not bad


def main(arguments: list[str] | None = None) -> int:
    made = make_parser()
    options = made.parse_args(arguments)
    if options.table:
        print(table(read(options.table)), end="")
        return 0
    from fuzz_registry import targets

    known = targets()
    if options.list:
        print("\n".join(f"{name:14} {target.reads}" for name, target in known.items()))
        return 0
    names = options.target or list(known)
    if unknown := sorted(set(names) - set(known)):
        made.error(f"no target {unknown[0]!r}; there are {', '.join(known)}")
    if options.seconds is None and options.cases is None:
        made.error("give --seconds or --cases")
    if options.engine == "atheris":
        from fuzz_guided import guided

        return int(guided([known[name] for name in names], options))
    results = [try_one(name, options) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
