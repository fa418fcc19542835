"""Ask a trained model passkeys and copies at many lengths and depths; one JSON row a cell.

docs/retrieval.md defines the tasks and says what may be concluded from them.
"""

import argparse
import os
import sys
from pathlib import Path

# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# Idle OpenMP threads that spin take the core from whoever has work; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from megatron_patches.config import ConfigError, compose  # noqa: E402
from megatron_patches.standalone.arguments import (  # noqa: E402
    FAILED,
    add_config_arguments,
    add_device_argument,
    add_position_argument,
    device_of,
    guarded,
    parser,
    position_options_of,
    whole,
    window_argument,
)

TASKS = ("passkey", "copy")


def depth(text: str) -> float:
    """argparse type: a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return value


def make_parser() -> argparse.ArgumentParser:
    made = parser(
        "Ask a trained model passkeys and copies at many lengths and depths; one JSON row a cell.",
        "python scripts/retrieval.py --checkpoint checkpoints/kerple_log-local_code-1234 "
        "--lengths 512 1024 --output retrieval.jsonl",
    )
    add_config_arguments(made, "*")
    made.add_argument("--checkpoint", type=Path, required=True, help="run folder or global_stepN")
    made.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="default: both")
    made.add_argument("--lengths", type=whole(1), nargs="+", help="tokens; default: `eval_lengths`")
    made.add_argument(
        "--depths",
        type=depth,
        nargs="+",
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        help="0: at the start of the window, 1: right before the question; default: five of them",
    )
    made.add_argument("--samples", type=whole(1), default=8, help="questions a cell; default: 8")
    made.add_argument("--split", choices=["valid", "test"], default="valid")
    made.add_argument("--attention", default="auto", help="implementation of attention")
    made.add_argument(
        "--window",
        type=window_argument,
        metavar="W",
        help="the same weights with sliding_window_width W, or blockwise:B",
    )
    add_position_argument(made)
    add_device_argument(made)
    made.add_argument(
        "--resume", action="store_true", help="skip cells that --output already holds"
    )
    made.add_argument("--output", type=Path, required=True, help="append the rows to this .jsonl")
    return made


def ask(options: argparse.Namespace) -> int:
    from megatron_patches.attention import IMPLEMENTATIONS
    from megatron_patches.standalone.checkpoint import read_config
    from megatron_patches.standalone.retrieval import Request, Retrieval

    config = compose(options.config, options.set) if options.config else None
    if config is None and options.set:
        raise ConfigError("--set needs the configuration files that it changes")
    if options.attention not in ("auto", *IMPLEMENTATIONS):
        raise ConfigError(
            f"--attention {options.attention}: choose auto, {', '.join(IMPLEMENTATIONS)}"
        )
    stored = read_config(options.checkpoint, config)
    request = Request(
        lengths=tuple(options.lengths or stored.eval_lengths),
        tasks=tuple(options.tasks),
        depths=tuple(options.depths),
        samples=options.samples,
        split=options.split,
        window=options.window,
        position_options=position_options_of(options.position_option),
    )
    retrieval = Retrieval(
        options.checkpoint,
        request,
        config=config,
        attention=options.attention,
        device=device_of(options.device, stored),
    )
    rows = retrieval.run(
        options.output, lambda text: print(text, flush=True), resume=options.resume
    )
    print(f"{len(rows)} rows appended to {options.output}")
    # A method that cannot read a length has answered the question; a failed cell has not.
    return FAILED if any(row.status == "failed" for row in rows) else 0


def main() -> int:
    options = make_parser().parse_args()
    return guarded(lambda: ask(options), options.debug)


if __name__ == "__main__":
    sys.exit(main())
