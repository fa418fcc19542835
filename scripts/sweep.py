"""Train and score every run of a study: methods x datasets x seeds x lengths x protocols.

Prints the plan and its cost first. Finished parts are skipped, interrupted ones continue, a failed
one is recorded in OUTPUT/failed.jsonl and the others go on. Result rows: OUTPUT/rows.jsonl (and
retrieval.jsonl), a line a training: OUTPUT/training.jsonl.

Exit code: 0 when every run is finished, 1 when some failed, 2 for a study that cannot be right.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(ROOT))

from megatron_patches import studies  # noqa: E402
from megatron_patches.standalone.arguments import FAILED, guarded, number, whole  # noqa: E402
from megatron_patches.studies.execute import gpus, on_gpus, slots  # noqa: E402
from megatron_patches.studies.schema import shown  # noqa: E402

EXAMPLES = """examples:
  python scripts/sweep.py configs/sweeps/cpu_mini.yml --dry-run --tokens-per-second 10000
  python scripts/sweep.py configs/sweeps/cpu_mini.yml --only 'alibi-local_code-*'
  python scripts/sweep.py configs/sweeps/cpu_mini.yml --output results/cpu_mini_again
  python scripts/sweep.py configs/sweeps/table3.yml --slurm table3.sh && sbatch table3.sh
  python scripts/tables.py results/table3/rows.jsonl --table table3 --dataset github
"""


def make_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("study", type=Path, metavar="STUDY.yml", help="as in configs/sweeps/")
    what = made.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="print plan and cost, start nothing")
    made.add_argument(
        "--list", action="store_true", help="print each run and what is left of it, start nothing"
    )
    what.add_argument(
        "--slurm", type=Path, metavar="FILE", help="write an array script of what is left, no more"
    )
    what.add_argument(
        "--record", action="store_true", help="append what training.jsonl lacks, train nothing"
    )
    made.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="results folder, instead of the study's: cells that have a row there are finished",
    )
    made.add_argument(
        "--parallel",
        type=whole(1),
        metavar="N",
        help="runs at a time; default: a run a GPU, or a one-thread run a core (if memory allows)",
    )
    made.add_argument(
        "--tokens-per-second",
        type=number(1),
        metavar="N",
        help="training speed of one run, for the estimate; default: as measured in finished runs",
    )
    made.add_argument(
        "--only", nargs="+", default=[], metavar="PATTERN", help="runs with such a name (* and ?)"
    )
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return made


def work(options: argparse.Namespace) -> int:
    study = studies.load_study(options.study)
    if options.output is not None:
        study = study.with_output(options.output)
    plan = studies.make_plan(study, options.only)
    if options.record:
        lines = studies.record(plan, lambda text: print(text, file=sys.stderr))
        print(f"{lines} lines appended to {shown(study.training_file)}")
        return 0
    cost = studies.estimate(plan, options.tokens_per_second)
    places = slots(plan, options.parallel, cost.gigabytes)
    if on_gpus(plan):
        device = f"GPUs, {len(gpus()) or 'none'} here"
    else:
        device = f"the CPU, threads each: {places[0]['OMP_NUM_THREADS']}"
    print(studies.report(plan, cost, len(places), device), end="", flush=True)
    if options.list:
        for run in plan.runs:
            left = ", ".join(step.title for step in plan.steps(run))
            print(f"  {run.name}: {left or 'finished'}")
    for name, prefixes in plan.missing_data().items():
        print(f"not prepared: {name} ({', '.join(prefixes)}): python -m data_prep {name} --help")
    if options.slurm is not None:
        studies.write_script(plan, cost, options.slurm)
        print(
            f"wrote {options.slurm}: submit it from the repository's root, sbatch {options.slurm}"
        )
        return 0
    if options.dry_run or options.list:
        return 0
    failures = studies.carry_out(plan, places, lambda text: print(text, flush=True))
    print(f"{len(plan.runs)} runs in {shown(study.output_dir)}")
    for failure in failures:
        print(
            f"failed: {failure.run}, {failure.step}, exit code {failure.exit_code}: "
            f"{failure.message} ({failure.log})",
            file=sys.stderr,
        )
    return FAILED if failures else 0


def main() -> int:
    options = make_parser().parse_args()
    return guarded(lambda: work(options), options.debug)


if __name__ == "__main__":
    sys.exit(main())
