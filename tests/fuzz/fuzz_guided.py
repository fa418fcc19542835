"""Inputs guided by coverage of the readers' own lines: atheris (libFuzzer), where it is installed.

One file of a sound input is changed and the others stay. Run as a program, this is the process of one
target; `guided` starts one after the other and keeps what they find.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fuzz_campaign import Tally, keep, replay
from fuzz_child import Child, Verdict
from fuzz_table import row
from fuzz_target import Files, Target, read_folder, write

ROOT = Path(__file__).resolve().parents[2]
# Only of Python code can the coverage be seen.
MEASURED = ["megatron_patches", "data_prep", "yaml", "json", "tarfile", "zipfile", "csv"]
LONGEST = 1 << 16
AT_ONCE = 100  # inputs between two notes of how many there were


def guided(targets: Sequence[Target], options: argparse.Namespace) -> int:
    """Each target for `options.seconds`; 1 if something was found, 2 without atheris."""
    if importlib.util.find_spec("atheris") is None:
        print("error: atheris is not installed: pip install atheris", file=sys.stderr)
        return 2
    results = [_one(target, options) for target in targets]
    return 0 if all(results) else 1


def _one(target: Target, options: argparse.Namespace) -> bool:
    started, tally = time.monotonic(), Tally(target.name)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, target.name, str(options.seconds or 60), folder]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, str(options.seed)], cwd=ROOT, env=environment)
        counts = json.loads((Path(folder) / "counts.json").read_text(encoding="utf-8"))
        tally.accepted, tally.refused = counts["accepted"], counts["refused"]
        found = sorted((Path(folder) / "found").glob("*"))
        inputs = {path.name: read_folder(path) for path in found}
        # Judged again in a process of its own: what it says there counts.
        for name, verdict in replay(target, inputs).items():
            if verdict.kind == "finding":
                tally.times[verdict.key] += 1
                tally.findings[verdict.key] = verdict
                tally.inputs[verdict.key] = inputs[name]
    tally.seconds = time.monotonic() - started
    print(f"{target.name}: {tally.cases} guided inputs, {len(tally.findings)} findings", flush=True)
    for key, verdict in tally.findings.items():
        place = "" if options.no_seeds else str(keep(target, key, tally.inputs[key]))
        print(f"FOUND {target.name} {place} {key}\n{verdict.text}", file=sys.stderr)
    if options.output is not None:
        about = {"engine": "atheris", "seed": options.seed, "attacks": len(target.known())}
        about |= {"when": time.strftime("%Y-%m-%d", time.gmtime()), "bad": len(tally.findings)}
        with open(options.output, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row(target, tally, **about)) + "\n")
    return not tally.findings


class _Session:
    """The process of one target."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.folder, self.known = folder, set[str]()
        self.counts = {"accepted": 0, "refused": 0, "finding": 0}
        self.base = target.sound()[0]
        free = sorted(set(self.base) - target.kept)
        self.name = next((n for n in free if n.endswith((".json", ".jsonl", ".yml"))), free[0])
        self.child = Child(target, folder / "scratch")
        self.note()

    def __call__(self, data: bytes) -> None:
        files: Files = {**self.base, self.name: data}
        verdict: Verdict = self.child.verdict(files)
        self.counts[verdict.kind] += 1
        if verdict.kind == "finding" and verdict.key not in self.known:
            self.known.add(verdict.key)
            write(files, self.folder / "found" / str(len(self.known)))
        if sum(self.counts.values()) % AT_ONCE == 0:
            self.note()

    def note(self) -> None:
        """libFuzzer ends the process without a word to Python."""
        (self.folder / "counts.json").write_text(json.dumps(self.counts), encoding="utf-8")


def _process(name: str, seconds: float, folder: Path, seed: int) -> None:
    import atheris

    # Without what its modules import at their top already, nothing would be measured.
    with atheris.instrument_imports(include=MEASURED):
        from fuzz_registry import targets
    session = _Session(targets()[name], folder)
    corpus = folder / "corpus"
    corpus.mkdir()
    (corpus / "sound").write_bytes(session.base[session.name])
    limits: list[Any] = [f"-max_total_time={int(seconds)}", f"-max_len={LONGEST}", f"-seed={seed}"]
    atheris.Setup([sys.argv[0], *limits, "-rss_limit_mb=0", str(corpus)], session)
    atheris.Fuzz()


if __name__ == "__main__":
    _process(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
