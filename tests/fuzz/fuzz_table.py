"""What was tried, as lines of JSON, and the table made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fuzz_campaign import SEEDS, Tally
from fuzz_target import Target


def row(target: Target, tally: Tally, **about: Any) -> dict[str, Any]:
    """One line of results: numbers of one run over one target."""
    return {
        "target": target.name,
        "reads": target.reads,
        "cases": tally.cases,
        "accepted": tally.accepted,
        "refused": tally.refused,
        "findings": dict(tally.times),
        "seconds": round(tally.seconds, 1),
        **about,
    }


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The lines of files, in order."""
    texts = [path.read_text(encoding="utf-8") for path in paths]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown, a line a target: inputs of all runs, findings of the latest, seeds as they are now."""
    lines = [
        "| target | what is read | known attacks | random inputs | accepted | refused | findings now "
        "| found before and fixed | minutes |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    totals = [0] * 6
    for name in dict.fromkeys(item["target"] for item in rows):
        own = [item for item in rows if item["target"] == name]
        numbers = [
            own[-1]["attacks"],
            sum(item["cases"] for item in own),
            sum(item["accepted"] for item in own),
            sum(item["refused"] for item in own),
            len(own[-1]["findings"]),
            len(list((SEEDS / name).glob("*/finding.json"))),
        ]
        totals = [total + number for total, number in zip(totals, numbers, strict=True)]
        minutes = sum(item["seconds"] for item in own) / 60
        cells = " | ".join(f"{number:,}" for number in numbers)
        lines.append(f"| `{name}` | {own[-1]['reads']} | {cells} | {minutes:.1f} |")
    minutes = sum(item["seconds"] for item in rows) / 60
    cells = " | ".join(f"{number:,}" for number in totals)
    return "\n".join([*lines, f"| all | | {cells} | {minutes:.1f} |"]) + "\n"
