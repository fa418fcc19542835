"""A Hugging Face folder as our model: one that `carry` wrote, or any GPT-NeoX with rotary positions.

Read as untrusted input: its code is not run, weights are tensors alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data_prep.tokenizer import TOKENIZER_FILES
from data_prep.tokenizing import load_tokenizer
from megatron_patches import positions
from megatron_patches.config import FUNCTION, Config, ConfigError, compose, from_mapping
from megatron_patches.hf.describing import ORIGIN, RECORD, TRAINING
from megatron_patches.hf.naming import restored
from megatron_patches.hf.rope import rotary_keys
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.checkpoint import model_for
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.shape import position_methods
from megatron_patches.standalone.weights import CheckpointError, State, fill, safe_load

LARGEST_JSON = 64 << 20  # bytes; an index of the largest models has a few
NEOX, CARRIED = "gpt_neox", "gpt_positions"
PRECISION = {torch.float32: "fp32", torch.bfloat16: "bfloat16", torch.float16: "fp16"}
_SAME = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "layer_norm_eps": "layernorm_epsilon",
    "use_parallel_residual": "gpt_j_residual",
}


def is_hugging_face(folder: Path) -> bool:
    """Whether `folder` is one of Hugging Face's, not a run of ours."""
    return (folder / "config.json").is_file() and not (folder / "config.yml").is_file()


def read_model(folder: str | Path) -> tuple[GPT, Config]:
    """The model in evaluation mode, weights in their stored dtype, and a configuration of it.

    Raises:
        CheckpointError: not such a folder, damaged, or missing, surplus or wrongly shaped tensors.
        ConfigError: a setting that our GPT does not have (named).
    """
    folder = Path(folder)
    values = _json(folder / "config.json")
    kind = values.get("model_type")
    if kind not in (NEOX, CARRIED):
        raise CheckpointError(
            f"{folder / 'config.json'}: model_type {kind!r}; known are {NEOX} and {CARRIED}"
        )
    state = _tensors(folder)
    weight = state.get("gpt_neox.embed_in.weight" if kind == NEOX else "embed_in.weight")
    if weight is None or weight.dim() != 2:
        raise CheckpointError(f"{folder}: no embedding among its tensors")
    if weight.dtype not in PRECISION:
        raise CheckpointError(f"{folder}: weights of {weight.dtype}, known are {list(PRECISION)}")
    config = _config(folder, values, PRECISION[weight.dtype])
    shape = shape_of(config, len(weight))
    window = values.get("attention_window")
    if window is not None:
        shape = replace(shape, window=window)
    model = model_for(shape, [state], str(folder))
    fill(model, restored(state, model, neox=kind == NEOX, source=str(folder)), str(folder))
    return model.to(weight.dtype).eval(), config


# ---- configuration ---------------------------------------------------------------------------


def _config(folder: Path, values: dict[str, Any], precision: str) -> Config:
    try:
        keys = _keys(values)
    except ConfigError as error:
        raise ConfigError(f"{folder / 'config.json'}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{folder / 'config.json'}: lacks or garbles {error}") from error
    stored = folder / TRAINING
    if not stored.is_file():
        length = keys.get("max_position_embeddings")
        if length is None:
            raise ConfigError(f"{folder / 'config.json'}: lacks 'max_position_embeddings'")
        rest = {"seq_length": length, "train_iters": 1, "train_micro_batch_size_per_gpu": 1}
        return from_mapping({**keys, **rest, "precision": precision}, str(folder / "config.json"))
    trained = compose([stored])
    wrong = [
        f"{key} is {value!r}, {TRAINING} says {said!r}"
        for key, value in keys.items()
        if key in {*FUNCTION, "sliding_window_width"}
        and (said := _stored(trained, key, values)) != value
    ]
    if wrong:
        raise ConfigError(f"{folder / 'config.json'}: {'; '.join(wrong)}")
    if trained.effective_precision == precision:
        return trained
    given = trained.model_dump(mode="json", exclude_unset=True)
    others = {k: v for k, v in given.items() if k not in ("fp16", "bf16", "data_types")}
    return from_mapping({**others, "precision": precision}, str(stored))


def _stored(trained: Config, key: str, values: dict[str, Any]) -> Any:
    """What the training's configuration says, as `describing.model_config` spells it out."""
    if key == "position_sharing":
        # In effect: one layer, or an embedding, has one method whatever was asked for.
        return "model" if len(set(position_methods(shape_of(trained, 1)))) == 1 else "layer"
    if key != "position_options" or values["model_type"] != NEOX:
        return getattr(trained, key)
    shape = shape_of(trained, 1)
    spelt = positions.build(
        shape.pos_emb,
        heads=shape.heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        max_length=shape.max_length,
        **shape.position_options,
    ).rope_parameters()
    return rotary_keys({"rope_parameters": spelt}).get(key) if spelt else getattr(trained, key)


def _keys(values: dict[str, Any]) -> dict[str, Any]:
    """Our keys from a `config.json`; ConfigError for what our GPT does not have."""
    for key, only in (("hidden_act", "gelu"), ("attention_bias", True)):
        if values.get(key, only) != only:
            raise ConfigError(f"{key} is {values[key]!r}; our GPT has {only!r} alone")
    width = values["hidden_size"] // values["num_attention_heads"]
    if (values.get("head_dim") or width) != width:
        raise ConfigError(
            f"head_dim is {values['head_dim']}; our GPT has hidden_size / num_attention_heads, {width}"
        )
    keys = {ours: values[theirs] for theirs, ours in _SAME.items() if theirs in values}
    keys["no_weight_tying"] = not values.get("tie_word_embeddings", False)
    if values["model_type"] == NEOX:
        keys.setdefault("gpt_j_residual", True)  # transformers' default
        return {**keys, **rotary_keys(values)}
    keys["pos_emb"] = values["position"]
    keys["position_sharing"] = values["position_sharing"]
    if values.get("position_dtype", "float32") != "float32":
        keys["position_precision"] = "as_published"
    keys |= {key: values[key] for key in ("rpe_num_buckets", "rpe_max_distance") if key in values}
    if values.get("attention_window") is not None:
        keys["sliding_window_width"] = values["attention_window"] - 1
    return keys


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; not a folder of Hugging Face's")
    if path.stat().st_size > LARGEST_JSON:
        raise CheckpointError(f"{path}: more than {LARGEST_JSON >> 20} MB of JSON")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a mapping")
    return found


# ---- weights ---------------------------------------------------------------------------------


def _tensors(folder: Path) -> State:
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / single).is_file():
            return _read([folder / single])
        if (folder / index).is_file():
            return _read(_parts(folder, index))
    raise CheckpointError(f"{folder}: holds neither model.safetensors nor pytorch_model.bin")


def _parts(folder: Path, index: str) -> list[Path]:
    named = _json(folder / index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise CheckpointError(f"{folder / index}: has no weight_map")
    files = [folder / name for name in sorted(set(named.values()))]
    wrong = [path for path in files if path.parent != folder or not path.is_file()]
    if wrong:
        raise CheckpointError(
            f"{folder / index}: names {wrong[0].name!r}, which is not in {folder}"
        )
    return files


def _read(files: Iterable[Path]) -> State:
    found: State = {}
    for file in files:
        if file.suffix == ".safetensors":
            from safetensors import SafetensorError
            from safetensors.torch import load_file

            try:
                part = load_file(file)
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(f"{file}: damaged ({error})") from error
        else:
            part = safe_load(file)
        if not isinstance(part, dict) or not all(
            isinstance(t, torch.Tensor) for t in part.values()
        ):
            raise CheckpointError(f"{file}: holds more than tensors")
        twice = sorted(set(part) & set(found))
        if twice:
            raise CheckpointError(f"{file}: {twice[0]} is in another file, too")
        found |= part
    return found


def tokenizer_file(folder: Path) -> Path | None:
    """The tokenizer that lies in the folder, if one of ours."""
    return next((folder / name for name in TOKENIZER_FILES if (folder / name).is_file()), None)


def run_record(folder: Path, model: GPT) -> dict[str, Any]:
    """`run.json` of the run that the folder becomes: the original's, as far as the folder tells."""
    stored, words = folder / RECORD, tokenizer_file(folder)
    told = _json(stored) if stored.is_file() else {}
    record = {key: str(told[key]) for key in ORIGIN if key in told}
    if words is not None:
        record["tokenizer"] = load_tokenizer(words).fingerprint
    return {
        "engine": "huggingface",
        **record,
        "parameters": model.parameter_count(),
        "position": model.position_method.settings(),
    }
