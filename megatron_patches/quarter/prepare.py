"""From a study to a folder that a bare machine can run; needs the full environment.

The study file means the same here as for `scripts/sweep.py`: methods, text, seeds, lengths and the
composed configuration of each run. What only DeepSpeed's engine has (ZeRO, checkpoints) is left out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.indexed import IndexedDataset
from megatron_patches.config import Config, batch_arithmetic
from megatron_patches.quarter.evaluation import HeldOut
from megatron_patches.quarter.plan import (
    MAX_BYTES,
    PLAN,
    Evaluation,
    Optimizer,
    Params,
    PlanError,
    PlannedRun,
    QuarterPlan,
    Text,
    Training,
    read_plan,
    write_plan,
)
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.describe import parameter_count
from megatron_patches.standalone.fingerprints import (
    git_sha,
    tokenizer_fingerprint,
)
from megatron_patches.standalone.text_bytes import byte_counts, scored_bytes
from megatron_patches.studies import Run, Study, load_study, make_plan

PROTOCOLS = ("nonoverlap", "position")
ENDINGS = (".bin", ".idx", ".json")
# As `standalone.evaluate` reports them: what makes a run more than the method's name says.
VARIANT = (
    *("position_options", "position_init", "position_precision", "position_sharing"),
    *("position_weight_decay", "sliding_window_width"),
)


def prepare(
    study_file: Path, output: Path, say: Callable[[str], None], max_bytes: int = MAX_BYTES
) -> QuarterPlan:
    """Write `output`: plan.json and `train` and `valid` as `.bin`, `.idx` and `.json`.

    To be called in the repository's root, from which configurations name their data. A text of the
    machine's own that is not there yet is prepared. Raises ConfigError or PlanError for a study that
    cannot be run this way, DataError for unusable data; `output` is replaced as a whole or not touched.
    """
    study = load_study(study_file)
    _check_study(study)
    if output.exists():
        _check_replaceable(output)
    runs = make_plan(study).runs
    config = runs[0].config
    prefixes = {part: _prefix(study, config, part) for part in ("train", "valid")}
    _make_text(study.datasets[0], prefixes, say)
    files = [Path(f"{prefix}{end}") for prefix in prefixes.values() for end in ENDINGS]
    size = sum(file.stat().st_size for file in files)
    if size > max_bytes:
        raise PlanError(
            f"{', '.join(prefixes.values())}: {size / 1e6:.1f} MB, more than the "
            f"{max_bytes / 1e6:.0f} MB that a bare machine is asked to take: prepare less text"
        )
    plan = _plan(study, runs, prefixes)
    if plan.git_sha.endswith("-dirty"):
        say(f"warning: uncommitted changes; rows of a machine without git will name {plan.git_sha}")
    temporary = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for part, prefix in prefixes.items():
        for end in ENDINGS:
            shutil.copyfile(f"{prefix}{end}", temporary / f"{part}{end}")
    write_plan(temporary, plan)
    read_plan(temporary)
    if output.exists():
        shutil.rmtree(output)
    temporary.rename(output)
    say(f"{output}: {size / 1e6:.1f} MB, {plan.train.tokens:,} tokens to train on, "
        f"{plan.valid.tokens:,} held out, {len(runs)} runs")  # fmt: skip
    return plan


def _check_study(study: Study) -> None:
    for key in ("datasets", "train_lengths"):
        if len(getattr(study, key)) != 1:
            raise PlanError(f"{study.name}: one entry of `{key}` fits into a quarter hour")
    others = [p for p in study.eval.protocols if p not in PROTOCOLS]
    if others or study.eval.splits != ["valid"]:
        raise PlanError(
            f"{study.name}: only {' and '.join(PROTOCOLS)} on the split valid can be scored here"
        )


def _check_replaceable(output: Path) -> None:
    if not (output / PLAN).is_file():
        raise PlanError(f"{output} exists and is no folder of this command: name another --output")


def _prefix(study: Study, config: Config, part: str) -> str:
    paths = getattr(config, f"{part}_data_paths")
    if not paths or len(paths) != 1:
        raise PlanError(f"{study.name}: `{part}_data_paths` must name one prefix")
    return str(paths[0])


def _make_text(name: str, prefixes: dict[str, str], say: Callable[[str], None]) -> None:
    """Prepare a corpus of the machine's own where its files are missing."""
    missing = [p for p in prefixes.values() if not Path(f"{p}.idx").is_file()]
    if not missing:
        return
    from data_prep import corpora
    from data_prep.corpora import LocalCorpus
    from data_prep.prepare import prepare as prepare_text

    folder = Path("data") / name
    own = name in corpora.names() and isinstance(corpora.get(name), LocalCorpus)
    if not own or any(Path(p).parent != folder for p in missing):
        raise PlanError(f"{missing[0]} is missing: python -m data_prep {name} --help")
    prepare_text(name, folder, say=say)


def _plan(study: Study, runs: tuple[Run, ...], prefixes: dict[str, str]) -> QuarterPlan:
    train, valid = (IndexedDataset(prefixes[part]) for part in ("train", "valid"))
    lengths, limit = study.eval.lengths, study.eval.max_tokens or len(valid.tokens)
    if len(valid.tokens) <= max(lengths):
        raise PlanError(
            f"{prefixes['valid']} has {len(valid.tokens)} tokens, a window of {max(lengths)} needs "
            "one more: prepare more held-out text"
        )
    evaluation = Evaluation(tuple(lengths), tuple(study.eval.protocols), limit)
    return QuarterPlan(
        study=study.name,
        git_sha=git_sha(),
        tokenizer=tokenizer_fingerprint([train, valid]),
        text_bytes=_text_bytes(valid, evaluation),
        train=_text(train),
        valid=_text(valid),
        evaluation=evaluation,
        runs=tuple(_planned(run) for run in runs),
    )


def _text_bytes(valid: IndexedDataset, evaluation: Evaluation) -> tuple[int, ...]:
    counts = byte_counts([valid])
    if counts is None:
        return ()
    text = HeldOut.of(valid.tokens, evaluation)
    return tuple(
        scored_bytes(text.tokens, text.windows.windows(n), counts) for n in evaluation.lengths
    )


def _text(dataset: IndexedDataset) -> Text:
    return Text(dataset.fingerprint, len(dataset.tokens), len(dataset))


def _planned(run: Run) -> PlannedRun:
    config = run.config
    shape = shape_of(config)
    return PlannedRun(
        run.name, run.sha, _variant(config), parameter_count(shape), shape, _training(config)
    )


def _variant(config: Config) -> dict[str, Any]:
    defaults = type(config).model_fields
    return {
        key: value
        for key in VARIANT
        if (value := getattr(config, key)) != defaults[key].get_default(call_default_factory=True)
    }


def _training(config: Config) -> Training:
    precision = config.torch_dtype_name
    if precision not in ("bfloat16", "float32"):
        raise PlanError(f"{config.place('precision')} {precision}: bfloat16 or fp32 is wanted here")
    params = config.optimizer.params
    return Training(
        pos_emb=config.pos_emb,
        dataset=config.dataset_name,
        seed=config.seed,
        seq_length=config.seq_length,
        batch=batch_arithmetic(config, 1).global_,
        train_iters=config.train_iters,
        lr_decay_iters=config.lr_decay_iters,
        lr_decay_style=config.lr_decay_style,
        min_lr=float(config.min_lr),
        warmup=float(config.warmup),
        weight_decay=float(config.weight_decay),
        position_weight_decay=bool(config.position_weight_decay),
        gradient_clipping=float(config.gradient_clipping),
        log_interval=config.log_interval,
        precision=precision,
        optimizer=Optimizer(Params(params.lr, tuple(params.betas), params.eps)),
    )
