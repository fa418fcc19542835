"""The command line of scripts/gpu_quarter_hour.py; exit code 2 for a wrong request, 1 for failed cells."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from data_prep.errors import DataError
from megatron_patches.analysis.rows import RowError
from megatron_patches.quarter.budget import Clock
from megatron_patches.quarter.plan import PlanError, QuarterPlan, read_plan

ROOT = Path(__file__).resolve().parents[2]
STUDY = ROOT / "configs" / "sweeps" / "gpu_quarter_hour.yml"
DATA = "data/gpu_quarter_hour"
IMPLEMENTATIONS = ("triton", "flex", "chunked", "reference")
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
EXAMPLES = """examples:
  python scripts/gpu_quarter_hour.py prepare
  python scripts/gpu_quarter_hour.py run --dry-run
  python scripts/gpu_quarter_hour.py run --output results/gpu_quarter_hour
  python scripts/gpu_quarter_hour.py run --toy --minutes 1 --output /tmp/toy
"""


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes between 0.1 and 1440")
    return value


def make_parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = made.add_subparsers(dest="verb", required=True, metavar="prepare|run|collect")
    ready = verbs.add_parser("prepare", help="study and text into one folder")
    ready.add_argument("--study", type=Path, default=STUDY, metavar="FILE.yml")
    ready.add_argument("--output", type=Path, default=Path(DATA), metavar="DIR", help=DATA)
    run = verbs.add_parser("run", help="train, score, write rows")
    run.add_argument("--output", type=Path, metavar="DIR", help="a new folder for the results")
    run.add_argument("--minutes", type=_minutes, default=9.0, help="for everything (9)")
    run.add_argument("--attention", choices=IMPLEMENTATIONS, help="this one, or none at all")
    run.add_argument(
        "--peak-tflops", type=float, metavar="N", help="of a device whose data sheet is not known"
    )
    run.add_argument("--save-weights", action="store_true", help="RUN/weights.pt in the output")
    run.add_argument("--dry-run", action="store_true", help="print plan, memory and times only")
    inner = verbs.add_parser("probe")  # started by `run`: is one implementation right here?
    inner.add_argument("--implementation", required=True, choices=IMPLEMENTATIONS)
    for verb in (run, inner):
        verb.add_argument("--data", type=Path, default=Path(DATA), metavar="DIR", help=DATA)
        verb.add_argument(
            "--device", choices=("cuda", "cpu"), help="default: cuda where there is one"
        )
        verb.add_argument("--toy", action="store_true", help="a toy model and short lengths")
    run.add_argument("--precision", choices=tuple(PRECISIONS), help="cuda: bf16, cpu: fp32")
    inner.add_argument("--precision", choices=tuple(PRECISIONS.values()), required=True)
    back = verbs.add_parser("collect", help="training.jsonl from the logs of a finished run")
    back.add_argument("--output", type=Path, required=True, metavar="DIR", help="of `run`")
    for verb in (ready, run, inner, back):
        verb.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return made


def main(begun: float, description: str, arguments: list[str] | None = None) -> int:
    options = make_parser(description).parse_args(arguments)
    verbs: dict[str, Callable[[], int]] = {
        "prepare": lambda: _prepare(options),
        "run": lambda: _run(options, Clock(begun)),
        "probe": lambda: _probe(options),
        "collect": lambda: _collect(options),
    }
    try:
        return verbs[options.verb]()
    except PlanError as error:
        return _fail(error, 2, options.debug)
    except (DataError, RowError, ValueError, RuntimeError, OSError) as error:
        # A ConfigError of `prepare`, whose module a bare machine does not have, is a ValueError.
        code = 2 if type(error).__name__ in ("ConfigError", "UsageError") else 1
        return _fail(error, code, options.debug)
    except KeyboardInterrupt:
        print("interrupted; the rows written so far are whole", file=sys.stderr)
        return 130


def _fail(error: Exception, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {error}", file=sys.stderr)
    return code


def say(text: str) -> None:
    print(text, flush=True)


def _prepare(options: argparse.Namespace) -> int:
    try:
        from megatron_patches.quarter.prepare import prepare
    except ModuleNotFoundError as error:
        raise PlanError(f"{error}: `prepare` needs the full environment (make setup)") from error
    study, output = options.study.resolve(), options.output.resolve()
    os.chdir(ROOT)  # where the configurations' data paths begin
    prepare(study, output, say)
    return 0


def _plan(options: argparse.Namespace) -> QuarterPlan:
    plan = read_plan(options.data)
    if options.toy:
        from megatron_patches.quarter.toy import toy

        return toy(plan)
    return plan


def _run(options: argparse.Namespace, clock: Clock) -> int:
    import torch

    from megatron_patches.quarter import estimate
    from megatron_patches.quarter.run import QuarterHour, Request

    plan = _plan(options)
    if options.dry_run:
        for line in estimate.lines(plan, options.minutes):
            say(line)
        return 0
    if options.output is None:
        raise PlanError("--output DIR is needed: a new folder for the results")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise PlanError("--device cuda: torch sees no GPU here")
    if device == "cpu" and not options.toy:
        raise PlanError("no GPU here, and a CPU takes days for this model: --toy, or --dry-run")
    precision = PRECISIONS[options.precision or ("bf16" if device == "cuda" else "fp32")]
    request = Request(
        data=options.data,
        output=options.output,
        minutes=options.minutes,
        device=torch.device(device),
        precision=precision,
        toy=options.toy,
        attention=options.attention,
        peak_tflops=options.peak_tflops,
        save_weights=options.save_weights,
    )
    hour = QuarterHour(plan, request, clock, say)
    failed = hour.go()
    say(f"{options.output}: rows.jsonl, kernels.jsonl, summary.json; {failed} failed cells")
    return 1 if failed or hour.lost else 0


def _collect(options: argparse.Namespace) -> int:
    from megatron_patches.quarter.collect import TRAINING, collect

    rows = collect(options.output)
    say(f"{options.output / TRAINING}: {len(rows)} training runs")
    return 0


def _probe(options: argparse.Namespace) -> int:
    import torch

    from megatron_patches.quarter.probe import probe

    device = torch.device(options.device or "cpu")
    print(probe(_plan(options), options.implementation, device, options.precision))
    return 0
