"""A manifest of the tiny checkpoint, and the command line run on an archive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from fetch_cases import MANIFEST, script

from data_prep.indexed import write_indexed


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """A manifest of the golden model under two methods, with text to score it on."""
    text = tmp_path / "text"
    text.mkdir()
    tokens = torch.arange(600).remainder(120).numpy()
    for part in ("train", "valid", "test"):
        write_indexed(text / part, [tokens], vocab_size=128, sidecar={})
    model = {
        "num_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 12,
        "seq_length": 64,
        "max_position_embeddings": 64,
        "no_weight_tying": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "train_iters": 1,
        "dataset": "toy",
        "padded_vocab_size": 128,
        "train_data_paths": [str(text / "train")],
        "valid_data_paths": [str(text / "valid")],
        "test_data_paths": [str(text / "test")],
    }
    (tmp_path / "model.yml").write_text(yaml.safe_dump(model))
    content = yaml.safe_load(MANIFEST.read_text())
    layout = content["layouts"]["162m"]
    layout.update(layers=2, hidden_size=96, dtype="float32")
    layout["files"] = {"embedding": [0], "block": [2, 3], "norm": [5], "output": [6]}
    sides = {768: 96, 2304: 288, 3072: 384, 50304: 128}
    layout["tensors"] = {
        kind: {key: [sides[side] for side in shape] for key, shape in tensors.items()}
        for kind, tensors in layout["tensors"].items()
    }
    entry = content["checkpoints"]["kerple_log-github-released"]
    content["checkpoints"] = {
        method: {
            **entry,
            "method": method,
            "dataset": "toy",
            "configs": [str(tmp_path / "model.yml"), f"configs/method/{method}.yml"],
            "overrides": ["position_precision=as_published"],
            "perplexity": {64: [99.5, None], 128: [98.25, 0.5]},
        }
        for method in ("kerple_log", "kerple_power")
    }
    file = tmp_path / "manifest.yml"
    # The manifest is read without anchors, which safe_dump makes of values that stand twice.
    file.write_text(yaml.safe_dump(json.loads(json.dumps(content))))
    return file


@pytest.fixture
def fetch(manifest, tmp_path, capsys):
    """fetch(archive, *options) -> exit code, stdout, stderr, output folder."""

    def run(path, *options, name="kerple_log", output=tmp_path / "out" / "run"):
        fixed = [name, "--archive", path, "--manifest", manifest, "--output", output]
        code = script.main([str(word) for word in (*fixed, *options)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err, output

    return run


@pytest.fixture
def refused(fetch, tmp_path):
    """refused(archive, pattern, *options): one line of error, and no trace of an output."""

    def check(path, pattern, *options, code=1, **keywords):
        got, _, err, output = fetch(path, *options, **keywords)
        assert got == code, err
        assert pattern in err and err.startswith("error: ") and err.count("\n") == 1, err
        assert not output.parent.exists() or not list(output.parent.iterdir())

    return check
