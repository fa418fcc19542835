"""What a preparation read and what it left out, for the sidecars and for a person."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_prep.files import printable, sha256_text
from data_prep.reading import Reading
from data_prep.splits import Selection


def sources_of(reading: Reading, provenance: dict[str, Any]) -> dict[str, Any]:
    names = sorted(f"{printable(Path(path).name)} {sha}" for path, sha in reading.sources.items())
    return {
        "files": len(names),
        "sha256": sha256_text("\n".join(names)),
        # One by one only where a person would read them.
        "names": names if len(names) <= 20 else names[:3] + ["..."],
        **({"bad_reasons": reading.bad_reasons} if reading.bad_reasons else {}),
        **provenance,
    }


def dropped_of(
    reading: Reading, selection: Selection, provenance: dict[str, Any]
) -> dict[str, int]:
    counts = {
        "empty": reading.empty,
        "bad": reading.bad,
        "blank_lines": reading.blank_lines,
        "too_short": selection.too_short,
        "duplicates": selection.duplicates,
        "cut": selection.cut,
        "cut_bytes": selection.cut_bytes,
    }
    if "not_utf8" in provenance:  # files of a package; a bad record of an input is in `bad`
        counts["not_UTF-8"] = provenance["not_utf8"]
    if reading.hidden:
        counts["hidden"] = reading.hidden
    if selection.repair:
        counts["repaired"] = selection.repaired
    if reading.pile_set is not None:
        counts["other_sets"] = reading.other_sets
    return counts


def in_words(dropped: dict[str, int], reading: Reading) -> str:
    words = {what: f"{number} {what.replace('_', ' ')}" for what, number in dropped.items()}
    if reading.bad:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(reading.bad_reasons.items()))
        words["bad"] += f", first {reading.first_bad}" + (f"; {reasons}" if reasons else "")
    return ", ".join(words.values())
