"""`checkpoints/convert.py` to and from Hugging Face folders: what it says, and its exit codes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from hf_cases import a_run

pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).resolve().parents[2]


def convert() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert", ROOT / "checkpoints" / "convert.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_away(tmp_path, capsys):
    run = a_run(tmp_path / "run", "alibi")
    asked = [str(run), str(tmp_path / "hf"), "--to", "huggingface"]
    assert convert().main(asked) == 2
    assert "--no-tokenizer" in capsys.readouterr().err
    assert convert().main([*asked, "--no-tokenizer"]) == 0
    said = capsys.readouterr().out
    assert f"wrote {tmp_path / 'hf'}" in said and "logits of 3 prompts differ by" in said
    assert convert().main([str(tmp_path / "hf"), str(tmp_path / "x"), "--to", "huggingface"]) == 2
    assert "already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--to", "huggingface", "--layout", "layers"],
        ["--to", "huggingface", "--dtype", "fp16"],
        ["--to", "huggingface", "--tensor-parallel", "2"],
        ["--no-tokenizer"],
        ["--tokenizer", "gpt2"],
    ],
    ids=" ".join,
)
def test_options_without_use(tmp_path, capsys, options):
    run = a_run(tmp_path / "run", "alibi")
    assert convert().main([str(run), str(tmp_path / "to"), *options]) == 2
    assert options[-2 if len(options) == 4 else 0].lstrip("-") in capsys.readouterr().err
    assert not (tmp_path / "to").exists()
