"""A trained run as a Hugging Face folder: written aside, compared with our model, then renamed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.errors import DataError
from data_prep.tokenizer import Tokenizer
from data_prep.tokenizing import load_tokenizer
from megatron_patches.config import Config, ConfigError, config_sha
from megatron_patches.hf import describing
from megatron_patches.hf.naming import renamed
from megatron_patches.standalone import provenance
from megatron_patches.standalone.checkpoint import (
    CheckpointError,
    load_model,
    read_config,
    step_folder,
    step_number,
)
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.whole_folder import whole_or_nothing

PROMPTS, FACTORS, TOLERANCE = 3, (1, 4), 1e-4
# Logits compared at a time, 512 MB of float32: of long prompts and large vocabularies the last ones.
MOST_LOGITS = 1 << 27
# What a byte-level tokenizer can get wrong: blanks, lines, letters beyond ASCII, digits, signs.
SAMPLES = (
    "def main(argv):\n    return 0\n\n\n",
    "  Two  blanks,\ttabs \r\n and a trailing one ",
    "na\u00efve caf\u00e9 \u2014 \u4f60\u597d \U0001f600 1234567890 $x_{i}^2$ <tag/>",
)


def carry(
    source: str | Path,
    destination: str | Path,
    *,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    tokenizer: str | Path | None = None,
    with_tokenizer: bool = True,
) -> list[str]:
    """Write the run in `source` to the new folder `destination`, for `AutoModelForCausalLM`.

    Args:
        source: run or step folder of either engine, as in `load_model`.
        destination: must not exist. It appears when the comparison has succeeded.
        config: where the folder holds none.
        tokenizer: file or folder; default: the configuration's `vocab_file`.
        with_tokenizer: False writes the model alone.

    Returns lines that say what was compared: logits of three prompts at 1 and 4 times the training
    length, which differ from ours by at most 1e-4 of the largest, in float32.

    Raises:
        ConfigError: the destination exists, no Hugging Face model computes this one, or no
            tokenizer is named.
        CheckpointError: the weights cannot be loaded, or the written folder gives other logits.
        DataError: the tokenizer is not the model's, or splits text differently there.
    """
    destination = Path(destination)
    if destination.exists():
        raise ConfigError(f"{destination}: exists; choose another destination, or remove it")
    describing.carried_code()  # says early what is not installed
    settings = read_config(source, config)
    # Found once: a run that still trains may name a newer step while this one is read.
    folder = step_folder(source)
    model = load_model(folder, config=settings)
    reason = describing.refused(model)
    if reason is not None:
        raise ConfigError(f"{settings.place('pos_emb')} {settings.pos_emb}: {reason}")
    words = model_tokenizer(source, settings, tokenizer, model) if with_tokenizer else None
    with whole_or_nothing(destination) as aside:
        _write(aside, model, settings, words)
        checks = [*_same_logits(aside, model, settings), *_same_tokens(aside, words)]
        origin = _origin(source, step_number(folder), settings, words, tuple(checks))
        described = f"`{words.file_name}`" if words else "not included"
        card = describing.model_card(model, settings, origin, described)
        (aside / "README.md").write_text(card, encoding="utf-8")
        (aside / describing.RECORD).write_text(origin.record(), encoding="utf-8")
    return checks


def model_tokenizer(
    source: str | Path, config: Config, given: str | Path | None, model: GPT
) -> Tokenizer:
    """The tokenizer of a run: `given`, or the configuration's `vocab_file`.

    Raises ConfigError where none is named, DataError for one that is not the model's.
    """
    if given is None and config.vocab_file is None:
        raise ConfigError(
            "`vocab_file` names no tokenizer: give one (--tokenizer FILE), or carry the model alone "
            "(--no-tokenizer)"
        )
    gpt2 = given is None and config.tokenizer_type == "GPT2BPETokenizer"
    path = given or config.vocab_file
    words = load_tokenizer(Path(str(path)).parent if gpt2 else str(path))
    trained = provenance.read_run(source).get("tokenizer", "unknown")
    if trained not in ("unknown", words.fingerprint):
        raise DataError(
            f"{path} is tokenizer {words.fingerprint}, the model was trained with {trained}"
        )
    if words.vocab_size > model.shape.vocabulary:
        raise DataError(
            f"{path} has {words.vocab_size} entries, the model {model.shape.vocabulary}: another tokenizer"
        )
    return words


def _origin(
    source: str | Path,
    step: int,
    config: Config,
    words: Tokenizer | None,
    checks: tuple[str, ...],
) -> describing.Provenance:
    run = provenance.read_run(source)
    return describing.Provenance(
        config_sha=run.get("config_sha", config_sha(config)),
        git_sha=run.get("git_sha", "unknown"),
        data=run.get("data", "unknown"),
        tokenizer=run.get("tokenizer", words.fingerprint if words else "unknown"),
        engine=run.get("engine", "unknown"),
        step=step,
        checks=checks,
    )


# ---- files -----------------------------------------------------------------------------------


def _write(folder: Path, model: GPT, config: Config, words: Tokenizer | None) -> None:
    from safetensors.torch import save_file

    eod = words.eod if words else None
    described = describing.model_config(model, config.seq_length, eod)
    described.save_pretrained(folder)
    entries = words.vocab_size if words else None
    describing.generation_config(model, entries, eod).save_pretrained(folder)
    neox = describing.is_neox(model)
    save_file(renamed(model, neox=neox), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / describing.TRAINING).write_text(describing.training_record(config), encoding="utf-8")
    if not neox:
        code = Path(str(describing.carried_code().__file__))
        shutil.copyfile(code, folder / code.name)
    if words is not None:
        words.save(folder)
        (folder / "tokenizer_config.json").write_text(_tokenizer_config(words), encoding="utf-8")


def _tokenizer_config(words: Tokenizer) -> str:
    special = words.decode([words.eod]) if words.eod is not None else None
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(1e30),  # a position bias has no limit
        "padding_side": "left",
        "add_bos_token": False,
        "add_eos_token": False,
    }
    if special is not None:
        values |= {"bos_token": special, "eos_token": special, "pad_token": special}
    return json.dumps(values, indent=1)


# ---- comparison ------------------------------------------------------------------------------


@torch.no_grad()
def _same_logits(folder: Path, model: GPT, config: Config) -> list[str]:
    from transformers import AutoModelForCausalLM

    # Our own file: it was copied a moment ago.
    theirs = AutoModelForCausalLM.from_pretrained(
        str(folder), trust_remote_code=True, local_files_only=True, dtype=torch.float32
    ).eval()
    ours = model.float()  # of the stored weights, whatever their dtype
    generator = torch.Generator().manual_seed(0)
    checks = []
    for factor in FACTORS:
        length, limit = factor * config.seq_length, model.position_method.max_length
        if limit is not None and length > limit:
            checks.append(f"{length} tokens: not compared, its table ends at {limit}")
            continue
        worst = 0.0
        for _ in range(PROMPTS):
            tokens = torch.randint(0, model.shape.vocabulary, (1, length), generator=generator)
            worst = max(worst, _difference(ours, theirs, tokens))
        checks.append(
            f"{length} tokens: logits of {PROMPTS} prompts differ by {worst:.1e} of the largest"
        )
        if not worst <= TOLERANCE:  # NaN is refused as well
            raise CheckpointError(
                f"nothing is written: at {length} tokens the logits in transformers differ by "
                f"{worst:.1e} of the largest, allowed are {TOLERANCE:g}"
            )
    return checks


def _difference(ours: GPT, theirs: Any, tokens_BL: Tensor) -> float:
    keep = min(tokens_BL.shape[1], max(1, MOST_LOGITS // ours.shape.vocabulary))
    wanted = ours.logits(ours.hidden(tokens_BL)[:, -keep:])
    found = theirs(tokens_BL, use_cache=False, logits_to_keep=keep).logits
    return float((found - wanted).abs().max() / wanted.abs().max())


def _same_tokens(folder: Path, words: Tokenizer | None) -> list[str]:
    if words is None:
        return []
    if words.file_name != "tokenizer.json":
        return [f"{words.file_name} is included; transformers' AutoTokenizer is not set up for it"]
    from transformers import AutoTokenizer

    # To find its class, transformers reads the model's configuration, whose code is ours.
    theirs = AutoTokenizer.from_pretrained(
        str(folder), trust_remote_code=True, local_files_only=True
    )
    for text in SAMPLES:
        ids = words.encode(text)
        found = theirs(text)["input_ids"]
        if found != ids or theirs.decode(ids) != words.decode(ids):
            raise DataError(
                f"nothing is written: transformers splits {text!r} into {found[:12]} ..., the model's "
                f"tokenizer into {ids[:12]} ...; export with --no-tokenizer"
            )
    return [f"tokenizer: the same ids and text of {len(SAMPLES)} samples"]
