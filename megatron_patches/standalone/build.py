"""From a configuration to a model: vocabulary, shape, options of the position method."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from data_prep.errors import DataError
from data_prep.indexed import IndexedDataset
from data_prep.tokenizer import GPT2_FINGERPRINT
from megatron_patches.config import Config, ConfigError
from megatron_patches.standalone.shape import ModelShape
from megatron_patches.training.position_options import position_options as choose_options

GPT2_ENTRIES = 50257


def tokenizer_size(config: Config) -> int:
    """Entries of the configured tokenizer, before padding.

    The sidecar of prepared data knows it; without data the tokenizer file does; GPT-2's is a constant.

    Raises ConfigError when the data were made with another tokenizer than the one configured, when
    the configured file is not there, or when nothing tells the size.
    """
    configured = _configured_tokenizer(config)
    prepared = _prepared_tokenizer(config)
    if prepared is not None and configured is None and config.vocab_file is not None:
        raise ConfigError(
            f"{config.place('vocab_file')} {config.vocab_file}: no such file; the tokenizer of "
            f"{prepared[0]} lies beside it: correct the path, or leave the key out"
        )
    known = configured or (prepared and prepared[1:])
    asked = config.tokenizer_type if "tokenizer_type" in config.model_fields_set else None
    if asked == "GPT2BPETokenizer" and known is not None and known[0] != GPT2_FINGERPRINT:
        raise ConfigError(
            f"{config.place('tokenizer_type')} {asked}: the tokenizer is another one, of {known[1]} "
            f"entries (fingerprint {known[0]}): write HFTokenizer, or SPMTokenizer for a .model"
        )
    if prepared is None and configured is None:
        raise ConfigError(
            f"the vocabulary is unknown: prepare the data first ({prepare_command(config)}), give "
            "`vocab_file`, or set `padded_vocab_size`"
        )
    if prepared is None:
        assert configured is not None
        return configured[1]
    prefix, fingerprint, size = prepared
    if configured is not None and (configured[0], configured[1]) != (fingerprint, size):
        raise ConfigError(
            f"{prefix} was prepared with a tokenizer of {size} entries (fingerprint {fingerprint}), "
            f"{config.place('vocab_file')} {config.vocab_file} has {configured[1]} "
            f"(fingerprint {configured[0]}): prepare the data again or correct the path"
        )
    return size


def prepare_command(config: Config) -> str:
    """What makes the configured text, or says where it can be had; of unknown text, what explains all."""
    from data_prep import corpora  # not at the start of every run: it takes half a second

    # The parts of a data set lie in one folder, named after themselves.
    folders = {Path(prefix).parent for prefix in config.train_data_paths or ()}
    if config.dataset not in corpora.names() or len(folders) != 1:
        return "python -m data_prep --help"
    command = f"python -m data_prep {config.dataset}"
    if isinstance(corpora.get(config.dataset), corpora.PublishedCorpus):
        return command
    return f"{command} --output {shlex.quote(str(folders.pop()))}"


def _configured_tokenizer(config: Config) -> tuple[str, int] | None:
    from data_prep.tokenizing import load_tokenizer

    if config.vocab_file and Path(config.vocab_file).is_file():
        if config.tokenizer_type == "GPT2BPETokenizer":
            tokenizer = load_tokenizer(str(Path(config.vocab_file).parent))
        else:
            tokenizer = load_tokenizer(config.vocab_file)
        return tokenizer.fingerprint, tokenizer.vocab_size
    return None


def _prepared_tokenizer(config: Config) -> tuple[str, str, int] | None:
    """`(prefix, fingerprint, entries)` on which the sidecars of the training data agree."""
    found: tuple[str, str, int] | None = None
    for prefix in config.train_data_paths or ([config.data_path] if config.data_path else []):
        if not Path(f"{prefix}.idx").exists():
            continue
        sidecar = IndexedDataset(prefix).sidecar
        if sidecar is None or "tokenizer" not in sidecar:
            continue
        tokenizer = sidecar["tokenizer"]
        this = (prefix, str(tokenizer["fingerprint"]), int(tokenizer["vocab_size"]))
        if found is not None and this[1:] != found[1:]:
            raise DataError(f"{prefix} and {found[0]} were prepared with different tokenizers")
        found = this
    return found


def vocabulary(config: Config) -> int:
    """Rows of the embedding: NeoX pads the tokenizer's entries to a round number.

    Raises ConfigError for a `padded_vocab_size` below the tokenizer's entries, and as `tokenizer_size`.
    """
    rows = config.padded_vocab_size
    if rows is not None:
        known = _configured_tokenizer(config) is not None or _prepared_tokenizer(config) is not None
        entries = tokenizer_size(config) if known else 0
        if rows < entries:
            raise ConfigError(
                f"{config.place('padded_vocab_size')} {rows}: the tokenizer has {entries} entries; "
                "leave the key out, or make it at least as large"
            )
        return rows
    try:
        entries = tokenizer_size(config)
    except ConfigError:
        if config.tokenizer_type != "GPT2BPETokenizer" or _prepared_tokenizer(config):
            raise
        entries = GPT2_ENTRIES
    multiple = config.make_vocab_size_divisible_by * config.model_parallel_size
    return (entries + multiple - 1) // multiple * multiple


def position_options(config: Config) -> dict[str, Any]:
    """The configuration's settings that this run's position method knows.

    Raises ConfigError for a `position_*` key that the method does not have.
    """
    values = {key: getattr(config, key) for key in type(config).model_fields}
    try:
        return choose_options(
            values, config.model_fields_set, config.torch_dtype_name, config.place
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def shape_of(config: Config, padded_vocabulary: int | None = None) -> ModelShape:
    """The `ModelShape` of a configuration; `padded_vocabulary` overrides what the data say."""
    return ModelShape(
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        heads=config.num_attention_heads,
        vocabulary=vocabulary(config) if padded_vocabulary is None else padded_vocabulary,
        pos_emb=config.pos_emb,
        max_length=config.max_position_embeddings,
        intermediate_size=config.intermediate_size,
        layernorm_epsilon=config.layernorm_epsilon,
        parallel_residual=config.gpt_j_residual,
        tied_output=not config.no_weight_tying,
        init_method=config.init_method,
        output_layer_init_method=config.output_layer_init_method,
        init_method_std=config.init_method_std,
        seed=config.seed,
        position_sharing=config.position_sharing,
        position_options=position_options(config),
        attention=config.attention_impl,
        # NeoX hands the key to flash-attention as "keys to the left": the query's own comes on top.
        window=None if config.sliding_window_width is None else config.sliding_window_width + 1,
        checkpoint_activations=config.checkpoint_activations,
    )
