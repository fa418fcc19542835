"""Folders that others wrote, or that somebody changed: read right, or refused, and no code of them is run."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from hf_cases import ROTATING  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from test_hf_carry import carried  # noqa: E402
from transformers import GPTNeoXForCausalLM  # noqa: E402

from megatron_patches import positions  # noqa: E402
from megatron_patches.config import ConfigError  # noqa: E402
from megatron_patches.hf import describing, read_model  # noqa: E402
from megatron_patches.standalone import CheckpointError  # noqa: E402


def test_a_foreign_gpt_neox(tmp_path):
    from transformers import GPTNeoXConfig

    torch.manual_seed(1)
    sizes = {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 128}
    rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
    config = GPTNeoXConfig(
        **sizes, num_attention_heads=3, rope_parameters=rope, initializer_range=0.3
    )
    theirs = GPTNeoXForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()  # in parts
    ours, found = read_model(tmp_path / "theirs")
    assert found.gpt_j_residual and found.rotary_pct == 0.25 and found.rotary_emb_base == 5000
    text = torch.randint(0, 96, (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(ours(text), theirs(text).logits, atol=2e-5, rtol=1e-5)
    stored = theirs.state_dict()["gpt_neox.layers.1.attention.query_key_value.weight"]
    key = "sequential.3.attention.query_key_value.weight"
    assert torch.equal(ours.state_dict()[key], stored)


CHANGES = {
    "kind": ({"model_type": "llama"}, "model_type 'llama'"),
    "activation": ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    "scaling": ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type is 'llama3'"),
    "another": (
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 1.0}},
        "position_options is .*'factor': 4.0.*says",
    ),
    "lacking": ({"position": None}, "lacks or garbles|pos_emb|rotary"),
    "text": ({"num_hidden_layers": "2"}, "num_layers"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_settings_that_our_model_lacks(tmp_path, name):
    change, said = CHANGES[name]
    folder = carried(tmp_path, "kerple_log" if name == "lacking" else ROTATING)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=said):
        read_model(folder)


def test_another_method_than_was_trained_is_refused(tmp_path):
    """A log and a power kernel have parameters of equal names and shapes."""
    folder = carried(tmp_path, "kerple_log")
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"kerple_log"', '"kerple_power"'))
    with pytest.raises(ConfigError, match="pos_emb is 'kerple_power', training.yml says"):
        read_model(folder)


@pytest.mark.parametrize(
    "index", ['{"weight_map": {"a": "../secret"}}', '{"weight_map": 3}', "[]", "{", "[" * 100000]
)
def test_hostile_indices(tmp_path, index):
    folder = carried(tmp_path, "alibi")
    save_file({"a": torch.zeros(1)}, tmp_path / "secret")
    (folder / "model.safetensors").rename(folder / "elsewhere")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError):
        read_model(folder)


def test_damaged_weights(tmp_path):
    folder = carried(tmp_path, "alibi")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        read_model(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="neither"):
        read_model(folder)


def test_no_code_of_a_folder_is_run(tmp_path):
    folder = carried(tmp_path, "kerple_log")
    (folder / "modeling_gpt_positions.py").write_text("raise SystemExit('ran')")
    read_model(folder)
    shutil.rmtree(folder / "x", ignore_errors=True)
    torch.save({"embed_in.weight": Run()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="more than weights"):
        read_model(folder)


class Run:
    def __reduce__(self):
        return exit, ("ran",)


def test_which_methods_are_known(tmp_path, monkeypatch):
    known = set(describing.carried_code().METHODS)
    family = {"log", "log3", "power", "gauss2", "gauss3", "weight", "weight1", "power_weight"}
    others = {"alibi", "rpe", "sinusoidal", "learned", "none"}
    assert known >= {f"kerple_{name}" for name in family} | others
    assert known <= set(positions.names())
    # A method that is newer than the file is refused by its name, not carried without its bias.
    monkeypatch.setattr(describing.carried_code(), "METHODS", tuple(known - {"alibi"}))
    with pytest.raises(ConfigError, match="alibi: modeling_gpt_positions.py does not know alibi"):
        carried(tmp_path, "alibi")
