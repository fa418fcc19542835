"""What is kept when a watchdog ends a run: `evidence/` in its folder, one JSON file for each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megatron_patches.standalone.fingerprints import write_text

FOLDER = "evidence"


def write(folder: Path, iteration: int, rank: int, content: dict[str, Any]) -> str:
    """Write the file; returns where it is, or why it could not be written, for a message.

    Earlier ones stay: a run that fails twice at the same iteration has two files.
    """
    place = folder / FOLDER
    number, path = 1, place / f"iteration{iteration}-rank{rank}.json"
    try:
        place.mkdir(parents=True, exist_ok=True)
        while path.exists():
            number += 1
            path = place / f"iteration{iteration}-rank{rank}-{number}.json"
        text = json.dumps({"iteration": iteration, "rank": rank, **content}, indent=1)
        write_text(path, text + "\n")
    except OSError as error:
        return f"the evidence could not be written: {error}"
    return f"evidence in {path}"


def statistics(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Of every parameter and gradient that this rank holds, under ZeRO 3 of its slice, in float32."""
    found = []
    for name, parameter in model.named_parameters():
        found.append(_of(name, "parameter", getattr(parameter, "ds_tensor", parameter)))
        if parameter.grad is not None:
            found.append(_of(name, "gradient", parameter.grad))
    return found


@torch.no_grad()
def _of(name: str, kind: str, tensor: torch.Tensor) -> dict[str, Any]:
    values = tensor.detach().float().flatten()
    finite = values[torch.isfinite(values)]
    row: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "nan": int(torch.isnan(values).sum()),
        "infinite": int(torch.isinf(values).sum()),
    }
    if finite.numel():
        row |= {
            "min": float(finite.min()),
            "max": float(finite.max()),
            "mean": float(finite.mean()),
            "rms": float(finite.double().square().mean().sqrt()),
        }
    return row


def largest(rows: list[dict[str, Any]]) -> str:
    """The parameter with the largest absolute value, for a message."""
    ours = [row for row in rows if row["kind"] == "parameter" and "max" in row]
    if not ours:
        return "no parameter is finite"
    row = max(ours, key=lambda row: max(abs(row["min"]), abs(row["max"])))
    return f"the largest value, {max(abs(row['min']), abs(row['max'])):.3g}, is in {row['name']}"
