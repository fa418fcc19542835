"""`checkpoints/convert.py`: what it writes, what it says, and its exit codes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import standalone_tools as tools
import torch
from export_cases import FORK, FORK_CONFIG, assert_same_moments, stored

from data_prep.errors import DataError
from megatron_patches.config import load_run_config
from megatron_patches.standalone import export, load_model, moments
from megatron_patches.standalone.evaluate import Evaluation, Request
from megatron_patches.standalone.export import Form
from megatron_patches.standalone.weights import safe_load

SCRIPT = tools.ROOT / "checkpoints" / "convert.py"


@pytest.fixture(scope="module")
def convert() -> ModuleType:
    spec = importlib.util.spec_from_file_location("convert", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_of_ours_with_its_moments(convert, trained, tmp_path, capsys):
    to = tmp_path / "to"
    asked = [str(trained), str(to), "--layout", "layers", "--tensor-parallel", "2"]
    assert convert.main(asked) == 0
    said = capsys.readouterr().out
    assert f"wrote {to}/global_step12: kerple_log" in said
    assert "Adam continues with its moments" in said
    assert "make_vocab_size_divisible_by: 32" in said  # TINY sets 64 rows itself
    read, source = load_model(to), load_model(trained)
    tools.assert_same(read.state_dict(), source.state_dict())
    assert_same_moments(
        moments.read_moments(to / "global_step12", read),
        moments.read_moments(trained / "global_step12", source),
    )
    assert stored(to / "global_step12")["iteration"] == 12


def test_a_converted_run_still_knows_its_training(convert, trained, tmp_path):
    """Without it a text of another tokenizer would be scored, and nobody would notice."""
    to = tmp_path / "to"
    assert convert.main([str(trained), str(to)]) == 0
    told, before = (json.loads((run / "run.json").read_text()) for run in (to, trained))
    assert told.pop("converted_to") == "neox"
    assert told == {key: before[key] for key in told}
    assert {"data", "tokenizer", "engine", "config_sha"} < told.keys()
    asked = Request((32,), max_tokens=65)
    first, second = (Evaluation(run, asked).row(32) for run in (trained, to))
    for key in ("loss", "config_sha", "engine", "trained_on", "tokenizer"):
        assert getattr(first, key) == getattr(second, key), key
    (to / "run.json").write_text(json.dumps({**told, "tokenizer": "other"}))
    with pytest.raises(DataError, match="the model was trained with other"):
        Evaluation(to, asked)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fresh-optimizer"], "Adam starts fresh, as asked"),
        (["--dtype", "bfloat16"], "config.yml sets `finetune: true`"),
        (["--dtype", "bfloat16"], "Adam starts fresh: moments are converted for fp32"),
    ],
)
def test_it_says_when_adam_starts_fresh(convert, trained, tmp_path, capsys, options, said):
    assert convert.main([str(trained), str(tmp_path / "to"), *options]) == 0
    assert said in capsys.readouterr().out
    assert stored(tmp_path / "to" / "global_step12")["optimizer"]["state"] == {}
    assert load_run_config(tmp_path / "to").finetune == ("--dtype" in options)


def test_the_authors_files_need_a_configuration(convert, tmp_path, capsys):
    import yaml

    source = next(path for path in FORK if path.name == "kerple_log")
    assert convert.main([str(source), str(tmp_path / "to")]) == 2
    assert "neither config.yml nor a step folder" in capsys.readouterr().err
    file = tmp_path / "model.yml"
    file.write_text(yaml.safe_dump({**FORK_CONFIG, "pos_emb": "kerple_log"}))
    assert convert.main([str(source), str(tmp_path / "to"), "--config", str(file)]) == 0
    assert "Adam starts fresh" in capsys.readouterr().out
    module = stored(tmp_path / "to" / "global_step0")["module"]
    assert "sequential.2.mlp.linear1.weight" in module


def test_errors_are_one_line_and_an_exit_code(convert, trained, tmp_path, capsys):
    def fails(*arguments: str) -> tuple[int, str]:
        code = convert.main([*arguments])
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and error.startswith("error: ")
        return code, error

    to = str(tmp_path / "to")
    code, error = fails(str(tmp_path / "nowhere"), to)
    assert code == 1 and "no such checkpoint folder" in error
    code, error = fails(str(trained), to, "--tensor-parallel", "3")
    assert code == 2 and "choose --tensor-parallel 1 or 2" in error
    assert not Path(to).exists()
    assert convert.main([str(trained), to]) == 0
    capsys.readouterr()
    code, error = fails(str(trained), to)
    assert code == 1 and "global_step12: exists" in error
    with pytest.raises(SystemExit) as caught:
        convert.main([str(trained)])
    assert caught.value.code == 2


def test_weights_of_an_unknown_dtype_need_one_named(convert, trained, tmp_path, capsys):
    source = tmp_path / "wide"
    model, config = load_model(trained).double(), load_run_config(trained)
    export.export(model, source, step=1, config=config, form=Form())
    file = source / "global_step1" / "mp_rank_00_model_states.pt"
    content = safe_load(file)
    content["module"] = {key: tensor.double() for key, tensor in content["module"].items()}
    torch.save(content, file)
    assert convert.main([str(source), str(tmp_path / "to")]) == 2
    assert "choose --dtype" in capsys.readouterr().err


def test_the_script_runs_from_anywhere(trained, tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(trained), "to", "--fresh-optimizer"],
        cwd=tmp_path,
        env=tools.clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "to" / "latest").read_text() == "global_step12"
