"""What `pip install .` puts on a machine: our packages alone, typed, whose maths needs torch and numpy."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("setuptools", reason="setuptools is not installed: nothing to build with")
OURS = ("megatron_patches", "data_prep")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """`(wheel, source archive)`, made in a copy of the tree that has tests and results, too."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in (*OURS, "tests", "scripts", "configs"):
        ignored = shutil.ignore_patterns("__pycache__", "goldens")
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    code = "import setuptools.build_meta as b; print(b.build_wheel('out'), b.build_sdist('out'))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=copy, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    wheel, source = done.stdout.split()[-2:]
    return copy / "out" / wheel, copy / "out" / source


def modules() -> set[str]:
    return {str(p.relative_to(ROOT)) for part in OURS for p in (ROOT / part).rglob("*.py")}


def test_the_wheel_holds_our_packages_alone(built: tuple[Path, Path]) -> None:
    names = {n for n in zipfile.ZipFile(built[0]).namelist() if ".dist-info/" not in n}
    data = {"py.typed", "analysis/report.css", "analysis/report.js"}
    assert names == modules() | {f"megatron_patches/{name}" for name in data}


def test_the_source_archive_builds_the_same(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    assert not {"tests", "results", "scripts", "configs"} & {path.name for path in root.iterdir()}
    code = "import setuptools.build_meta as b; print(b.build_wheel('out'))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    again = zipfile.ZipFile(root / "out" / done.stdout.split()[-1])
    first = zipfile.ZipFile(built[0])
    names = [name for name in first.namelist() if not name.endswith("RECORD")]
    assert sorted(names) == sorted(n for n in again.namelist() if not n.endswith("RECORD"))
    assert all(first.read(name) == again.read(name) for name in names)


USE = """
import sys
sys.path.insert(0, {site!r})
for name in {blocked!r}:
    sys.modules[name] = None
import torch
import megatron_patches.positions as positions
from megatron_patches.attention import attend

assert positions.__file__.startswith({site!r}), positions.__file__
for name in positions.names():
    method = positions.build(name, heads=2, head_dim=8, hidden_size=16, max_length=20)
    q = torch.randn(1, 2, 20, 8, requires_grad=True)
    gates = method.decay(torch.randn(1, 20, 16))
    attend(q, q, q, method, gates=gates).sum().backward()
    assert torch.isfinite(q.grad).all()
"""
EXTRAS = """
deepspeed pydantic yaml tokenizers tiktoken zstandard lm_dataformat wandb tensorboard rich scipy
matplotlib transformers safetensors lm_eval pyarrow triton hypothesis data_prep
"""


def test_positions_and_attention_need_torch_and_numpy_alone(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    zipfile.ZipFile(built[0]).extractall(tmp_path)
    code = USE.format(site=str(tmp_path), blocked=EXTRAS.split())
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_required_packages_are_these_two(built: tuple[Path, Path]) -> None:
    wheel = zipfile.ZipFile(built[0])
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    lines = wheel.read(name).decode().splitlines()
    needed = [
        line for line in lines if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]
    assert sorted(line.split()[1].split(">")[0] for line in needed) == ["numpy", "torch"]
