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


def begin_neox_run(config: Config, batch: Batch, processes: int, commit: str) -> None:
    """Write `run.json`, after checks that GPT-NeoX does not make.

    Raises ConfigError for a folder of the other engine or of other data, DataError for text or
    tokenizers that contradict each other, CheckpointError for weights that hold code.
    """
    folder = config.save_dir
    before = provenance.read_run(folder) if (folder / "run.json").is_file() else {}
    if before.get("engine", ENGINE) != ENGINE:
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
    if (folder / "latest").is_file():
        provenance.check_same_run(folder, now, config.zero_stage)
        check_untrusted(step_that_neox_loads(folder))
    elif config.load:
        path = Path(config.load)
        given = path.name.startswith("global_step") and path.is_dir()
        step = path if given else step_that_neox_loads(path, config.iteration)
        check_start(step, config)
        check_untrusted(step)
    folder.mkdir(parents=True, exist_ok=True)
    provenance.write_json(folder / "run.json", now)
