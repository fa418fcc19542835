"""A trained model read with other options of its position method: which, and rows of their own."""

from __future__ import annotations

import re
import shutil

import pytest
import standalone_tools as tools
import torch

from megatron_patches.analysis.aggregate import collect, series_label
from megatron_patches.analysis.rows import cell_key, read_rows
from megatron_patches.config import ConfigError
from megatron_patches.positions import method_class
from megatron_patches.standalone import cli, load_model
from megatron_patches.standalone.evaluate import Request
from megatron_patches.standalone.train import train

OPTION = "--position-option"


@pytest.fixture(scope="module")
def sandwich(text, tmp_path_factory):
    """A finished tiny run of a method whose options change its function, not its parameters."""
    folder = tmp_path_factory.mktemp("sandwich") / "run"
    return train(tools.tiny(text, folder, pos_emb="sandwich", train_iters=4))


@pytest.fixture
def open_options(monkeypatch):
    """Options of three methods are let be set, whatever the methods themselves say."""
    monkeypatch.setattr(
        method_class("sandwich"), "evaluation_options", ("first_index", "dimension")
    )
    monkeypatch.setattr(method_class("ggd_bam"), "evaluation_options", ("learn_loc",))


def test_the_method_gets_the_options_and_keeps_the_others(sandwich, open_options):
    plain, read = load_model(sandwich), load_model(sandwich, position_options={"first_index": 1})
    assert read.position_method.settings()["options"] == {
        **plain.position_method.settings()["options"],
        "first_index": 1,
    }
    for key, tensor in plain.state_dict().items():
        assert torch.equal(read.state_dict()[key], tensor)
    ids = torch.randint(1, 60, (1, 40), generator=torch.Generator().manual_seed(0))
    assert (plain(ids) - read(ids)).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"first_index": 1, "precision": "exact"}, "not read with another precision; .*dimension"),
        ({"first_indx": 1}, "not read with another first_indx; what may be set: first_index, dim"),
        ({"first_index": 7}, "first_index"),
        ({"dimension": "wide"}, "dimension|'str'"),
    ],
)
def test_other_options_and_values_are_refused(sandwich, open_options, options, told):
    with pytest.raises(ConfigError, match=f"`eval_position_options`: .*{told}"):
        load_model(sandwich, position_options=options)


def test_a_method_that_lets_nothing_be_set_says_so(trained):
    with pytest.raises(ConfigError, match="kerple_log is not read with another init; .*: none"):
        load_model(trained, position_options={"init": "alibi"})


def test_options_that_need_other_parameters_are_refused(config, open_options):
    folder = train(config(pos_emb="ggd_bam", train_iters=2))
    with pytest.raises(ConfigError, match=r"other parameters than it was trained with \(loc\)"):
        load_model(folder, position_options={"learn_loc": True})


def test_rows_are_lines_of_their_own_and_resume_by_themselves(
    sandwich, open_options, tmp_path, capsys
):
    output = tmp_path / "rows.jsonl"
    command = ["--checkpoint", str(sandwich), "--lengths", "16", "64", "--resume"]
    given = ([], ["dimension=16"], ["first-index=1", "dimension=16.0"])
    for options in (*given, *given):
        words = [word for option in options for word in (OPTION, option)]
        assert cli.eval_main([*command, *words, "--output", str(output)]) == 0
    rows = read_rows(output)
    assert [row.options for row in rows[::2]] == [
        {},
        {"eval_position_options": {"dimension": 16}},
        {"eval_position_options": {"first_index": 1, "dimension": 16}},
    ]
    assert len(rows) == len({cell_key(row) for row in rows}) == 6
    assert len({row.config_sha for row in rows}) == len({row.data for row in rows}) == 1
    labels = ["sandwich", "sandwich, dimension 16", "sandwich, dimension 16, first_index 1"]
    assert list(collect(rows)) == labels
    assert len({row.loss for row in rows[1::2]}) == 3
    assert capsys.readouterr().out.count(f"0 rows appended to {output}") == 3


def test_the_key_of_a_configuration(sandwich, open_options, tmp_path):
    folder = shutil.copytree(sandwich, tmp_path / "run")
    config = folder / "config.yml"
    config.write_text(config.read_text() + "eval_position_options: {first_index: 1.0}\n")
    command = ["--checkpoint", str(folder), "--lengths", "16", "--output", str(tmp_path / "rows")]
    assert cli.eval_main(command) == 0
    assert cli.eval_main([*command, OPTION, "dimension=8"]) == 0  # in its place
    assert [row.options["eval_position_options"] for row in read_rows(tmp_path / "rows")] == [
        {"first_index": 1},
        {"dimension": 8},
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([OPTION, "dimension"], "--position-option dimension: expects key=value"),
        ([OPTION, "dimension=8", OPTION, "dimension=16"], "`dimension` is set twice"),
        ([OPTION, "dimension=1:30"], "--position-option dimension: .*base 60"),
        ([OPTION, "dimension=8", "--kernels", "k.jsonl"], "--kernels writes what was learned"),
        (
            [OPTION, "dimension=8", "--only-kernels", "k.jsonl"],
            "--only-kernels scores nothing: leave out --position-option",
        ),
    ],
)
def test_commands_that_cannot_be(sandwich, open_options, tmp_path, capsys, words, told):
    code = cli.eval_main(["--checkpoint", str(sandwich), *words])
    assert code == 2 and re.search(told, capsys.readouterr().err)


def test_whole_numbers_have_one_spelling():
    assert repr(Request((8,), position_options={"factor": 8.0}).position_options) == "{'factor': 8}"
    assert Request((8,), position_options={"a": 0.5, "b": True}).position_options["b"] is True
    assert Request((8,)) == Request((8,), position_options={})


def test_labels_name_texts_first_and_the_window_last():
    from types import SimpleNamespace

    options = {
        "eval_position_options": {"factor": 8, "scaling": "yarn", "truncate": False},
        "position_sharing": "layer",
        "sliding_window_width": 512,
    }
    row = SimpleNamespace(method="rotary", options=options)
    known = "rotary (position_sharing=layer), scaling yarn, factor 8, truncate false"
    assert series_label(row) == f"{known}, window 512"
    assert series_label(row, window=False) == known


# ---- temperatures of a model without positions --------------------------------------------------


def test_a_model_without_positions_is_read_at_several_temperatures(config, tmp_path):
    folder = train(config(pos_emb="none", train_iters=4))
    output = tmp_path / "rows.jsonl"
    command = ["--checkpoint", str(folder), "--lengths", "32", "--output", str(output)]
    for words in ([], [OPTION, "temperature=1.0"], [OPTION, "temperature=1.5"]):
        assert cli.eval_main([*command, *words]) == 0
    plain, same, other = read_rows(output)
    assert plain.window_losses == same.window_losses != other.window_losses
    assert series_label(other) == "none, temperature 1.5"
    with pytest.raises(ConfigError, match=r"has other parameters than .* \(scale\)"):
        load_model(folder, position_options={"temperature": "heads"})


def test_temperatures_of_heads_are_learned_for_each_layer(config):
    learned = {"position_options": {"temperature": "heads", "initial_temperature": 1.6}}
    folder = train(config(pos_emb="none", train_iters=6, **learned))
    stored = {key: t for key, t in tools.weights(folder).items() if key.endswith("position.scale")}
    assert len(stored) == 2 and all(t.shape == (4,) for t in stored.values())
    assert len({value for t in stored.values() for value in t.tolist()}) == 8
    assert "position/layer0/scale_mean" in tools.log(folder)[0]
    model = load_model(folder)
    for key, tensor in stored.items():
        assert torch.equal(model.state_dict()[key], tensor)
