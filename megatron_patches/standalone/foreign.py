"""What this suite writes about a run that GPT-NeoX trains, so that its results can be traced."""

from __future__ import annotations

from pathlib import Path

from data_prep.indexed import IndexedDataset
from megatron_patches.config import Batch, Config, ConfigError, config_sha
from megatron_patches.standalone import provenance
from megatron_patches.standalone.checkpoint import check_start
from megatron_patches.standalone.data import sources
from megatron_patches.standalone.safety import check_untrusted, step_that_neox_loads

ENGINE = "neox"


def starting_step(config: Config) -> Path | None:
    """The step folder that GPT-NeoX is to load: the run's own, or what `load` names; None: none.

    Raises CheckpointError where the named one is not there.
    """
    if (config.save_dir / "latest").is_file():
        return step_that_neox_loads(config.save_dir)
    return step_that_neox_loads(config.load, config.iteration) if config.load else None


def begin_neox_run(
    config: Config, batch: Batch, processes: int, commit: str, start: Path | None
) -> None:
    """Write `run.json`, after checks that GPT-NeoX does not make; `start` is `starting_step`'s.

    Raises ConfigError for a folder of the other engine or of other data, DataError for text or
    tokenizers that contradict each other, CheckpointError for weights that hold code.
    """
    folder = config.save_dir
    before = provenance.read_run(folder) if (folder / "run.json").is_file() else {}
    if before.get("converted_to", before.get("engine", ENGINE)) != ENGINE:
        raise ConfigError(
            f"{folder} holds a run of the engine {before['engine']}: choose another `save` or "
            "`run_name`, or convert its weights with checkpoints/convert.py"
        )
    # Other objectives read files of other keys, of which only NeoX knows.
    plain = config.train_impl == "normal"
    datasets = [IndexedDataset(prefix) for prefix, _ in sources(config, "train")] if plain else []
    now = {
        "engine": ENGINE,
        "config_sha": config_sha(config),
        "git_sha": provenance.git_sha(),
        "neox_commit": commit,
        "data": provenance.data_fingerprint(datasets) if plain else "unknown",
        "tokenizer": provenance.tokenizer_fingerprint(datasets),
        "global_batch": batch.global_,
        "processes": processes,
    }
    if start is not None:
        if start.parent == folder:
            provenance.check_same_run(folder, now, config.zero_stage)
        else:
            check_start(start, config)
        check_untrusted(start)
    folder.mkdir(parents=True, exist_ok=True)
    provenance.write_json(folder / "run.json", now)
