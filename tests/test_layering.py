"""The arrows of the house, read from the imports: who may import whom, and what stays optional."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Part -> the parts of ours that it may import (itself always).
ALLOWED = {
    "megatron_patches.positions": set(),
    "megatron_patches.attention": {"megatron_patches.positions"},
    "megatron_patches.config": {"megatron_patches.positions"},
    "megatron_patches.analysis": set(),
    "megatron_patches.studies": {
        "megatron_patches.positions",
        "megatron_patches.config",
        "megatron_patches.analysis",
        "data_prep",  # which text finished rows are of, and how much of it there is
    },
    "data_prep": set(),
    "megatron_patches.training": {"megatron_patches.positions"},
    "megatron_patches.standalone": {
        "megatron_patches.positions",
        "megatron_patches.attention",
        "megatron_patches.config",
        "megatron_patches.training",
        "megatron_patches.analysis",
        "data_prep",
    },
    # A study (only `quarter.prepare` needs one) on a bare machine, with the standalone engine's parts.
    "megatron_patches.quarter": {
        "megatron_patches.positions",
        "megatron_patches.attention",
        "megatron_patches.config",
        "megatron_patches.training",
        "megatron_patches.analysis",
        "megatron_patches.studies",
        "megatron_patches.standalone",
        "data_prep",
    },
    "megatron_patches.neox": {
        "megatron_patches.positions",
        "megatron_patches.attention",
        "megatron_patches.config",
        "megatron_patches.training",
    },
    # Breaks runs of the standalone engine from outside; reads their files with its loader.
    "megatron_patches.soak": {"megatron_patches.standalone", "data_prep"},
    # Trained models to transformers and back; position methods in transformers' own models.
    "megatron_patches.hf": {
        "megatron_patches.positions",
        "megatron_patches.attention",
        "megatron_patches.config",
        "megatron_patches.standalone",
        "data_prep",
    },
}
# Goes along with exported weights, where nothing of ours is installed; `hf` loads it inside functions.
CARRIED = ROOT / "megatron_patches" / "hf" / "modeling_gpt_positions.py"
OPTIONAL = {"triton", "wandb", "megatron", "pyarrow", "transformers", "lm_eval", "datasets"}


def _files(part: str) -> list[Path]:
    return sorted((ROOT / part.replace(".", "/")).rglob("*.py"))


def _imports(tree: ast.AST, package: str) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], base]
                )
            # `from megatron_patches import positions` imports a part of ours as well
            found += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return found


def _part_of(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] == "megatron_patches" and len(parts) > 1:
        return ".".join(parts[:2])
    return parts[0] if parts[0] in ("data_prep", "scripts", "deepy") else None


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_arrows_point_one_way(part: str) -> None:
    files = _files(part)
    assert files, f"{part} has no modules"
    wrong = []
    for file in files:
        package = ".".join(file.relative_to(ROOT).parent.parts)
        for name, line in _imports(ast.parse(file.read_text(encoding="utf-8")), package):
            other = _part_of(name)
            if other is not None and other != part and other not in ALLOWED[part]:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def _as_it_runs(file: Path) -> ast.Module:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    return tree


def test_modules_of_the_analysis_import_in_no_circle() -> None:
    """What is imported for the type checker alone ties nothing when the code runs."""
    part = "megatron_patches.analysis"
    modules = {file.stem: file for file in _files(part)}
    graph = {
        name: {
            found.removeprefix(f"{part}.").split(".")[0]
            for found, _ in _imports(_as_it_runs(file), part)
            if found.startswith(f"{part}.")
        }
        & modules.keys()
        for name, file in modules.items()
    }
    assert "jsonl" in graph["validate"] and "validate" in graph["rows"]
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_every_package_has_a_rule() -> None:
    packages = {
        f"megatron_patches.{p.parent.name}" for p in ROOT.glob("megatron_patches/*/__init__.py")
    }
    assert packages | {"data_prep"} == set(ALLOWED)


def test_optional_packages_load_inside_functions() -> None:
    wrong = []
    for part in ALLOWED:
        for file in _files(part):
            if file == CARRIED:
                continue
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                for name, line in (
                    _imports(node, "") if isinstance(node, ast.Import | ast.ImportFrom) else []
                ):
                    if name.split(".")[0] in OPTIONAL:
                        wrong.append(
                            f"{file.relative_to(ROOT)}:{line} imports {name} at import time"
                        )
    assert not wrong, "\n".join(wrong)


def test_the_carried_file_needs_torch_and_transformers_alone() -> None:
    tree = ast.parse(CARRIED.read_text(encoding="utf-8"))
    names = {name.split(".")[0] for name, _ in _imports(tree, "megatron_patches.hf")}
    assert names - set(sys.stdlib_module_names) == {"torch", "transformers"}


def test_no_consumer_names_a_method() -> None:
    """Only `positions/` and `configs/` know the methods; elsewhere a name in code is an if in waiting."""
    from megatron_patches.positions import aliases, names

    known = {*names(), *aliases()} - {"none"}  # "none" is an English word
    wrong = []
    for part in (
        "megatron_patches.attention",
        "megatron_patches.config",
        "megatron_patches.training",
        "megatron_patches.standalone",
        "megatron_patches.neox",
        "megatron_patches.studies",
        "megatron_patches.quarter",
        "megatron_patches.hf",
        "megatron_patches.soak",
    ):
        for file in _files(part):
            if file == CARRIED:
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Compare | ast.Match):
                    for constant in ast.walk(node):
                        if isinstance(constant, ast.Constant) and constant.value in known:
                            wrong.append(
                                f"{file.relative_to(ROOT)}:{node.lineno} compares with {constant.value!r}"
                            )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        (
            "megatron_patches.attention",
            "deepspeed pydantic yaml tokenizers zstandard matplotlib scipy",
        ),
        ("megatron_patches.config", "torch deepspeed"),
        ("megatron_patches.analysis.rows", "torch deepspeed matplotlib scipy"),
        ("megatron_patches.studies", "torch deepspeed matplotlib scipy"),
        ("data_prep.indexed", "torch deepspeed tokenizers tiktoken"),
        ("megatron_patches.standalone", "torch deepspeed"),
        (
            "megatron_patches.hf.foreign_models",
            "transformers deepspeed pydantic yaml tokenizers zstandard matplotlib scipy",
        ),
        (
            "megatron_patches.quarter.run",
            "deepspeed pydantic yaml scipy tokenizers matplotlib triton wandb",
        ),
    ],
)
def test_imports_without(module: str, blocked: str) -> None:
    """A fresh interpreter in which the named packages cannot be imported still loads the module."""
    code = (
        f"import sys\nfor name in {blocked.split()!r}: sys.modules[name] = None\nimport {module}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
