"""The journal of a soak as a few lines of Markdown."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any


def markdown(events: list[dict[str, Any]]) -> str:
    """What was trained, the faults by kind with how they ended, and the outcome.

    Raises ValueError for a journal without an end, or with a broken promise after which none came.
    """
    begin = next((event for event in events if event["event"] == "begin"), None)
    if begin is None:
        raise ValueError("no soak was begun here")
    if events[-1]["event"] != "end":
        raise ValueError(f"this soak has no end; its last event: {events[-1]}")
    end, faults = events[-1], [event for event in events if event["event"] == "fault"]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for event in faults:
        kinds.setdefault(event["fault"], []).append(event)
    lines = [
        f"{end['minutes']:g} minutes of faults, {len(faults)} of them, on a training of "
        f"{begin['iterations']:,} steps, {begin['processes']} process(es), accumulation "
        f"{begin['accumulation']}, a checkpoint every {begin['save_every']} steps, ZeRO 1, seed "
        f"{begin['seed']}.",
        "",
        "| fault | times | exit codes | left broken files | seconds, median |",
        "|---|---:|---|---:|---:|",
    ]
    for kind, found in sorted(kinds.items()):
        codes = Counter(event["code"] for event in found)
        told = ", ".join(f"{code} ({count})" for code, count in sorted(codes.items()))
        seconds = statistics.median(event["seconds"] for event in found)
        broken = sum(bool(event["broken"]) for event in found)
        words = kind.replace("_", " ")
        lines.append(f"| {words} | {len(found)} | {told} | {broken} | {seconds:.0f} |")
    if begin["no_disk"]:
        lines += ["", f"The disk could not be filled: {begin['no_disk']}."]
    lines += [
        "",
        f"In the end {end['rows_equal']:,} rows of the log and {end['numbers_equal']:,} numbers of the last "
        "checkpoint (weights, optimizer, counters) equal those of an unbroken run bit for bit; the last "
        f"{end['iterations'] - end['without_faults_from']:,} steps had no fault.",
    ]
    found = [event for event in events if event["event"] == "broken promise"]
    if found:
        lines += ["", "Broken promises on the way:", ""]
        lines += [f"- {event['what']}" for event in found]
    return "\n".join(lines) + "\n"
