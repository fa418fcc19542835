"""The command lines of the workers that deepy.py starts."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.errors import DataError
from megatron_patches.config import Config, ConfigError, compose
from megatron_patches.standalone.arguments import (
    FAILED,
    add_config_arguments,
    add_device_argument,
    add_position_argument,
    device_of,
    guarded,
    number,
    parser,
    position_options_of,
    whole,
    window_argument,
)
from megatron_patches.standalone.windows import PROTOCOLS

# Idle OpenMP threads that spin take the core from whoever has work: on a busy machine small models
# ran ten times slower. Read when torch is imported, which happens below, inside the commands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def train_main(arguments: Sequence[str] | None = None) -> int:
    made = parser(
        "Train one process of a run (deepy.py, torchrun or srun start several).",
        "python train.py configs/base/tiny.yml configs/method/alibi.yml configs/dataset/local_code.yml",
    )
    add_config_arguments(made)
    options = made.parse_args(arguments)

    def run() -> int:
        from megatron_patches.standalone import runtime
        from megatron_patches.standalone.signals import Signals
        from megatron_patches.standalone.train import train

        def work() -> int:
            train(compose(options.config, options.set), signals)
            return 0

        try:
            # A launcher ends the other ranks a second after one has died: what went wrong is said
            # before SIGTERM can end this one, and leaving the group may wait for the dead.
            with Signals() as signals:
                return guarded(work, options.debug)
        finally:
            runtime.finish()

    return guarded(run, options.debug)


def eval_main(arguments: Sequence[str] | None = None) -> int:
    made = parser(
        "Score a trained model at many lengths; one JSON row a length.",
        "python eval.py --checkpoint checkpoints/kerple_log-local_code-1234 --lengths 512 1024 "
        "--output rows.jsonl",
    )
    add_config_arguments(made, "*")
    made.add_argument("--checkpoint", type=Path, help="run folder or global_stepN folder")
    made.add_argument("--lengths", type=whole(1), nargs="+", help="tokens; default: `eval_lengths`")
    made.add_argument("--protocol", choices=PROTOCOLS, help="default: `eval_protocol`")
    made.add_argument("--split", choices=["valid", "test"])
    made.add_argument("--stride", type=whole(1), help="tokens, for sliding (and last)")
    made.add_argument(
        "--last-k", type=whole(1), help="tokens scored at the end of a window, for last"
    )
    made.add_argument(
        "--window",
        type=window_argument,
        metavar="W",
        help="the same weights with sliding_window_width W: a query sees itself and W keys before; "
        "blockwise:B: its own block of B tokens and the one before",
    )
    add_position_argument(made)
    made.add_argument(
        "--paper-windows", type=whole(1), metavar="N", help="windows a length, for paper: 320"
    )
    made.add_argument("--batch-size", type=whole(1), help="windows at a time; default: 4096 tokens")
    made.add_argument(
        "--max-tokens", type=whole(2), help="use this much of the split; default: all"
    )
    made.add_argument("--attention", help="implementation of attention; default: auto")
    made.add_argument(
        "--attention-eps",
        type=number(0, 1),
        default=0.0,
        help="skip far keys that weigh less than this together (0: exact)",
    )
    add_device_argument(made)
    made.add_argument("--output", type=Path, help="append the rows to this .jsonl file")
    made.add_argument(
        "--resume", action="store_true", help="skip cells that --output already holds"
    )
    kernels = made.add_mutually_exclusive_group()
    kernels.add_argument(
        "--kernels", type=Path, help="append the learned kernels to this .jsonl file"
    )
    kernels.add_argument(
        "--only-kernels",
        type=Path,
        metavar="FILE",
        help="write the learned kernels as this .jsonl file and score nothing",
    )
    options = made.parse_args(arguments)
    if not options.config and options.checkpoint is None:
        made.error("name a --checkpoint, or the configuration of a run")
    return guarded(lambda: _evaluate(options), options.debug)


def _evaluate(options: argparse.Namespace) -> int:
    from megatron_patches.attention import IMPLEMENTATIONS
    from megatron_patches.standalone.checkpoint import named_run, read_config
    from megatron_patches.standalone.evaluate import Evaluation, Request

    config = compose(options.config, options.set) if options.config else None
    if config is None and options.set:
        raise ConfigError("--set needs the configuration files that it changes")
    path = named_run(options.checkpoint, config)
    stored = read_config(path, config)
    if options.only_kernels is not None:
        return _write_kernels(options, path, stored)
    implementation = options.attention or (config.attention_impl if config else "auto")
    if implementation not in ("auto", *IMPLEMENTATIONS):
        raise ConfigError(
            f"--attention {implementation}: choose auto, {', '.join(IMPLEMENTATIONS)}"
        )
    try:
        request = Request(**_request(options, config), max_tokens=options.max_tokens)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if options.kernels is not None and request.position_options:
        raise ConfigError("--kernels writes what was learned: leave out other position options")
    evaluation = Evaluation(
        path,
        request,
        config=config,
        attention=implementation,
        attention_eps=options.attention_eps,
        device=device_of(options.device, stored),
    )
    output = options.output
    if output is None and options.checkpoint is None:
        output = Path(path) / "evaluation.jsonl"
    print(evaluation.expected_memory(), flush=True)
    done = evaluation.finished(output) if options.resume and output is not None else set()
    rows = evaluation.run(output, lambda text: print(text, flush=True), skip=done)
    if output is not None:
        print(f"{len(rows)} rows appended to {output}")
    if options.kernels is not None:
        from megatron_patches.analysis.rows import append_kernels
        from megatron_patches.standalone.kernels import run_kernels

        heads = run_kernels(evaluation.model, evaluation.config, evaluation.step, path)
        append_kernels(options.kernels, heads)
    # A method that cannot read a length has answered the question; a failed cell has not.
    return FAILED if any(row.status == "failed" for row in rows) else 0


def _write_kernels(options: argparse.Namespace, path: str | Path, config: Config) -> int:
    from megatron_patches.standalone import checkpoint
    from megatron_patches.standalone.kernels import run_kernels, write_kernels

    scoring = (
        *("output", "lengths", "protocol", "split", "stride", "last_k", "window", "max_tokens"),
        *("paper_windows", "batch_size", "position_option"),
    )
    given = [name for name in scoring if getattr(options, name)]
    if given:
        raise ConfigError(
            f"--only-kernels scores nothing: leave out --{given[0].replace('_', '-')}"
        )
    folder = checkpoint.step_folder(
        path
    )  # once: a run that still trains may name another meanwhile
    model = checkpoint.load_model(folder, config=config, device=device_of(options.device, config))
    rows = run_kernels(model, config, checkpoint.step_number(folder), path)
    write_kernels(options.only_kernels, rows)
    print(f"{len(rows)} kernels written to {options.only_kernels}")
    return 0


def _request(options: argparse.Namespace, config: Config | None) -> dict[str, Any]:
    """Command line first, then the configuration, then the stored run's `eval_*` keys."""
    from megatron_patches.standalone.checkpoint import read_config

    stored = config or read_config(options.checkpoint, None)
    protocol = options.protocol or stored.eval_protocol
    asked = {
        "lengths": tuple(options.lengths or stored.eval_lengths),
        "protocol": protocol,
        "split": options.split or stored.eval_split,
        "stride": options.stride,
        "last_k": options.last_k,
        "batch_size": options.batch_size,
        "window": options.window or stored.scoring_window,
        "position_options": position_options_of(options.position_option)
        or stored.eval_position_options,
        "paper_windows": options.paper_windows,
    }
    if options.protocol in (None, stored.eval_protocol):
        # An option is at least 1, so `or` means "not given".
        asked["stride"] = options.stride or stored.eval_stride
        asked["last_k"] = options.last_k or stored.eval_last_k
        asked["paper_windows"] = options.paper_windows or stored.eval_paper_windows
    if asked["batch_size"] is None and "eval_batch_size" in stored.model_fields_set:
        asked["batch_size"] = stored.eval_batch_size
    return asked


def generate_main(arguments: Sequence[str] | None = None) -> int:
    made = parser(
        "Continue texts with a trained model: one as plain text, several as JSON lines.",
        "python generate.py --checkpoint checkpoints/kerple_log-local_code-1234 "
        "--prompt 'def main(' --tokens 64",
    )
    add_config_arguments(made, "*")
    made.add_argument("--checkpoint", type=Path, help="run folder or global_stepN folder")
    made.add_argument(
        "--prompt",
        action="append",
        help="text to continue, may be repeated; default: standard input",
    )
    made.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help='JSON lines with a "text" to continue'
    )
    made.add_argument("--tokens", type=whole(1), default=64, help="how many to add at most")
    made.add_argument("--temperature", type=number(0), default=0.0, help="0: always the likeliest")
    made.add_argument("--top-k", type=whole(1))
    made.add_argument("--seed", type=whole(0, 2**64), default=0)
    add_position_argument(made)
    add_device_argument(made)
    options = made.parse_args(arguments)
    if not options.config and options.checkpoint is None:
        made.error("name a --checkpoint, or the configuration of a run")
    return guarded(lambda: _generate(options), options.debug)


def _generate(options: argparse.Namespace) -> int:
    from data_prep.tokenizing import load_tokenizer
    from megatron_patches.standalone import provenance
    from megatron_patches.standalone.checkpoint import load_model, named_run, read_config
    from megatron_patches.standalone.generate import continued, read_prompts

    prompts = read_prompts(options.prompt, options.prompts)
    config = compose(options.config, options.set) if options.config else None
    path = named_run(options.checkpoint, config)
    config = read_config(path, config)
    if config.vocab_file is None:
        raise ConfigError("`vocab_file` names no tokenizer, which generation needs")
    gpt2 = config.tokenizer_type == "GPT2BPETokenizer"
    tokenizer = load_tokenizer(str(Path(config.vocab_file).parent) if gpt2 else config.vocab_file)
    trained = provenance.read_run(path).get("tokenizer", "unknown")
    if trained not in ("unknown", tokenizer.fingerprint):
        raise DataError(
            f"{config.vocab_file} is tokenizer {tokenizer.fingerprint}, the model was trained with "
            f"{trained}"
        )
    model = load_model(
        path,
        config=config,
        device=device_of(options.device, config),
        position_options=position_options_of(options.position_option),
    )
    if tokenizer.vocab_size > model.shape.vocabulary:
        raise DataError(
            f"{config.vocab_file} has {tokenizer.vocab_size} entries, the model "
            f"{model.shape.vocabulary}: another tokenizer"
        )
    texts = continued(
        model,
        tokenizer,
        prompts,
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    for prompt, text in zip(prompts, texts, strict=True):
        print(text if len(prompts) == 1 else json.dumps({"prompt": prompt, "text": text}))
    return 0
