"""Logits and losses of checkpoints that GPT-NeoX and the KERPLE authors' fork computed themselves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import standalone_tools as tools
import torch
from safetensors.torch import load_file

from megatron_patches.standalone import CheckpointError, load_model

NEOX = tools.GOLDENS / "neox"
FORK = tools.GOLDENS / "fork"
NEOX_RUNS = sorted(path.name for path in (NEOX / "checkpoints").iterdir())
FORK_RUNS = sorted(path.parent.name for path in FORK.glob("*/logits.safetensors"))
# The fork's folders hold no configuration.
FORK_CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 12,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "no_weight_tying": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "train_iters": 1,
}


def fork_folder(name: str, tmp_path: Path) -> Path:
    """Layer files of `name`; two folders share the weights of kerple_log and are made from them."""
    if list((FORK / name).glob("layer_*")):
        return FORK / name
    dtype = load_file(FORK / name / "logits.safetensors")["logits_64"].dtype
    for file in (FORK / "kerple_log").glob("layer_*"):
        state = torch.load(file, weights_only=True)
        torch.save({key: tensor.to(dtype) for key, tensor in state.items()}, tmp_path / file.name)
    return tmp_path


def fork_config(name: str, **changes: Any) -> dict[str, Any]:
    return {**FORK_CONFIG, "pos_emb": name.removesuffix("-bf16"), **changes}


def lengths(golden: dict[str, torch.Tensor]) -> list[int]:
    return [length for length in (64, 256, 600) if f"logits_{length}" in golden]


def assert_equal_to(golden: dict[str, torch.Tensor], model: torch.nn.Module) -> None:
    for length in lengths(golden):
        tokens = golden[f"input_ids_{length}"]
        logits = model(tokens)
        torch.testing.assert_close(logits, golden[f"logits_{length}"], atol=2e-5, rtol=0)
        if f"labels_{length}" in golden:
            labels, wanted = golden[f"labels_{length}"], golden[f"token_losses_{length}"]
            for block in (1024, 50):
                losses = model.token_losses(tokens, labels, block=block)
                torch.testing.assert_close(losses, wanted, atol=2e-5, rtol=0)
            last = model.token_losses(tokens, labels, first=length - 5)
            torch.testing.assert_close(last, wanted[:, -5:], atol=2e-5, rtol=0)
            mean = model(tokens, labels).item()
            assert mean == pytest.approx(wanted.mean().item(), abs=2e-5)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("name", NEOX_RUNS)
def test_neox_checkpoints(name, impl):
    golden = load_file(NEOX / "logits" / f"{name}.safetensors")
    model = load_model(NEOX / "checkpoints" / name, attention=impl)
    assert not model.training and 64 in lengths(golden)
    assert_equal_to(golden, model)
    longer = NEOX / "logits" / f"{name}-len256.safetensors"
    if longer.exists():
        assert_equal_to(load_file(longer), model)


def test_one_step_folder_is_enough():
    name = NEOX_RUNS[0]
    golden = load_file(NEOX / "logits" / f"{name}.safetensors")
    assert_equal_to(golden, load_model(NEOX / "checkpoints" / name / "global_step30"))


def test_a_learned_table_ends():
    model = load_model(NEOX / "checkpoints" / "learned-pp0-mp1")
    with pytest.raises(ValueError, match=r"learned cannot read .*65.* max_length=64|table ends at"):
        model(torch.zeros(1, 65, dtype=torch.int64))


@pytest.mark.parametrize("name", [name for name in FORK_RUNS if not name.endswith("bf16")])
def test_fork_checkpoints(name, tmp_path):
    golden = load_file(FORK / name / "logits.safetensors")
    model = load_model(fork_folder(name, tmp_path), config=fork_config(name))
    assert_equal_to(golden, model)


def test_the_fork_in_bfloat16(tmp_path):
    name = "kerple_log-bf16"
    golden = load_file(FORK / name / "logits.safetensors")
    folder = fork_folder(name, tmp_path)
    published = fork_config(name, precision="bfloat16", position_precision="as_published")
    errors = {}
    for label, config in (
        ("published", published),
        ("exact", {**published, "position_precision": "exact"}),
    ):
        model = load_model(folder, config=config)
        assert model.sequential["0"].word_embeddings.weight.dtype == torch.bfloat16
        errors[label] = [
            (model(golden[f"input_ids_{n}"]).float() - golden[f"logits_{n}"].float()).abs()
            for n in (64, 256, 600)
        ]
    assert max(error.max() for error in errors["published"]) < 0.1
    # At 600 tokens the rounding of distances outweighs that of the rest.
    assert errors["published"][2].mean() < errors["exact"][2].mean()


def test_config_from_a_file(tmp_path):
    import yaml

    file = tmp_path / "model.yml"
    file.write_text(yaml.safe_dump(fork_config("alibi")))
    golden = load_file(FORK / "alibi" / "logits.safetensors")
    assert_equal_to(golden, load_model(FORK / "alibi", config=file))


def test_a_wrong_configuration_is_not_a_silent_one():
    """The same tensors fit a model with other heads or another epsilon: only shapes can be checked."""
    with pytest.raises(CheckpointError, match=r"slopes: shape \(12,\), expected \(8,\)"):
        load_model(FORK / "alibi", config=fork_config("alibi", num_attention_heads=8))
    golden = load_file(FORK / "alibi" / "logits.safetensors")
    model = load_model(FORK / "alibi", config=fork_config("alibi", layernorm_epsilon=1e-6))
    error = (model(golden["input_ids_64"]) - golden["logits_64"]).abs().max()
    assert error > 2e-5


def test_shards_that_disagree(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(NEOX / "checkpoints" / "kerple_log-pp1-mp2", folder)
    file = folder / "global_step30" / "layer_05-model_01-model_states.pt"
    state = torch.load(file, weights_only=True)
    torch.save({key: tensor + 1 for key, tensor in state.items()}, file)
    with pytest.raises(CheckpointError, match=r"sequential\.5\.norm\.\w+: should be the same"):
        load_model(folder)
