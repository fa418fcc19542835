"""What this suite writes about a run that GPT-NeoX trains, so that its results can be traced."""

from __future__ import annotations

from data_prep.indexed import IndexedDataset
from megatron_patches.config import Batch, Config, ConfigError, config_sha
from megatron_patches.standalone import provenance
from megatron_patches.standalone.checkpoint import check_start
from megatron_patches.standalone.data import sources
from megatron_patches.standalone.safety import check_untrusted

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
    datasets = [IndexedDataset(prefix) for prefix, _ in sources(config, "train")]
    now = {
        "engine": ENGINE,
        "config_sha": config_sha(config),
        "git_sha": provenance.git_sha(),
        "neox_commit": commit,
        "data": provenance.data_fingerprint(datasets),
        "tokenizer": provenance.tokenizer_fingerprint(datasets),
        "global_batch": batch.global_,
        "processes": processes,
    }
    if (folder / "latest").is_file():
        provenance.check_same_run(folder, now, config.zero_stage)
        check_untrusted(folder)
    elif config.load:
        check_start(config.load, config)
        check_untrusted(config.load)
    folder.mkdir(parents=True, exist_ok=True)
    provenance.write_json(folder / "run.json", now)
