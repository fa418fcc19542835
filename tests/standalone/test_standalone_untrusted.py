"""Checkpoints from elsewhere: nothing in them runs, nothing is half loaded, every fault is listed."""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import standalone_tools as tools
import torch

from megatron_patches.config import ConfigError, from_mapping
from megatron_patches.standalone import CheckpointError, checkpoint, load_model
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.tensor_kinds import unusable
from megatron_patches.standalone.train import train

LAYERS = tools.GOLDENS / "neox" / "checkpoints" / "rpe-pp1-mp1"
SHARDS = tools.GOLDENS / "neox" / "checkpoints" / "kerple_log-pp1-mp2"


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of a finished run that a test may damage; without hashes, which an attacker would renew."""
    return without_manifest(shutil.copytree(trained, tmp_path / "run"))


def without_manifest(run: Path) -> Path:
    for file in run.glob("global_step*/manifest.json"):
        file.unlink()
    return run


@pytest.fixture
def file(run) -> Path:
    return run / "global_step12" / "mp_rank_00_model_states.pt"


@pytest.fixture
def damaged(file, run) -> Callable[[Callable[[dict[str, Any]], None]], str]:
    """damaged(change) -> the message after `change(weights)`."""

    def refuse(change):
        content = torch.load(file, weights_only=False)
        change(content["module"])
        torch.save(content, file)
        with pytest.raises(CheckpointError) as caught:
            load_model(run)
        return str(caught.value)

    return refuse


@pytest.mark.parametrize("inside", [True, False])
def test_code_is_refused_and_not_run(file, run, tmp_path, config, inside):
    bomb = tmp_path / "bomb"
    content = torch.load(file, weights_only=False)
    (content["module"] if inside else content)["extra"] = Bomb(bomb)
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="holds more than weights .*mkdir") as caught:
        load_model(run)
    assert "weights_only" not in str(caught.value)  # torch's advice, which would run the code
    with pytest.raises(CheckpointError, match="damaged, or holds more than weights"):
        train(config(train_iters=13))  # the same folder: a resumed run reads it, too
    assert not bomb.exists()


def test_a_plain_pickle(file, run, tmp_path):
    file.write_bytes(pickle.dumps({"module": Bomb(tmp_path / "bomb")}, protocol=2))
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(run)
    assert not (tmp_path / "bomb").exists()


def test_code_in_an_optimizer_file(config, tmp_path):
    changes = {"zero_optimization": {"stage": 1}, "train_iters": 2, "checkpoint_factor": 2}
    folder = without_manifest(train(config(**changes)))
    (file,) = (folder / "global_step2").glob("zero_*_optim_states.pt")
    content = torch.load(file, weights_only=False)
    torch.save({**content, "extra": Bomb(tmp_path / "bomb")}, file)
    with pytest.raises(CheckpointError, match="optim_states.*damaged, or holds more"):
        train(config(**changes))
    assert not (tmp_path / "bomb").exists()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file(file, run, share):
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states.pt: damaged"):
        load_model(run)


def test_flipped_bytes_never_end_in_anything_but_a_message(file, run):
    whole = bytearray(file.read_bytes())
    generator = random.Random(1)
    for _ in range(60):
        copy = bytearray(whole)
        for _ in range(3):
            # The first kilobytes hold the pickled structure, where the reader could be misled.
            copy[generator.randrange(4000)] = generator.randrange(256)
        file.write_bytes(copy)
        try:
            load_model(run)
        except CheckpointError:
            continue


def test_missing_surplus_and_wrongly_shaped_tensors_are_all_listed(damaged):
    def change(module):
        module.pop("sequential.2.mlp.linear1.weight")
        module["sequential.9.extra"] = torch.zeros(2)
        module["sequential.5.norm.bias"] = torch.zeros(7)
        module["sequential.6.final_linear.weight"][3, 2] = float("nan")

    message = damaged(change)
    for line in (
        "sequential.2.mlp.linear1.weight: missing",
        "sequential.9.extra: not part of this model",
        "sequential.5.norm.bias: shape (7,), expected (16,)",
        "sequential.6.final_linear.weight: holds NaN or infinite values",
    ):
        assert line in message


def test_copies_of_a_shared_method_must_agree(damaged):
    key = "sequential.3.attention.rpe.bias_p"
    message = damaged(lambda module: module.update({key: module[key] + 1}))
    assert f"{key}: differs from sequential.2.attention.rpe.bias_p" in message


def test_things_that_are_no_tensors(damaged):
    message = damaged(lambda module: module.update(name="x"))
    assert "are no tensors of floating numbers: name (str)" in message


KINDS = {
    "int32": lambda tensor: tensor.to(torch.int32),
    "bool": lambda tensor: tensor > 0,
    "complex64": lambda tensor: tensor.to(torch.complex64),
    "float8_e4m3fn": lambda tensor: tensor.to(torch.float8_e4m3fn),
    "sparse or quantised": lambda tensor: tensor.to_sparse(),
    "on the device meta": lambda tensor: tensor.to("meta"),
    "a single number": lambda tensor: tensor.sum(),
    "more numbers than are stored": lambda tensor: tensor.flatten()[:1].expand(1 << 40),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["mlp.linear1.weight", "attention.rpe.bias_p"])
def test_tensors_of_other_kinds_are_refused_by_name(damaged, key, kind):
    """Copied into the model, most of them would be rounded, or lose a part, without a word."""
    key = f"sequential.2.{key}"
    message = damaged(lambda module: module.update({key: KINDS[kind](module[key])}))
    assert f"no tensors of floating numbers: {key} ({kind})" in message


@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning", "ignore:.*quantiz:DeprecationWarning")
def test_quantised_tensors_are_refused():
    assert (
        unusable(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
        == "sparse or quantised"
    )


def test_numbers_beyond_the_dtype_of_the_model(damaged):
    key = "sequential.6.final_linear.weight"
    message = damaged(lambda module: module.update({key: module[key].double() * 1e300}))
    assert f"{key}: holds NaN or infinite values" in message


def test_no_weights_at_all(file, run):
    torch.save({"module": None}, file)
    with pytest.raises(CheckpointError, match="has no weights"):
        load_model(run)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pos_emb": "alibi"}, r"attention\.rpe\.bias_p: not part of this model"),
        ({"num_attention_heads": 8}, r"rpe\.bias_p: shape \(4, 1, 1\), expected \(8, 1, 1\)"),
        ({"num_layers": 3}, r"sequential\.7\.final_linear\.weight: missing"),
        ({"position_sharing": None, "no_weight_tying": False}, r"6\.final_linear.*not part"),
        ({"padded_vocab_size": 128}, "its embedding has 64 rows"),
        ({"hidden_size": 32}, r"embeddings\.weight: shape \(64, 16\), expected \(64, 32\)"),
    ],
)
def test_another_model(run, text, tmp_path, changes, problem):
    """Named by the configuration where the folder has one, else by the tensors."""
    other = tools.tiny(text, tmp_path, **changes)
    with pytest.raises(ConfigError, match="holds another model: .*the model was trained with"):
        load_model(run, config=other)
    (run / "config.yml").unlink()
    with pytest.raises(CheckpointError, match=problem):
        load_model(run, config=other)


def test_weights_of_another_kernel_with_the_same_names(run, text, tmp_path):
    """kerple_power has the names and shapes of kerple_log: only the stored configuration tells."""
    with pytest.raises(ConfigError, match="`pos_emb`"):
        load_model(run, config=tools.tiny(text, tmp_path, pos_emb="kerple_power"))


def test_twelve_heads_are_not_eight(tmp_path):
    path = tools.GOLDENS / "neox" / "checkpoints" / "kerple_log-pp0-mp1"
    path = shutil.copytree(path, tmp_path / "run", ignore=shutil.ignore_patterns("configs"))
    values = {
        "num_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 8,
        "seq_length": 64,
        "max_position_embeddings": 64,
        "pos_emb": "kerple_log",
        "no_weight_tying": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "train_iters": 1,
    }
    with pytest.raises(CheckpointError, match=r"bias_a: shape \(12, 1, 1\), expected \(8, 1, 1\)"):
        load_model(path, config=values)


@pytest.mark.parametrize("name", ["layer_03-model_00", "layer_02-model_01", "layer_06-model_01"])
def test_a_missing_layer_file(tmp_path, name):
    folder = shutil.copytree(SHARDS, tmp_path / "run")
    (folder / "global_step30" / f"{name}-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="do not have the same layer files"):
        load_model(folder)


def test_a_missing_shard(tmp_path):
    folder = shutil.copytree(SHARDS, tmp_path / "run")
    for file in folder.rglob("*model_00-model_states.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"shards \[1\] are there, one is missing"):
        load_model(folder)
    folder = shutil.copytree(SHARDS, tmp_path / "other")
    for file in folder.rglob("*model_01-model_states.pt"):
        file.unlink()
    # Half of the heads is a smaller model, and the configuration says so.
    with pytest.raises(CheckpointError):
        load_model(folder)


def test_a_missing_layer_of_one_shard(tmp_path):
    folder = shutil.copytree(LAYERS, tmp_path / "run")
    (folder / "global_step30" / "layer_03-model_00-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"sequential\.3\.mlp\.linear1\.weight: missing"):
        load_model(folder)


@pytest.mark.parametrize(
    "name", ["../../elsewhere", "/etc", "global_step12/..", "", "global_step9"]
)
def test_latest_names_a_step_of_this_folder(run, trained, tmp_path, name):
    shutil.copytree(trained / "global_step12", tmp_path / "elsewhere")
    (run / "latest").write_text(name)
    with pytest.raises(CheckpointError, match=r"latest: names "):
        load_model(run)


def test_folders_that_are_none(tmp_path, run):
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        load_model(tmp_path / "nowhere")
    (run / "latest").unlink()
    with pytest.raises(CheckpointError, match="name one of its steps: global_step12"):
        load_model(run)


def test_repeated_numbers_make_no_room_for_a_large_model():
    """Names that share one storage, and shapes beyond it, count for what is in the file."""
    config = from_mapping({**tools.TINY, "hidden_size": 40000})
    one = torch.zeros(1 << 10)
    stored = {"whole": one.expand(1 << 30, 1 << 10), **{f"name{n}": one for n in range(1000)}}
    with pytest.raises(CheckpointError, match="holds 1,024 numbers, but its configuration"):
        checkpoint.model_for(shape_of(config, 64), [stored], "a file")
