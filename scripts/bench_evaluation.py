"""Memory and time of an evaluation against length, for the tiny model with fresh weights.

Each length is measured in a process of its own; both columns must grow in proportion to the length
(attention makes the time grow faster once it outweighs the rest). One more process scores the same
text at all lengths, against the bare forward passes of that.

Example: python scripts/bench_evaluation.py kerple_log alibi --output results/bench/evaluation.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import bench_common as common  # first: it decides the number of threads
import numpy as np
import torch

from megatron_patches.config import compose
from megatron_patches.positions import names
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.scoring import TOKENS_PER_PASS, score
from megatron_patches.standalone.windows import Plan, batches

VOCABULARY = 1024
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
TARGET = 1.3


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ["kerple_log"]
    parser.add_argument("methods", nargs="*", default=default, help=f"default: {default}")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=3, help="of the last comparison (3)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append JSON lines")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # method, length: fresh process
    return parser


def make_model(method: str, longest: int) -> GPT:
    files = [common.ROOT / "configs" / name for name in ("base/tiny.yml", "cluster/cpu.yml")]
    # Learned positions need a table that reaches the longest window.
    overrides = [f"pos_emb={method}", f"max_position_embeddings={max(512, longest)}"]
    return GPT(shape_of(compose(files, overrides), VOCABULARY)).eval()


def make_text(tokens: int) -> np.ndarray:
    return np.random.RandomState(0).randint(0, VOCABULARY, tokens + 1)


def one_length(method: str, length: int) -> dict[str, Any]:
    """Seconds and peak memory, MB, of one window; for a fresh process."""
    model, text = make_model(method, length), make_text(length)
    windows = Plan("nonoverlap", length + 1, (length,)).windows(length)
    score(model, text, Plan("nonoverlap", 65, (64,)).windows(64))  # first use of the libraries
    spent: list[float] = []
    peak = common.peak_megabytes(
        lambda: spent.append(common.cpu_seconds(lambda: score(model, text, windows)))
    )
    return {"seconds": spent[0], "peak_mb": peak}


@torch.no_grad()
def forward_passes(model: GPT, text: np.ndarray, length: int) -> None:
    """The same windows through the model, logits included, and nothing else."""
    windows = Plan("nonoverlap", len(text), (length,)).windows(length)
    for group in batches(windows, max(1, TOKENS_PER_PASS // length)):
        ids = np.stack([text[w.start : w.start + length] for w in group]).astype(np.int64)
        hidden_BLC = model.hidden(torch.from_numpy(ids))
        for part_BLC in hidden_BLC.split(1024, dim=1):
            model.logits(part_BLC)


def overhead(method: str, lengths: list[int], rounds: int) -> dict[str, float]:
    """One evaluation of the same text at all lengths against its forward passes."""
    longest = max(lengths)
    model, text = make_model(method, longest), make_text(longest)
    plan = Plan("nonoverlap", len(text), tuple(lengths))

    def evaluation() -> None:
        for length in lengths:
            score(model, text, plan.windows(length))

    def forward() -> None:
        for length in lengths:
            forward_passes(model, text, length)

    times = common.interleaved({"evaluation": evaluation, "forward": forward}, rounds=rounds)
    return {
        "evaluation_seconds": statistics.median(times["evaluation"]),
        "forward_seconds": statistics.median(times["forward"]),
        "ratio": common.ratio(times["evaluation"], times["forward"]),
    }


def main() -> int:
    arguments = make_parser().parse_args()
    if arguments.one:
        print(json.dumps(one_length(arguments.one[0], int(arguments.one[1]))))
        return 0
    for method in arguments.methods:
        if method not in names():
            print(f"error: {method!r} is none of {', '.join(names())}", file=sys.stderr)
            return 2
    for method in arguments.methods:
        rows, lines = [], []
        for length in arguments.lengths:
            found = common.in_subprocess(__file__, ["--one", method, length])
            rows.append({"benchmark": "evaluation", "method": method, "length": length, **found})
            per_token = [found["peak_mb"] * 1024 / length, found["seconds"] * 1e6 / length]
            lines.append([length, found["peak_mb"], per_token[0], found["seconds"], per_token[1]])
        header = ["length", "peak MB", "KB / token", "seconds", "microseconds / token"]
        print(common.table(f"{method}: one window of each length", header, lines))
        total = overhead(method, arguments.lengths, arguments.rounds)
        rows.append({"benchmark": "evaluation_total", "method": method, **total})
        rows[-1]["lengths"] = arguments.lengths
        title = f"{method}: all lengths in one evaluation, target ratio <= {TARGET}"
        print(common.table(title, list(total), [list(total.values())]), flush=True)
        common.append(arguments.output, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
