"""The resolved configuration on disk, and the hash that names what it trains."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from .compose import compose
from .errors import ConfigError
from .keys_base import names
from .keys_model import ORDINARY_ATTENTION, Attention, Shape, attention_types
from .keys_own import Own
from .schema import Config

# What may differ between two runs that train the same model: where files lie, how a run is
# started, watched, saved and evaluated, and how it saves memory. Every other key is hashed. The
# number of processes is no key: only with `train_batch_size` does the hash know the global batch.
NOT_HASHED = names(
    """
    run_name variant save load iteration log_dir tensorboard_dir tensorboard s3_path s3_chunk_size
    fused_kernels_build_path use_shared_fs use_wandb wandb wandb_project wandb_group
    wandb_run_name wandb_team wandb_host wandb_init_all_ranks use_comet comet_workspace
    comet_project comet_experiment_name comet_tags comet_others csv_monitor hostfile include
    exclude num_nodes num_gpus global_num_gpus master_port master_addr launcher deepspeed_slurm
    deepspeed_mpi no_ssh_check force_multi comment account local_rank distributed_backend
    num_workers mmap_warmup data_impl checkpoint_scale checkpoint_factor extra_save_iters
    keep_last_n_checkpoints no_save_optim no_save_rng exit_interval log_interval steps_per_print
    wall_clock_breakdown comms_logger flops_profiler dump_state eval_interval eval_iters
    eval_lengths eval_protocol eval_stride eval_last_k eval_window eval_block eval_paper_windows
    eval_position_options eval_batch_size eval_split eval_tasks eval_results_prefix seq_length_val
    attention_impl valid_data_paths valid_data_weights
    test_data_paths test_data_weights checkpoint_activations checkpoint_num_layers
    partition_activations synchronize_each_layer watch_loss_multiple watch_stall_seconds
    join_seconds
    """
)
# Where `dataset` names the text, its path on this machine does not count; each result row carries
# fingerprints of the data and of the tokenizer besides.
NAMED_BY_DATASET = frozenset({"data_path", "train_data_paths", "vocab_file", "merge_file"})

# Keys younger than the first published hashes, which left them out.
COUNTED_WHEN_SET = ("neox_fixes_off",)


# The keys that decide what weights mean. An evaluation may change the text, not these.
MODEL = frozenset(
    {"seed", *Shape.model_fields, *Attention.model_fields}
    | {key for key in Own.model_fields if key.startswith("position_")}
) - set(NOT_HASHED)


# Of these, what a stored weight means whatever it is trained for next: a start from weights may
# change lengths, dropout and initial values.
FUNCTION = names(
    """
    pos_emb num_layers hidden_size num_attention_heads num_kv_heads intermediate_size norm activation
    gpt_j_residual gpt_j_tied no_weight_tying rotary_pct rotary_emb_base rpe_num_buckets
    rpe_max_distance position_sharing position_options
    """
)


def contradictions(trained: Config, given: Config, keys: Collection[str] = MODEL) -> list[str]:
    """Keys in which `given` describes another model than `trained` did."""
    return [
        f"{given.place(key)} is {getattr(given, key)!r}, the model was trained with "
        f"{getattr(trained, key)!r}"
        for key in sorted(keys)
        if _meaning(given, key) != _meaning(trained, key)
    ]


def _meaning(config: Config, key: str) -> Any:
    """The key's value, one value for all that compute the same."""
    value = getattr(config, key)
    if key == "attention_config" and attention_types(value) <= ORDINARY_ATTENTION:
        return None
    return value


def dump(config: Config) -> str:
    """YAML text of the explicitly set keys, sorted; composing it gives an equal config."""
    explicit = config.model_dump(mode="json", exclude_unset=True)
    return yaml.dump(
        explicit,
        Dumper=_Dumper,
        sort_keys=True,
        allow_unicode=True,
        width=100,
        default_flow_style=None,
    )


class _Dumper(yaml.SafeDumper):
    """Writes what the reader accepts: no anchors, and floats that YAML 1.1 reads as floats."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


_Dumper.add_representer(float, _write_float)


def config_sha(config: Config) -> str:
    """First 12 hex digits of the SHA-256 of every key that influences the trained model.

    `NOT_HASHED` and, where `dataset` is set, `NAMED_BY_DATASET` list the keys left out. A default
    counts like the same value written out.
    """
    text = json.dumps(_hashed(config), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _hashed(config: Config) -> dict[str, Any]:
    left_out = NOT_HASHED | NAMED_BY_DATASET if config.dataset else NOT_HASHED
    values = config.model_dump(mode="json", exclude=set(left_out))
    values["attention_config"] = _meaning(config, "attention_config")
    for key in COUNTED_WHEN_SET:
        if not values[key]:
            del values[key]
    return values


def another_run(folder: Path, trained: Config | None, found: str, given: Config) -> ConfigError:
    """The error for a folder whose run does not train what `given` says, key by key.

    `trained` is that run's configuration, None where it is not to be had; `found` names its hash.
    """
    before, now = (dict(_flat(_hashed(config))) for config in (trained or given, given))
    keys = sorted(key for key in {*before, *now} if before.get(key) != now.get(key))
    told = [f"{given.place(key)} is {now.get(key)!r}, was {before.get(key)!r}" for key in keys]
    return ConfigError(
        f"{folder} holds a run of another configuration ({found}, this one is {config_sha(given)})"
        f"{': ' if told else ''}{', '.join(told)}; choose another `save` or `run_name`, or remove the "
        "folder"
    )


def _flat(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of nested mappings."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def load_run_config(folder: str | Path) -> Config:
    """The configuration of a run folder, a `global_stepN` folder, or NeoX's `configs/` inside one.

    Looks for `config.yml` in the folder and the one above, then for the files that NeoX copies.
    Raises ConfigError naming the places where nothing was found.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    if (own := run_config_file(folder)) is not None:
        return compose([own])
    for candidate in _step_folders(folder):
        files = sorted((candidate / "configs").glob("*.yml"))
        if files:
            return compose(files)
    raise ConfigError(f"{folder}: holds neither config.yml nor a step folder with configs/*.yml")


def run_config_file(folder: str | Path) -> Path | None:
    """The `config.yml` of a run or step folder; None: it has none."""
    folder = Path(folder)
    places = (folder / "config.yml", folder.parent / "config.yml")
    return next((place for place in places if place.is_file()), None)


def _step_folders(folder: Path) -> Iterator[Path]:
    """The folder itself, the step that `latest` names, the other steps from the newest."""
    yield folder
    steps = [path for path in folder.glob("global_step*") if path.name[11:].isdigit()]
    latest = folder / "latest"
    if latest.is_file():
        named = latest.read_text(encoding="utf-8", errors="replace").strip()
        # one of the folders found, never a path of its own such as ../../elsewhere
        yield from (path for path in steps if path.name == named)
    yield from sorted(steps, key=lambda path: int(path.name[11:]), reverse=True)
