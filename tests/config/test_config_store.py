"""The resolved file composes to an equal config; the hash knows what trains the model."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml
from config_files import CONFIGS, MINIMAL, ROOT

from megatron_patches.config import ConfigError, compose, config_sha, dump, load_run_config
from megatron_patches.config.schema import Config
from megatron_patches.config.store import NAMED_BY_DATASET, NOT_HASHED

RUN = [CONFIGS / part for part in ("base/tiny.yml", "method/rpe.yml", "dataset/local_code.yml")]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["run_name='010'"],
        ["run_name='off'", "dataset='1.5'"],
        ["run_name=6e-4", "prompt_end='a: b # c'"],
        ["optimizer.params.lr=1.0e-9", "min_lr=1.0e-10", "layernorm_epsilon=1.0e-12"],
        ["weight_decay=123456789012345680000.0"],
        ["pos_emb=kerple_power_ap_", "position_options={a: [1, 2], b: {c: 1.0e-7}}"],
        ["zero_optimization={stage: 1, overlap_comm: on}", "load=", "save=ä b"],
        ["data_types={}", "eval_lengths=[64]", "checkpoint_factor=1.5", "checkpoint_scale=log"],
    ],
)
def test_dump_composes_to_an_equal_config(write, overrides):
    config = compose(RUN, overrides)
    text = dump(config)
    again = compose([write(text, "config.yml")])
    assert again == config
    assert dump(again) == text
    assert config_sha(again) == config_sha(config)


def test_dump_holds_what_was_set_and_reads_alike_in_plain_yaml():
    config = compose(RUN, ["optimizer.params.lr=1.0e-9"])
    plain = yaml.safe_load(dump(config))
    explicit = {path for path in config.provenance if "." not in path}
    assert set(plain) == explicit
    assert plain["optimizer"]["params"]["lr"] == 1e-9
    assert plain["eval_lengths"] == config.eval_lengths


def test_derived_values_stay_derived_in_a_dumped_file(write):
    path = write(dump(compose(RUN)), "config.yml")
    changed = compose([path], ["hidden_size=256", "train_iters=50", "seed=9"])
    assert (changed.intermediate_size, changed.lr_decay_iters) == (1024, 50)
    assert changed.run_id == "rpe-local_code-9"


def test_the_hash_is_stable_over_processes_and_spellings(config):
    made = config("", "seed=5")
    assert config_sha(made) == config_sha(config("seed: 5\nmin_lr: 0.0\nnorm: layernorm\n"))
    assert len(config_sha(made)) == 12
    code = (
        "from megatron_patches.config import compose, config_sha;"
        f"print(config_sha(compose({[str(f) for f in RUN]!r})))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == config_sha(compose(RUN))


@pytest.mark.parametrize(
    "override",
    [
        "seed=5",
        "hidden_size=64",
        "pos_emb=alibi",
        "optimizer.params.lr=0.002",
        "weight_decay=0.2",
        "train_iters=11",
        "precision=bfloat16",
        "position_sharing=layer",
        "position_init=alibi",
        "position_precision=as_published",
        "position_options={x: 1}",
        "train_batch_size=64",
        "zero_optimization.stage=1",
        "init_method=small_init",
        "finetune=true",
        "data_path=elsewhere",
        "dataset=arxiv",
    ],
)
def test_the_hash_sees_what_trains_the_model(config, override):
    assert config_sha(config("", override)) != config_sha(config())


@pytest.mark.parametrize(
    "override",
    [
        "run_name=x",
        "save=x checkpoint_factor=3",
        "load=x",
        "log_dir=x",
        "tensorboard_dir=x",
        "use_wandb=true",
        "wandb_project=x",
        "hostfile=x",
        "master_port=1234",
        "launcher=slurm",
        "distributed_backend=gloo",
        "num_workers=0",
        "eval_lengths=[64]",
        "eval_protocol=sliding",
        "eval_window=512 eval_paper_windows=8",
        "eval_block=64",
        'eval_position_options={"a":1}',
        "eval_interval=5",
        "attention_impl=chunked",
        "checkpoint_activations=true",
        "watch_loss_multiple=3.0 watch_stall_seconds=0",
        "dataset=d data_path=a vocab_file=b",
    ],
)
def test_the_hash_ignores_where_and_how(config, override):
    overrides = override.split(" ")
    same = ["dataset=d"] if "dataset=d" in overrides else []
    assert config_sha(config("", *overrides)) == config_sha(config("", *same))


def test_the_lists_of_keys_left_out_name_real_keys():
    assert set(Config.model_fields) >= NOT_HASHED | NAMED_BY_DATASET


def test_load_run_config_from_run_and_step_folder(tmp_path):
    config = compose(RUN)
    step = tmp_path / "global_step20"
    step.mkdir()
    (tmp_path / "config.yml").write_text(dump(config))
    assert load_run_config(tmp_path) == config
    assert load_run_config(step) == config


def test_load_run_config_from_neox_copies(tmp_path):
    for step, seed in ((9, 9), (10, 10), (20, 20)):
        folder = tmp_path / f"global_step{step}" / "configs"
        folder.mkdir(parents=True)
        (folder / "model.yml").write_text(MINIMAL)
        (folder / "local_setup.yml").write_text(f'{{"seed": {seed}, "vocab-file": "v.json",}}')
    assert load_run_config(tmp_path).seed == 20
    (tmp_path / "latest").write_text("global_step9\n")
    assert load_run_config(tmp_path).seed == 9
    assert load_run_config(tmp_path / "global_step10").seed == 10
    assert load_run_config(tmp_path).vocab_file == "v.json"


def test_load_run_config_refuses_a_folder_without_one(tmp_path):
    with pytest.raises(ConfigError, match="holds neither"):
        load_run_config(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        load_run_config(tmp_path / "absent")
