"""Write the checkpoint of a run in a form that GPT-NeoX continues from, or as a Hugging Face folder.

The source is a run of this suite or of GPT-NeoX, or a Hugging Face folder, which becomes a run.

Examples:
    python checkpoints/convert.py checkpoints/alibi-local_code-1234 converted --layout layers
    python checkpoints/convert.py checkpoints/alibi-local_code-1234 alibi-hf --to huggingface
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(ROOT))

from megatron_patches.config import Config, ConfigError, compose  # noqa: E402
from megatron_patches.standalone.arguments import guarded, parser, whole  # noqa: E402

if TYPE_CHECKING:
    from megatron_patches.standalone.model import GPT
    from megatron_patches.standalone.moments import Moments


def make_parser() -> argparse.ArgumentParser:
    made = parser(
        "Write the checkpoint of a run, this suite's or GPT-NeoX's, in a form that GPT-NeoX loads, or as a "
        "Hugging Face folder; a Hugging Face folder becomes a run.",
        "python checkpoints/convert.py checkpoints/alibi-local_code-1234 converted --layout layers\n"
        "  python checkpoints/convert.py checkpoints/alibi-local_code-1234 alibi-hf --to huggingface",
    )
    made.add_argument(
        "source",
        type=Path,
        help="run folder or global_stepN folder of either engine, or a Hugging Face folder",
    )
    made.add_argument("destination", type=Path, help="folder to write; made if missing")
    made.add_argument(
        "--to",
        choices=["neox", "huggingface"],
        default="neox",
        help="neox: a run, which this suite and GPT-NeoX read (default); huggingface: a new folder for "
        "AutoModelForCausalLM",
    )
    made.add_argument(
        "--tokenizer", metavar="PATH", help="for huggingface; default: the run's `vocab_file`"
    )
    made.add_argument(
        "--no-tokenizer", action="store_true", help="for huggingface: the model alone"
    )
    made.add_argument(
        "--config",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="YAML files, joined, where SOURCE holds none, or to change how NeoX runs",
    )
    made.add_argument(
        "--layout",
        choices=["single", "layers"],
        default="single",
        help="single: one file, for pipe_parallel_size 0 (default); layers: one file a layer, for 1 "
        "and above",
    )
    made.add_argument(
        "--tensor-parallel", type=whole(1), default=1, metavar="N", help="shards (default 1)"
    )
    made.add_argument(
        "--dtype", choices=["fp32", "bfloat16", "fp16"], help="of the weights; default: as stored"
    )
    made.add_argument(
        "--fresh-optimizer",
        action="store_true",
        help="leave Adam's moments out, keep the iteration",
    )
    return made


def convert(options: argparse.Namespace) -> int:
    from megatron_patches.hf.reading import is_hugging_face

    foreign = is_hugging_face(options.source)
    if options.to == "huggingface":
        return carry_away(options, foreign)
    if options.tokenizer or options.no_tokenizer:
        raise ConfigError("--tokenizer and --no-tokenizer go with --to huggingface")
    return bring_home(options) if foreign else for_neox(options)


def carry_away(options: argparse.Namespace, foreign: bool) -> int:
    """A run as a Hugging Face folder."""
    from megatron_patches.hf.carrying import carry

    if foreign:
        raise ConfigError(f"{options.source} is a Hugging Face folder already")
    neox_alone = {
        "--layout": options.layout != "single",
        "--tensor-parallel": options.tensor_parallel != 1,
        "--dtype": options.dtype is not None,
        "--fresh-optimizer": options.fresh_optimizer,
    }
    if any(neox_alone.values()):
        wrong = ", ".join(name for name, given in neox_alone.items() if given)
        raise ConfigError(f"{wrong}: of no use with --to huggingface, whose files are of one kind")
    checks = carry(
        options.source,
        options.destination,
        config=compose(options.config) if options.config else None,
        tokenizer=options.tokenizer,
        with_tokenizer=not options.no_tokenizer,
    )
    print("\n".join([f"wrote {options.destination}", *checks]))
    return 0


def bring_home(options: argparse.Namespace) -> int:
    """A Hugging Face folder as a run, which `load_model`, eval.py and generate.py read."""
    from megatron_patches.hf.reading import read_model, run_record, tokenizer_file
    from megatron_patches.standalone import export
    from megatron_patches.standalone.provenance import json_bytes

    if options.config:
        raise ConfigError("--config: a Hugging Face folder has its own configuration")
    model, config = read_model(options.source)
    words = tokenizer_file(options.source)
    if words is not None:
        copied = options.destination.resolve() / words.name
        keys = {"tokenizer_type": "HFTokenizer", "vocab_file": str(copied)}
        config = config.model_copy(update=keys)
    form = export.Form(
        options.layout, options.tensor_parallel, options.dtype or config.effective_precision
    )
    beside = {"run.json": json_bytes(run_record(options.source, model))}
    if words is not None:
        beside[words.name] = words.read_bytes()
    target = export.export(
        model, options.destination, step=0, config=config, form=form, beside=beside
    )
    print(f"wrote {target}: {config.pos_emb}, {model.parameter_count():,} parameters, {form.dtype}")
    return 0


def for_neox(options: argparse.Namespace) -> int:
    """A run in the form that GPT-NeoX continues from."""
    from megatron_patches.standalone import export
    from megatron_patches.standalone.checkpoint import (
        load_model,
        read_config,
        step_folder,
        step_number,
    )
    from megatron_patches.standalone.provenance import json_bytes

    given = compose(options.config) if options.config else None
    config = read_config(options.source, given)
    # Found once: a run that still trains may name a newer step while this one is read.
    folder = step_folder(options.source)
    model = load_model(folder, config=config)
    stored = model.get_parameter("sequential.0.word_embeddings.weight").dtype
    dtype = options.dtype or {kind: name for name, kind in export.DTYPES.items()}.get(stored)
    if dtype is None:
        raise ConfigError(f"{options.source} holds {stored} weights: choose --dtype")
    form = export.Form(options.layout, options.tensor_parallel, dtype)
    written = export.neox_config(config, model, form, options.destination)
    moments, adam = _moments(options, folder, model, export.continues(config, form))
    record = origin(options.source)
    target = export.export(
        model,
        options.destination,
        step=step_number(folder),
        config=config,
        form=form,
        moments=moments,
        beside={"run.json": json_bytes(record)} if record else None,
    )
    print(
        f"wrote {target}: {config.pos_emb}, {model.parameter_count():,} parameters, {form.layout}, "
        f"tensor parallel {form.tensor_parallel}, {dtype}"
    )
    for line in (adam, *_notes(config, written)):
        print(line)
    return 0


def origin(source: Path) -> dict[str, Any]:
    """What the converted folder says of its training: text, tokenizer, engine; nothing if it is unknown."""
    from megatron_patches.standalone.provenance import read_run

    keys = ("config_sha", "git_sha", "data", "tokenizer", "engine", "parameters", "position")
    told = read_run(source)
    found = {key: told[key] for key in keys if key in told}
    return {**found, "converted_to": "neox"} if found else {}


def _moments(
    options: argparse.Namespace, folder: Path, model: GPT, continues: bool
) -> tuple[Moments | None, str]:
    """Adam's moments, where NeoX will look for them, and a line that says what became of them."""
    from megatron_patches.standalone.moments import NoMoments, read_moments

    if options.fresh_optimizer:
        return None, "Adam starts fresh, as asked"
    if not continues:
        return None, "Adam starts fresh: moments are converted for fp32 at ZeRO 0 only"
    try:
        return read_moments(folder, model), "Adam continues with its moments"
    except NoMoments as error:
        return None, f"Adam starts fresh: {error}"


def _notes(config: Config, written: Config) -> list[str]:
    """What the user must know of the written configuration."""
    found = []
    if written.finetune:
        found.append(
            "NeoX starts from these weights at iteration 0: config.yml sets `finetune: true`, because "
            "in half precision and at ZeRO 1 to 3 the optimizer stands in files that are not "
            "written; fp32 at ZeRO 0 keeps the iteration"
        )
    key = "make_vocab_size_divisible_by"
    if getattr(written, key) != getattr(config, key):
        found.append(
            f"config.yml sets `{key}: {getattr(written, key)}`, with which NeoX pads the vocabulary to "
            "the rows stored here"
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    return guarded(lambda: convert(options), options.debug)


if __name__ == "__main__":
    sys.exit(main())
