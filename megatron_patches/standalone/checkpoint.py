"""Checkpoints read as untrusted input: configuration and weights of a run of either engine.

`saving` writes them, `resuming` continues from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_patches.config import (
    FUNCTION,
    Config,
    ConfigError,
    check_standalone,
    compose,
    contradictions,
    from_mapping,
    load_run_config,
    run_config_file,
)
from megatron_patches.config.keys_own import block_of, scoring_window
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.resuming import begun, resume, set_aside
from megatron_patches.standalone.saving import save
from megatron_patches.standalone.shape import ModelShape, read_with
from megatron_patches.standalone.tensor_kinds import stored_numbers
from megatron_patches.standalone.weights import (
    CheckpointError,
    fill,
    merge_shards,
    read_shards,
    step_folder,
    step_number,
)

# A model made for a checkpoint may be larger than what is stored, so that what is missing can be listed.
MOST_TIMES, SMALL, MOST_LAYERS = 20, 100_000_000, 10_000

__all__ = [
    "CheckpointError",
    "begun",
    "check_start",
    "load_model",
    "load_weights",
    "loaded_folder",
    "model_for",
    "named_run",
    "read_config",
    "resume",
    "save",
    "set_aside",
    "step_folder",
    "step_number",
]


def read_config(path: str | Path, config: Config | Mapping[str, Any] | str | Path | None) -> Config:
    """The configuration of a checkpoint: given, or found in its folder.

    Where both exist, the given one may change the text and how things run, not the model.

    Raises ConfigError or CheckpointError when there is none, or when the two contradict each other.
    """
    if not Path(path).is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder")
    if config is None:
        return load_run_config(path)
    if isinstance(config, Mapping):
        config = from_mapping(dict(config))
    elif not isinstance(config, Config):
        config = compose([config])
    trained = _stored_config(path)
    if trained is None:
        return config
    if problems := contradictions(trained, config):
        raise ConfigError(f"{path} holds another model: " + "; ".join(problems[:5]))
    # A study's name for this training is no key of the model, and tells its rows from those of others.
    return config.model_copy(update={"variant": trained.variant})


def _stored_config(path: str | Path) -> Config | None:
    """The configuration that lies with a checkpoint; None: weights alone, or another program's files.

    Raises ConfigError for a `config.yml` that cannot be read: nothing else tells methods apart whose
    parameters have the same names and shapes.
    """
    try:
        return load_run_config(path)
    except ConfigError as error:
        if (own := run_config_file(path)) is None:
            return None
        raise ConfigError(
            f"{own}: cannot be compared with the configuration that was given; restore it, or remove it to "
            f"go by the given one alone: {error}"
        ) from error


def loaded_folder(config: Config) -> Path:
    """What `load` names, with `iteration` one step of it."""
    assert config.load is not None
    step = config.iteration
    return Path(config.load, *(() if step is None else (f"global_step{step}",)))


def named_run(given: str | Path | None, config: Config | None) -> Path:
    """The folder to read: `given`, or what `config` names, one of the two being there.

    Raises ConfigError where both its `load` and its own folder hold a checkpoint: of a run that was trained
    on from other weights, those would be taken for what became of them.
    """
    if given is not None:
        return Path(given)
    assert config is not None
    own = config.save_dir
    if config.load is None:
        return own
    load = loaded_folder(config)
    if begun(own) and own.resolve() not in (load.resolve(), *load.resolve().parents):
        raise ConfigError(
            f"{config.place('load')} {config.load} is named, and the run's own folder {own} holds a "
            "checkpoint: say which one is meant, by --checkpoint or --set load=FOLDER"
        )
    return load


def check_start(path: str | Path, config: Config) -> None:
    """Raises ConfigError where weights to start from belong to another method or another shape.

    A log kernel and a power kernel store parameters of equal names and shapes, and heads leave no trace
    in the shape of most weights: only the configuration beside them tells.
    """
    trained = _stored_config(path)
    if trained is None:
        return  # names and shapes are compared when they are loaded
    problems = contradictions(trained, config, FUNCTION)
    if problems:
        raise ConfigError(
            f"{path} holds weights of another model: {'; '.join(problems[:5])}; "
            "start from a checkpoint of this model, or change these keys"
        )


def model_for(shape: ModelShape, stored: Sequence[Mapping[str, Tensor]], source: str) -> GPT:
    """A `GPT` to be filled with tensors that `source` holds.

    Raises CheckpointError for a shape that is out of all proportion to them, which would fill the
    memory before names are compared, and ConfigError for one that cannot be.
    """
    width = shape.hidden_size
    layer = 4 * width**2 + 2 * width * (shape.intermediate_size or 4 * width)
    described = (shape.vocabulary + (shape.max_length or 0)) * width + shape.layers * layer
    there = stored_numbers(tensor for state in stored for tensor in state.values())
    if described > max(MOST_TIMES * there, SMALL) or shape.layers > MOST_LAYERS:
        raise CheckpointError(
            f"{source}: holds {there:,} numbers, but its configuration describes a model of "
            f"{described:,} in {shape.layers:,} layers"
        )
    try:
        return GPT(shape)
    except (ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"{source}: its configuration describes no model: {error}") from error


def load_weights(model: GPT, path: str | Path) -> Path:
    """Fill `model` from a checkpoint folder of either engine; returns the step folder used.

    Raises CheckpointError: nothing there, damaged, partial, or of another model.
    """
    folder = step_folder(path)
    fill(model, merge_shards(read_shards(folder), model, str(folder)), str(folder))
    return folder


def load_model(
    path: str | Path,
    *,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    attention: str = "auto",
    attention_eps: float = 0.0,
    window: int | str | None = None,
    position_options: Mapping[str, Any] | None = None,
) -> GPT:
    """A trained `GPT` in evaluation mode, from a run of the standalone engine or of GPT-NeoX.

    Args:
        path: run folder (its `latest` step is taken) or one step folder; single-file or layer files,
            tensor-parallel shards merged, names of older NeoX versions translated.
        config: mapping of configuration keys or path of a YAML file, where the folder holds none.
        device: where to put the model.
        dtype: of weights and activations; None keeps the stored one. Position parameters and
            tables stay float32.
        attention: implementation for `attend`.
        attention_eps: `eps` of `attend`; 0 computes exactly.
        window: the weights read with this `sliding_window_width`, or with `blockwise:b`, whatever they were
            trained with.
        position_options: the weights read with these options of the position method, of those that its
            `evaluation_options` names, whatever they were trained with.

    Raises:
        CheckpointError: missing, surplus or wrongly shaped tensors (listed), damaged files, a
            folder without weights. Weights are never partly loaded or left random.
        ConfigError: no configuration, or one that the model cannot follow; options that the method does
            not let be set.
    """
    settings = read_config(path, config)
    try:
        scoring_window(window)
    except ValueError as error:
        raise ConfigError(f"window {window!r} {error}") from error
    # How the training was spread over processes does not matter once the shards are merged.
    spread: dict[str, Any] = {
        "model_parallel_size": 1,
        "pipe_parallel_size": 0,
        "attention_impl": attention,
    }
    block = block_of(window)
    if window is not None and block is None:
        spread["sliding_window_width"] = window
    settings = settings.model_copy(update=spread)
    check_standalone(settings, training=False)
    shards = read_shards(step_folder(path))
    embedding = "sequential.0.word_embeddings.weight"
    if not all(embedding in state for state in shards):
        raise CheckpointError(f"{path}: no {embedding} among its tensors")
    rows = sum(state[embedding].shape[0] for state in shards)
    if settings.padded_vocab_size not in (None, rows):
        raise CheckpointError(
            f"{path}: its embedding has {rows} rows, the configuration says "
            f"padded_vocab_size {settings.padded_vocab_size}"
        )
    shape = replace(shape_of(settings, rows), attention_eps=attention_eps)
    if block is not None:
        shape = replace(shape, window=("blockwise", block))
    if position_options:
        try:
            shape = read_with(shape, position_options)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"`eval_position_options`: {error}") from error
    model = model_for(shape, shards, str(path))
    fill(model, merge_shards(shards, model, str(path)), str(path))
    stored = shards[0][embedding].dtype
    return model.to(device=device, dtype=dtype or stored).eval()
