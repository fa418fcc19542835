"""A run becomes a Hugging Face folder and a run again: same function, same bits, or nothing at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_cases import LENGTH, METHODS, ROTATING, VOCABULARY, a_run, tokens

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="safetensors is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXForCausalLM  # noqa: E402

from data_prep.tokenizing import train_bpe  # noqa: E402
from megatron_patches.config import ConfigError, load_run_config  # noqa: E402
from megatron_patches.hf import carry, describing, read_model  # noqa: E402
from megatron_patches.standalone import CheckpointError, load_model  # noqa: E402


def carried(folder: Path, method: str, **changes) -> Path:
    run = a_run(folder / "run", method, **changes)
    carry(run, folder / "carried", with_tokenizer=False)
    return folder / "carried"


def load(folder: Path, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **settings).eval()


@torch.no_grad()
@pytest.mark.parametrize("method", METHODS)
def test_logits_and_the_way_back(tmp_path, method):
    folder = carried(tmp_path, method)
    ours, theirs = load_model(tmp_path / "run"), load(folder)
    limit = ours.position_method.max_length
    for length in (1, LENGTH, 4 * LENGTH if limit is None else limit):
        wanted, found = ours(tokens(2, length)), theirs(tokens(2, length)).logits
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)
    # Had the position no effect on these logits, their equality would say nothing of it.
    reversed_ = theirs(tokens(2, LENGTH).flip(1)).logits
    assert (reversed_[:, -1] - wanted[:, -1]).abs().max() > 0.1
    assert isinstance(theirs, GPTNeoXForCausalLM) == (method == ROTATING)
    assert (folder / "modeling_gpt_positions.py").exists() == (method != ROTATING)
    back, config = read_model(folder)
    state = back.state_dict()
    assert set(state) == set(ours.state_dict()) and config.pos_emb == method
    assert all(torch.equal(state[key], tensor) for key, tensor in ours.state_dict().items())


SCALED = [
    {"scaling": "linear", "factor": 4},
    {"scaling": "yarn", "factor": 4},
    {
        "scaling": "yarn",
        "factor": 8,
        "original_length": 12,
        "beta_fast": 9,
        "attention_factor": 1.2,
    },
    {"scaling": "yarn", "factor": 2, "truncate": False},
]


@torch.no_grad()
@pytest.mark.parametrize("options", [*SCALED, {"scaling": "ntk", "factor": 4}], ids=str)
def test_stretched_frequencies(tmp_path, options):
    folder = carried(tmp_path, ROTATING, position_options=options)
    ours, theirs = load_model(tmp_path / "run"), load(folder)
    for length in (LENGTH, 4 * LENGTH):
        text = tokens(2, length)
        torch.testing.assert_close(theirs(text).logits, ours(text), atol=2e-5, rtol=1e-5)
    plain = load(carried(tmp_path / "plain", ROTATING))
    assert (plain(text).logits - ours(text)).abs().max() > 0.1
    if options["scaling"] == "ntk":
        with pytest.raises(ConfigError, match="rope_theta .* is no whole number"):
            read_model(folder)
        return
    back, config = read_model(folder)
    assert config.position_options == options
    torch.testing.assert_close(back(text), ours(text), atol=0, rtol=0)
    values = json.loads((folder / "config.json").read_text())
    plain_rope = {**values, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    (folder / "config.json").write_text(json.dumps(plain_rope))
    with pytest.raises(ConfigError, match="position_options is {}, training.yml says"):
        read_model(folder)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "training.yml").unlink()  # as a folder that others wrote
    back, _ = read_model(folder)
    torch.testing.assert_close(back(text), ours(text), atol=0, rtol=0)


SETTINGS = [
    {"gpt_j_residual": True},
    {"no_weight_tying": None},
    {"intermediate_size": 40},
    {"sliding_window_width": 5},
    {"position_sharing": "layer"},
    {"dtype": "bfloat16"},
    {"layernorm_epsilon": 1e-2},
]


@torch.no_grad()
@pytest.mark.parametrize("changes", SETTINGS, ids=str)
@pytest.mark.parametrize("method", ["kerple_power_weight", ROTATING])
def test_settings(tmp_path, method, changes):
    if method == ROTATING and "sliding_window_width" in changes:
        with pytest.raises(ConfigError, match="no sliding window"):
            carried(tmp_path, method, **changes)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        return
    folder = carried(tmp_path, method, **changes)
    ours, (back, _) = load_model(tmp_path / "run"), read_model(folder)
    state = back.state_dict()
    for key, tensor in ours.state_dict().items():
        assert torch.equal(state[key], tensor) and state[key].dtype == tensor.dtype
    text = tokens(2, 3 * LENGTH)
    found = load(folder, dtype=torch.float32)(text).logits
    torch.testing.assert_close(found, ours.float()(text), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(back.float()(text), ours(text), atol=0, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("method", ["kerple_log", "rpe", "alibi"])
def test_as_published_in_bfloat16(tmp_path, method):
    """Distances rounded to bfloat16 are another function, beyond 256 tokens; it is carried as it is."""
    folder = carried(tmp_path, method, dtype="bfloat16", position_precision="as_published")
    values = json.loads((folder / "config.json").read_text())
    assert values["position_dtype"] == "bfloat16"
    ours, (back, config) = load_model(tmp_path / "run").float(), read_model(folder)
    assert config.position_precision == "as_published"
    theirs, text = load(folder, dtype=torch.float32), tokens(1, 400)
    found, wanted = theirs(text).logits, ours(text)
    torch.testing.assert_close(found, wanted, atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(back.float()(text), wanted, atol=0, rtol=0)
    for position in theirs.position:
        position.dtype = torch.float32
    if method != "rpe":  # whose buckets are whole numbers below 256
        assert (theirs(text).logits - wanted).abs().max() > 1e-3


def test_the_folder_as_a_run(tmp_path, capsys):
    from test_hf_convert import convert

    run = a_run(tmp_path / "run", "kerple_log")
    (run / "run.json").write_text(
        json.dumps({"config_sha": "abc", "data": "d", "engine": "standalone"})
    )
    carry(run, tmp_path / "carried", with_tokenizer=False)
    assert convert().main([str(tmp_path / "carried"), str(tmp_path / "again")]) == 0
    assert "kerple_log, " in capsys.readouterr().out
    found, wanted = load_model(tmp_path / "again"), load_model(run)
    for key, tensor in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[key], tensor)
    record = json.loads((tmp_path / "again" / "run.json").read_text())
    assert record["config_sha"] == "abc" and record["engine"] == "standalone"
    trained, again = load_run_config(run), load_run_config(tmp_path / "again")
    assert again.seq_length == trained.seq_length and again.optimizer == trained.optimizer


@pytest.mark.parametrize("method", ["kerple_log", "alibi", "learned"])
def test_a_wrong_formula_writes_nothing(tmp_path, method, monkeypatch):
    """The comparison is of the written file: break its code on the way."""
    code = Path(describing.carried_code().__file__).read_text()
    for right, wrong in (
        ('-n["bias_p"] * torch.log(1 +', '-n["bias_p"] * torch.log(2 +'),
        ("-slope * d", "-0.9 * slope * d"),
        ("F.embedding(positions_BL,", "F.embedding(positions_BL * 0,"),
    ):
        assert code.count(right) == 1
        code = code.replace(right, wrong)

    def broken(source, target):
        Path(target).write_text(code)

    run = a_run(tmp_path / "run", method)
    monkeypatch.setattr("megatron_patches.hf.carrying.shutil.copyfile", broken)
    with pytest.raises(CheckpointError, match="nothing is written"):
        carry(run, tmp_path / "carried", with_tokenizer=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_refusals(tmp_path):
    run = a_run(tmp_path / "run", "alibi")
    with pytest.raises(ConfigError, match="`vocab_file` names no tokenizer"):
        carry(run, tmp_path / "to")
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        carry(run, tmp_path / "there", with_tokenizer=False)
    with pytest.raises(CheckpointError, match="no such"):
        carry(tmp_path / "nowhere", tmp_path / "to", with_tokenizer=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "there"]


def changed(folder: Path, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


NAN = torch.full((3, 1, 1), float("nan"))
DAMAGES = {
    "missing": (lambda s: s.pop("position.0.bias_p"), "missing"),
    "missing layer": (lambda s: s.pop("layers.1.mlp.dense_4h_to_h.bias"), "missing"),
    "surplus": (
        lambda s: s.update({"position.1.bias_p": torch.ones(3, 1, 1)}),
        "position.1.bias_p",
    ),
    "shape": (lambda s: s.update({"position.0.bias_a": torch.ones(4, 1, 1)}), "position.0.bias_a"),
    "nan": (lambda s: s.update({"position.0.bias_a": NAN}), "NaN"),
    "negative": (lambda s: s.update({"position.0.bias_a": -torch.ones(3, 1, 1)}), "must lie"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_no_model_without_its_bias(tmp_path, damage):
    change, said = DAMAGES[damage]
    folder = carried(tmp_path, "kerple_log")
    changed(folder, change)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        load(folder)
    assert said.split(".")[-1] in str(caught.value) or damage == "shape"
    if damage != "negative":  # our forward clamps; the file of a run may hold it
        with pytest.raises(CheckpointError):
            read_model(folder)


def test_integers_are_no_weights(tmp_path):
    folder, whole = carried(tmp_path, "kerple_log"), torch.ones(3, 1, 1, dtype=torch.int32)
    changed(folder, lambda s: s.update({"position.0.bias_a": whole}))
    with pytest.raises(CheckpointError, match=r"bias_a: int32, expected \(3, 1, 1\)"):
        read_model(folder)


@torch.no_grad()
def test_saved_by_transformers_and_loaded_again(tmp_path):
    theirs = load(carried(tmp_path, "kerple_log3"))
    theirs.position[0].bias_p.mul_(1.5)
    theirs.save_pretrained(tmp_path / "again")
    again, text = load(tmp_path / "again"), tokens(1, 40)
    assert torch.equal(again(text).logits, theirs(text).logits)
    (back, _) = read_model(tmp_path / "again")
    torch.testing.assert_close(back(text), theirs(text).logits, atol=2e-5, rtol=1e-5)


# ---- tokenizers ------------------------------------------------------------------------------


def test_the_tokenizer_goes_along(tmp_path):
    words = train_bpe(["def main(argv): return 0\n" * 20, "naive caf\u00e9 " * 9], 300)
    words.save(tmp_path)
    run = a_run(tmp_path / "run", "kerple_log", padded_vocab_size=320)
    (run / "run.json").write_text(json.dumps({"tokenizer": words.fingerprint}))
    lines = carry(run, tmp_path / "carried", tokenizer=tmp_path / "tokenizer.json")
    assert any("same ids" in line for line in lines)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "carried", trust_remote_code=True)
    text = "def caf\u00e9(argv):\n\n  return  0"
    assert theirs(text)["input_ids"] == words.encode(text)
    assert theirs.decode(words.encode(text)) == text
    assert theirs.eos_token_id == words.eod and theirs.padding_side == "left"
    model = load(tmp_path / "carried")
    assert model.generation_config.eos_token_id == words.eod
    assert model.generation_config.suppress_tokens == list(range(words.vocab_size, 320))
    assert words.fingerprint in (tmp_path / "carried" / "README.md").read_text()
    # the file itself, to the byte
    assert (tmp_path / "carried" / "tokenizer.json").read_bytes() == words.json_bytes


def test_another_tokenizer_is_refused(tmp_path):
    from data_prep.errors import DataError

    words = train_bpe(["some text of its own " * 20], 300)
    words.save(tmp_path)
    run = a_run(tmp_path / "run", "kerple_log")
    with pytest.raises(DataError, match=f"entries, the model {VOCABULARY}"):
        carry(run, tmp_path / "to", tokenizer=tmp_path / "tokenizer.json")
    (run / "run.json").write_text(json.dumps({"tokenizer": "another"}))
    with pytest.raises(DataError, match="the model was trained with another"):
        carry(run, tmp_path / "to", tokenizer=tmp_path / "tokenizer.json")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("method", "options", "told"),
    [
        ("xpos", {}, "scale_base=512.0"),
        ("rotary", {"scaling": "dynamic_yarn"}, "scaling=dynamic_yarn, original_length=16"),
        (
            "rotary",
            {"scaling": "dynamic_ntk"},
            "scaling=dynamic_ntk, factor=1.0, original_length=16",
        ),
    ],
)
def test_what_no_model_of_theirs_computes_is_refused_by_name(tmp_path, method, options, told):
    with pytest.raises(ConfigError, match=f"{method}: no Hugging Face model turns .* with {told}"):
        carried(tmp_path, method, position_options=options)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_of_the_users_beside_it_stays(tmp_path):
    mine = tmp_path / "writing-carried"
    mine.mkdir()
    (mine / "notes").write_text("mine")
    carried(tmp_path, "alibi")
    assert (mine / "notes").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["carried", "run", "writing-carried"]
