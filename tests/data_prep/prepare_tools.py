"""What the tests of a preparation share."""

import json
from pathlib import Path

import numpy as np
import zstandard

from data_prep.__main__ import main
from data_prep.indexed import IndexedDataset, write_index
from data_prep.splits import NAMES

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "goldens" / "neox_data"
TEXTS = [
    f"document {i}\n" + "the quick brown fox, żółć 😀 <|endoftext|>\n" * (i % 7) for i in range(300)
]
ALL = ["documents", "prepared.json", "tokenizer.json"] + sorted(
    f"{name}.{suffix}" for name in NAMES for suffix in ("bin", "idx", "json")
)


def quiet(_line):
    pass


def make_source(folder):
    """TEXTS as a .jsonl.zst of two frames."""
    data = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    path = folder / "source.jsonl.zst"
    path.write_bytes(zstandard.compress(data[:4000]) + zstandard.compress(data[4000:]))
    return path


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(capsys, *arguments):
    """Exit code, stdout, stderr of the command."""
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def tree(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def ids_of(folder):
    return {
        name: [data.get(i).tolist() for i in range(len(data))]
        for name in NAMES
        if (data := IndexedDataset(folder / name))
    }


def foreign_pair(prefix, ids):
    """One document of ids, int64, as another tool leaves it: no sidecar."""
    np.array(ids, dtype=np.int64).tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", [len(ids)], np.int64)
