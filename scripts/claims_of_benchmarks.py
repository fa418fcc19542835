"""What the sentences of README.md and docs/ say of benchmarks in numbers, for claims.py."""

from __future__ import annotations

import functools
import json
from typing import Any

from claims import ROOT, Claim
from claims_rows import span, words


@functools.cache
def _lines(name: str) -> tuple[dict[str, Any], ...]:
    path = ROOT / "results" / f"{name if '/' in name else f'bench/{name}'}.jsonl"
    return tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def measured(name: str, key: str, **where: object) -> list[float]:
    """The values of a key in the lines of a benchmark that have these values."""
    return [
        float(line[key])
        for line in _lines(name)
        if key in line and all(line.get(k) == value for k, value in where.items())
    ]


def newest(name: str, key: str, **where: object) -> float:
    return measured(name, key, **where)[-1]


def in_neox() -> set[str]:
    """Methods whose losses in real GPT-NeoX were compared with the built-in engine's."""
    rows = _lines("neox/parity")
    return {r["method"] for r in rows if r["way"] != "standalone" and r["difference"] is not None}


BENCHMARKS = {
    "README.md": (
        Claim(
            "GPT-2's BPE runs {} to {} times as fast as in NeoX's own script",
            lambda: [words(x) for x in span(measured("tokenizing", "times_faster"))],
        ),
        Claim(
            "20 training steps of {} methods against real GPT-NeoX's losses",
            lambda: (len(in_neox()),),
        ),
    ),
    "docs/data.md": (
        Claim(
            "{:.0f} to {:.0f}% slower where both are right",
            lambda: span(100 * (1 - x) for x in measured("reading", "times_faster")),
        ),
    ),
    "docs/reliability.md": (
        Claim(
            "A save of the tiny model takes {:.0f} ms, {:.2%} of the training at its interval of {} steps",
            lambda: (
                1000 * newest("checkpoint", "save_seconds"),
                newest("checkpoint", "share"),
                round(newest("checkpoint", "interval")),
            ),
        ),
        Claim(
            "takes {:.1f} to {:.1f} ms, {:.2f} to {:.2%} of a step of the tiny model",
            lambda: (
                *span(1000 * x for x in measured("trackers", "log_seconds")),
                100 * min(measured("trackers", "share_log")),
                max(measured("trackers", "share_log")),
            ),
        ),
        Claim(
            "the same set-up measured twice differed by {:.0%}",
            lambda: (abs(newest("trackers", "share_cpu", trackers="log.jsonl again")),),
        ),
        Claim(
            "the tiny model takes {:.1f} s with * and {:.1f} s with *",
            lambda: [
                newest("startup", "seconds", command=command)
                for command in ("train.py", "deepy.py train.py")
            ],
        ),
    ),
}
