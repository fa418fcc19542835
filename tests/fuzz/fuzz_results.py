"""Targets: result rows and what tables, pages and figures make of them; logs of runs."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fuzz_attacks as attacks
import fuzz_commands as commands
from fuzz_target import Files, Refused, Target

from megatron_patches.analysis.jsonl import RowError
from megatron_patches.analysis.run_folder import failed_training_row, read_run_folder

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
sys.path.append(str(TESTS / "analysis"))
KINDS = ("kernels", "training", "retrieval")


def _lines(rows: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(dataclasses.asdict(row)).encode() + b"\n" for row in rows)


def _rows() -> bytes:
    import analysis_rows

    return _lines([row for row in analysis_rows.study() if row.eval_length < 2048])


def _others() -> Files:
    import analysis_rows
    import retrieval_row_cases

    rows = [row for row in retrieval_row_cases.study() if row.seed < 3]
    return {
        "kernels.jsonl": _lines([analysis_rows.kernel(head) for head in range(2)]),
        "training.jsonl": _lines([analysis_rows.training("alibi", seed) for seed in (1, 2)]),
        "retrieval.jsonl": _lines(rows),
    }


def _failed() -> bytes:
    failure = {
        **{"study": "s", "run": "r", "step": "train", "command": "python train.py a.yml"},
        **{"exit_code": 1, "message": "it failed", "log": "logs/r.log", "when": "2026-01-01"},
        **{"method": "rotary", "dataset": "books", "seed": 1, "train_length": 512},
        "config_sha": "c",
    }
    return json.dumps(failure).encode() + b"\n"


def _tables() -> Sequence[Files]:
    published = (ROOT / "results" / "published.csv").read_bytes().split(b"\n")
    some = b"\n".join(line for line in published if b"Table 3" in line or b"paper," in line)
    return [{"rows.jsonl": _rows(), "failed.jsonl": _failed(), "published.csv": some + b"\n"}]


def _table(folder: Path, form: str) -> str:
    main = commands.script("tables").main
    rows, common = str(folder / "rows.jsonl"), ("--format", form)
    published = ("--published", str(folder / "published.csv"))
    texts = [commands.run(main, rows, *common, *published)]
    extra = ("--table", "relative", "--published-dataset", "github")
    texts.append(commands.run(main, rows, *extra, *common, *published))
    texts.append(commands.run(main, rows, "--table", "differences", *common))
    return "\n".join(texts)


def _of_models(folder: Path) -> str:
    main = commands.script("tables").main
    training = commands.run(main, str(folder / "training.jsonl"), "--table", "training")
    return training + commands.run(main, str(folder / "kernels.jsonl"), "--table", "reach")


def _report(folder: Path) -> str:
    page = folder / "report.html"
    given = [str(folder / "rows.jsonl")]
    for kind in KINDS:
        given += [f"--{kind}", str(folder / f"{kind}.jsonl")]
    printed = commands.run(commands.script("report").main, *given, "--output", str(page))
    return printed + page.read_text(encoding="utf-8")


def _figures(folder: Path) -> list[str]:
    out = folder / "out"
    out.mkdir()
    main = commands.script("figures").main
    commands.run(main, str(folder / "rows.jsonl"), "--output", str(out))
    drawings = sorted(out.rglob("*.svg"))
    return [path.read_text(encoding="utf-8") for path in drawings]


def _attacks_of_rows(base: Files, name: str) -> dict[str, Files]:
    """Names that are markup in every field of text, and lines that are no rows."""
    found = {}
    lines = base[name].split(b"\n")
    for key, value in json.loads(lines[0]).items():
        if isinstance(value, str) and key not in ("protocol", "status", "split", "task", "source"):
            for number, text in enumerate(("<fuzzed onload=alert(1)>", "</script><fuzzed>",
                                           "\\input{fuzzed}|`", '" onfuzzed="x')):  # fmt: skip
                marked = [
                    json.dumps({**json.loads(line), key: text}).encode() for line in lines[:-1]
                ]
                found[f"harmless-{key}-{number}"] = {**base, name: b"\n".join([*marked, b""])}
    found["deep"] = {**base, name: attacks.deep_json() + b"\n"}
    found["long-number"] = {**base, name: lines[0].replace(b"512", b"5" * 100_000, 1) + b"\n"}
    found["other-encoding"] = {**base, name: base[name].decode().encode("utf-16")}
    return found


# ---- logs of runs ----------------------------------------------------------------------------


def _run_folders() -> Sequence[Files]:
    config = "pos_emb: alibi\nseq_length: 8\ntrain_iters: 3\nseed: 1\ndataset: toy\n"
    config += "train_micro_batch_size_per_gpu: 1\nnum_layers: 1\nhidden_size: 8\n"
    run = {"config_sha": "c", "git_sha": "g", "data": "d", "tokenizer": "t", "engine": "standalone"}
    run |= {"parameters": 9, "global_batch": 1, "processes": 1}
    parameter = {f"position/bias_p_{key}": 1.0 for key in ("mean", "std", "min", "max")}
    steps = [
        {"iteration": n, "lm_loss": 5.0 - n, "learning_rate": 0.1, "tokens_per_second": 9.0,
         "tokens": 8 * n, "seconds": 1.0 * n, **parameter}
        for n in (1, 2, 3)
    ]  # fmt: skip
    log = b"".join(json.dumps(step).encode() + b"\n" for step in steps)
    return [{"config.yml": config.encode(), "run.json": json.dumps(run).encode(), "log.jsonl": log}]


def _run_folder(folder: Path) -> Any:
    identity = {"method": "alibi", "dataset": "toy", "seed": 1, "train_length": 8}
    failed_training_row(folder, {**identity, "config_sha": "c"}, "failed")  # never raises
    return read_run_folder(folder)


def _attacks_of_logs() -> dict[str, Files]:
    (base,) = _run_folders()
    found = attacks.with_file(base, "config.yml", attacks.yaml_attacks(base["config.yml"]))
    found["log-deep"] = {**base, "log.jsonl": attacks.deep_json() + b"\n"}
    found["run-deep"] = {**base, "run.json": attacks.deep_json()}
    return found


COMMAND = (Refused,)
TARGETS = (
    Target(
        "tables",
        "`rows.jsonl`, `failed.jsonl`, `published.csv` in Markdown",
        _tables,
        partial(_table, form="markdown"),
        COMMAND,
        judge=commands.markdown,
        attacks=lambda: _attacks_of_rows(_tables()[0], "rows.jsonl"),
        share=0.2,
    ),
    Target(
        "tables_latex",
        "the same in LaTeX",
        _tables,
        partial(_table, form="latex"),
        COMMAND,
        judge=commands.latex,
        attacks=lambda: _attacks_of_rows(_tables()[0], "rows.jsonl"),
        share=0.1,
    ),
    Target(
        "tables_models",
        "`training.jsonl` and `kernels.jsonl` in tables",
        lambda: [{k: v for k, v in _others().items() if k != "retrieval.jsonl"}],
        _of_models,
        COMMAND,
        judge=commands.markdown,
        share=0.3,
    ),
    Target(
        "report",
        "all kinds of rows in `report.html`: no element, attribute or link of theirs",
        lambda: [{"rows.jsonl": _rows(), "failed.jsonl": _failed(), **_others()}],
        _report,
        COMMAND,
        judge=commands.page,
        attacks=lambda: _attacks_of_rows(
            {"rows.jsonl": _rows(), "failed.jsonl": _failed(), **_others()}, "rows.jsonl"
        ),
        share=0.05,
    ),
    Target(
        "figures",
        "rows in figures: sound SVG without elements of theirs",
        lambda: [{"rows.jsonl": _rows()}],
        _figures,
        COMMAND,
        judge=commands.drawings,
        share=0.01,
    ),
    Target(
        "run_folder",
        "`config.yml`, `run.json` and `log.jsonl` of trained runs",
        _run_folders,
        _run_folder,
        (RowError,),
        attacks=_attacks_of_logs,
    ),
)
