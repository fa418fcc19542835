"""The public names: documented, their examples right, and made into pages by `make docs`."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("megatron_patches.positions", "megatron_patches.attention", "megatron_patches.hf")
# Modules whose docstrings hold examples, and how many at least.
EXAMPLES = {
    "megatron_patches.positions": 3,
    "megatron_patches.attention.api": 5,
    "megatron_patches.hf.foreign_models": 8,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings(name: str) -> None:
    if ".hf." in name:
        pytest.importorskip("transformers", reason="transformers is not installed")
    found = doctest.testmod(importlib.import_module(name))
    assert found.failed == 0 and found.attempted >= EXAMPLES[name]


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_documented(package: str) -> None:
    if package.endswith(".hf"):
        pytest.importorskip("transformers", reason="transformers is not installed")
    module = importlib.import_module(package)
    callables = [getattr(module, name) for name in module.__all__]
    bare = [value.__name__ for value in callables if callable(value) and not value.__doc__]
    assert not bare


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("pdoc") is None, reason="pdoc is not installed (extra docs)"
)
def test_the_pages(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/api_pages.py", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    for page, word in {
        "positions": "build",
        "positions/kerple_log": "KerpleLog",
        "attention": "attend",
        "hf": "use_positions",
    }.items():
        text = (tmp_path / "megatron_patches" / f"{page}.html").read_text(encoding="utf-8")
        assert f'<span class="name">{word}</span>' in text, page
        assert str(ROOT) not in text


@pytest.mark.skipif(importlib.util.find_spec("pdoc") is not None, reason="pdoc is installed")
def test_without_the_generator_it_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/api_pages.py", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "pip install '.[docs]'" in done.stderr
