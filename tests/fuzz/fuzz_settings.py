"""Targets: YAML of runs, studies and released checkpoints, hostfiles, `--set`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fuzz_attacks as attacks
import fuzz_commands as commands
from fuzz_target import Files, Refused, Target

from megatron_patches.config import Config, ConfigError, compose, config_sha, dump
from megatron_patches.standalone.released import read_manifest
from megatron_patches.studies.plan import make_plan
from megatron_patches.studies.schema import load_study

ROOT = Path(__file__).resolve().parents[2]


def _shipped(*names: str) -> bytes:
    return b"\n".join((ROOT / "configs" / f"{name}.yml").read_bytes() for name in names)


def _runs() -> Sequence[Files]:
    tiny = _shipped("base/tiny", "method/kerple_log", "dataset/local_code")
    tiny += b"padded_vocab_size: 1024\n"  # no text needs to be prepared
    hosts = b"# two slots\nlocalhost slots=2\n"
    lines = b"seed=7\nsave=elsewhere\noptimizer.params.lr=1.0e-3\nposition_options={}\n"
    return [
        {"run.yml": tiny},
        {"run.yml": tiny + b"\nhostfile: in/hosts\n", "hosts": hosts},
        {"run.yml": tiny, "set.txt": lines},
    ]


def _dry_run(folder: Path) -> Any:
    """`deepy.py --dry-run`: composed, checked, described with its memory, nothing started."""
    changes = folder / "set.txt"
    text = changes.read_bytes().decode("utf-8", "surrogateescape") if changes.exists() else ""
    arguments = [word for line in text.split("\n") if line for word in ("--set", line)]
    run = folder / "run.yml"
    if run.exists():
        content = run.read_bytes()
        run.write_bytes(content.replace(b"in/hosts", str(folder / "hosts").encode()))
    deepy = commands.script("deepy")
    main = lambda: deepy.main(["--dry-run", *arguments, "train.py", str(run)])  # noqa: E731
    return commands.run(main)


def _round_trip(folder: Path) -> Any:
    """What is composed is written and composed again: the same configuration."""
    config = compose([folder / "run.yml"])
    again = folder / "again.yml"
    again.write_text(dump(config), encoding="utf-8")
    return config, compose([again])


def _same(result: tuple[Config, Config]) -> str | None:
    first, again = result
    return None if config_sha(first) == config_sha(again) else "its written form reads otherwise"


def _attacks_of_runs() -> dict[str, Files]:
    base = _runs()[0]
    found = attacks.with_file(base, "run.yml", attacks.yaml_attacks(base["run.yml"]))
    for name, line in (
        ("layers", b"num_layers: 1000000000000"),
        ("width", b"hidden_size: 1000000000000"),
        ("heads", b"num_attention_heads: 4611686018427387904"),
        ("iterations", b"train_iters: 4611686018427387904"),
    ):
        key = line.split(b":")[0]
        kept = [text for text in base["run.yml"].split(b"\n") if not text.startswith(key)]
        found[f"harmless-huge-{name}"] = {"run.yml": b"\n".join([*kept, line, b""])}
    for number, change in enumerate(
        (b"a=" + b"[" * 50_000, b"seed=&x [*x]", b"seed=!!python/name:os.system", b"=", b"seed",
         b"save=\x1b[2J", b"seed=" + b"9" * 5000, b"a." * 5000 + b"b=1")
    ):  # fmt: skip
        found[f"set-{number}"] = {**base, "set.txt": change}
    hosts = _runs()[1]
    for number, text in enumerate(
        (b"", b"localhost slots=" + b"9" * 5000 + b"\n", b"\xff\xfe", b"localhost slots=2\n" * 2,
         "localhost slots=\u0663\n".encode(), b"localhost slots=\xc2\xb2\n", b"a" * 70_000 + b" slots=1\n",
         b"-oProxyCommand=x slots=1\n", b"localhost slots=0\n")
    ):  # fmt: skip
        found[f"hosts-{number}"] = {**hosts, "hosts": text}
    return found


def _studies() -> Sequence[Files]:
    text = """base: tiny
methods: [alibi, kerple_log]
datasets: [local_code]
seeds: [1234]
train_lengths: [512]
overrides: {train_iters: 40, checkpoint_factor: 40}
factors:
  precision:
    exact: {position_precision: exact}
eval:
  lengths: [512, 1024]
  protocols: [nonoverlap]
  max_tokens: 4096
"""
    return [{"study.yml": text.encode()}]


def _planned(folder: Path) -> Any:
    plan = make_plan(load_study(folder / "study.yml"))
    return [(run.name, config_sha(run.config)) for run in plan.runs]


def _manifests() -> Sequence[Files]:
    return [{"manifest.yml": (ROOT / "checkpoints" / "manifest.yml").read_bytes()}]


def _listed(folder: Path) -> Any:
    found = read_manifest(folder / "manifest.yml")
    return {name: (entry.file_names(), len(entry.tensors())) for name, entry in found.items()}


def _attacks_of(name: str, made: Sequence[Files]) -> dict[str, Files]:
    return attacks.with_file(made[0], name, attacks.yaml_attacks(made[0][name]))


TARGETS = (
    Target(
        "run_command",
        "`deepy.py --dry-run`: YAML of runs, `--set`, hostfiles",
        _runs,
        _dry_run,
        (Refused,),
        judge=commands.controls,
        attacks=_attacks_of_runs,
        share=0.2,
    ),
    Target(
        "run_yaml",
        "YAML of runs, composed, written and composed again",
        lambda: _runs()[:1],
        _round_trip,
        (ConfigError,),
        judge=_same,
        share=0.3,
    ),
    Target(
        "study_yaml",
        "YAML of studies, planned and counted",
        _studies,
        _planned,
        (ConfigError,),
        attacks=lambda: _attacks_of("study.yml", _studies()),
        share=0.1,
    ),
    Target(
        "released_yaml",
        "the manifest of released checkpoints",
        _manifests,
        _listed,
        (ConfigError,),
        attacks=lambda: _attacks_of("manifest.yml", _manifests()),
        share=0.1,
    ),
)
