"""Studies that ask the runs of another one more, and the line that each training leaves."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import studies_tools as tools
import yaml

from data_prep.indexed import IndexedDataset, write_indexed
from megatron_patches.analysis.rows import append_rows
from megatron_patches.analysis.training_rows import read_training
from megatron_patches.config import ConfigError
from megatron_patches.studies import carry_out, cost, load_study, make_plan, record
from megatron_patches.studies.execute import _locked
from megatron_patches.studies.slurm import script


def follow(folder, name="more", **keys):
    path = folder / f"{name}.yml"
    study = {"follows": "toy", "output": str(folder / name), **keys}
    study.setdefault("eval", {"lengths": [16]})
    path.write_text(yaml.safe_dump(study))
    return path


def test_a_study_that_follows_asks_the_same_runs(tmp_path):
    lengths = {"train_lengths": [16, 8], "length_overrides": {8: {"warmup": 0.1}}}
    toy = make_plan(load_study(tools.write_study(tmp_path, **lengths)))
    asked = {"lengths": [32], "protocols": ["position"]}
    plan = make_plan(load_study(follow(tmp_path, train_lengths=[16], seeds=[2], eval=asked)))
    wanted = [run for run in toy.runs if run.config.seed == 2 and run.config.seq_length == 16]
    assert [run.name for run in plan.runs] == [run.name for run in wanted]
    assert [run.name for run in plan.runs] == ["alibi-text-2-16", "rotary-text-2-16"]
    assert [run.train for run in plan.runs] == [run.train for run in wanted]
    assert [(run.sha, run.folder) for run in plan.runs] == [(r.sha, r.folder) for r in wanted]
    (step,) = plan.runs[0].evaluations
    assert f"{tmp_path}/more/rows.jsonl" in step.arguments and plan.cells(plan.runs[0]) == 1
    # Rows of the one study are no rows of the other.
    append_rows(tmp_path / "results" / "rows.jsonl", [tools.row(wanted[0], eval_length=32)])
    assert make_plan(load_study(follow(tmp_path, eval=asked))).open_cells[
        wanted[0].name, step.title
    ]
    again = make_plan(load_study(follow(tmp_path, train_lengths=[8], eval=asked)))
    assert [run.config.warmup for run in again.runs] == [0.1] * 4


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"follows": "toi"}, ["`follows: toi`: no file"]),
        ({"base": "tiny"}, ["`base`: `follows: toy` decides this"]),
        ({"checkpoints": "x"}, ["`checkpoints`: `follows: toy` decides this"]),
        ({"overrides": {"train_iters": 5}}, ["`overrides`: `follows: toy` decides this"]),
        ({"methods": ["kerple_log"]}, ["`methods: kerple_log`: toy has no such runs"]),
        ({"seeds": [3]}, ["`seeds: 3`: toy has no such runs"]),
        ({"train_lengths": [99]}, ["`train_lengths: 99`: toy has no such runs"]),
        ({"seed": [3]}, ["unknown key `seed`", "`seeds`"]),
    ],
)
def test_what_a_follower_may_not_say(tmp_path, keys, words):
    tools.write_study(tmp_path)
    study = follow(tmp_path, **keys)
    with pytest.raises(ConfigError) as error:
        load_study(study)
    for word in (str(study), *words):
        assert word in str(error.value)


def test_a_follower_waits_for_a_sweep_of_the_same_runs(tmp_path):
    plan = make_plan(load_study(tools.write_study(tmp_path)))
    follower = make_plan(load_study(follow(tmp_path)))
    with _locked(plan.study), pytest.raises(ConfigError, match="sweep of these runs"):
        carry_out(follower, [{}], lambda _: None)


def test_followers_do_not_chain(tmp_path):
    tools.write_study(tmp_path)
    follow(tmp_path)
    with pytest.raises(ConfigError, match="it follows toy: name that"):
        load_study(follow(tmp_path, "third", follows="more"))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("more", "more", ["`follows: more`: a study cannot follow itself"]),
        ("other", "more", ["`follows: other`: it follows more: name that"]),
    ],
)
def test_a_circle_of_followers_is_an_error_in_its_place(tmp_path, first, second, words):
    tools.write_study(tmp_path)
    study = follow(tmp_path, "more", follows=first)
    follow(tmp_path, "other", follows=second)
    with pytest.raises(ConfigError) as error:
        load_study(study)
    for word in (f"{study}:", *words):
        assert word in str(error.value)


def test_scoring_alone_needs_no_training_text(tmp_path):
    study = tools.write_study(tmp_path, seeds=[1])
    for run in make_plan(load_study(study)).runs:
        finish(run)
    for name in ("train.bin", "valid.bin"):
        (tmp_path / name).unlink()
    plan = make_plan(load_study(tmp_path / "toy.yml"))
    assert [len(plan.steps(run)) for run in plan.runs] == [1, 1]
    assert plan.missing_data() == {"text": [f"{tmp_path}/valid"]}
    (plan.runs[1].folder / "latest").unlink()
    plan = make_plan(load_study(tmp_path / "toy.yml"))
    assert set(plan.missing_data()["text"]) == {f"{tmp_path}/valid", f"{tmp_path}/train"}


# ---- training.jsonl ------------------------------------------------------------------------------


def finish(run, losses=(4.0, 3.5)):
    """What a finished training leaves, as far as its record needs it."""
    run.folder.mkdir(parents=True)
    (run.folder / "config.yml").write_text(
        yaml.safe_dump(run.config.model_dump(mode="json", exclude_unset=True))
    )
    data = IndexedDataset(run.config.train_data_paths[0]).fingerprint
    described = {"data": data, "tokenizer": "tok-a", "config_sha": run.sha, "git_sha": "g"}
    described |= {"engine": "standalone", "parameters": 99, "machine": "a CPU"}
    (run.folder / "run.json").write_text(json.dumps(described))
    points = [
        {
            **{"iteration": 2 * number, "lm_loss": loss, "learning_rate": 1e-3},
            **{"tokens": 128 * number, "tokens_per_second": 100.0},
        }
        for number, loss in enumerate(losses, 1)
    ]
    (run.folder / "log.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    (run.folder / "latest").write_text("global_step4")


def test_every_trained_run_gets_one_line(tmp_path):
    study = tools.write_study(tmp_path)
    first, second = make_plan(load_study(study)).runs[:2]
    finish(first)
    said: list[str] = []
    file = tmp_path / "results" / "training.jsonl"
    assert record(make_plan(load_study(study)), said.append) == 1
    finish(second)
    assert record(make_plan(load_study(study)), said.append) == 1
    assert record(make_plan(load_study(study)), said.append) == 0
    assert [r.config_sha for r in read_training(file)] == [first.sha, second.sha]
    assert [r.lm_loss for r in read_training(file)] == [[4.0, 3.5]] * 2 and said == []
    # A study that asks the same runs more has no lines of its own: what it trains is the other's.
    assert record(make_plan(load_study(follow(tmp_path))), said.append) == 0
    third = make_plan(load_study(study)).runs[2]
    finish(third)
    assert record(make_plan(load_study(follow(tmp_path))), said.append) == 1
    assert [r.config_sha for r in read_training(file)] == [first.sha, second.sha, third.sha]
    assert not (tmp_path / "more").exists()
    # With a results folder from the command line all of it goes there.
    moved = load_study(follow(tmp_path)).with_output(tmp_path / "mine")
    assert record(make_plan(moved), said.append) == 3
    assert len(read_training(tmp_path / "mine" / "training.jsonl")) == 3
    assert len(read_training(file)) == 3


def test_a_run_that_is_trained_anew_on_another_text_gets_its_own_line(tmp_path):
    study = tools.write_study(tmp_path)
    run = make_plan(load_study(study)).runs[0]
    finish(run)
    assert record(make_plan(load_study(study)), print) == 1
    shutil.rmtree(run.folder)
    sidecar = {"tokenizer": {"fingerprint": "tok-a", "vocab_size": tools.ENTRIES}}
    tokens = [np.arange(400) % tools.ENTRIES]
    write_indexed(tmp_path / "train", tokens, vocab_size=60, sidecar=sidecar, overwrite=True)
    finish(run, losses=(3.0, 2.0))
    assert record(make_plan(load_study(study)), print) == 1
    assert record(make_plan(load_study(study)), print) == 0
    first, second = read_training(tmp_path / "results" / "training.jsonl")
    assert first.config_sha == second.config_sha and first.data != second.data
    assert (first.lm_loss, second.lm_loss) == ([4.0, 3.5], [3.0, 2.0])


def test_a_run_without_its_log_is_named(tmp_path):
    study = tools.write_study(tmp_path)
    run = make_plan(load_study(study)).runs[0]
    finish(run, losses=(4.0,))
    said: list[str] = []
    assert record(make_plan(load_study(study)), said.append) == 0
    assert len(said) == 1 and said[0].startswith("alibi-text-1: no line of training.jsonl: ")
    assert "ends at iteration 2 of 4" in said[0]


def test_tasks_of_an_array_record_their_training(tmp_path):
    plan = make_plan(load_study(tools.write_study(tmp_path)))
    text = script(replace(plan, runs=plan.runs[:1]), cost.Cost(0, 0, (), None))
    line = f"  step alibi-text-1 record scripts/sweep.py {tmp_path}/toy.yml --record --only alibi-text-1"
    assert f"{line} || true\n" in text
    assert text.index(" train deepy.py") < text.index(line) < text.index("'eval nonoverlap valid'")
    follower = script(make_plan(load_study(follow(tmp_path))), cost.Cost(0, 0, (), None))
    assert (
        f"record scripts/sweep.py {tmp_path}/more.yml --record --only alibi-text-1 ||" in follower
    )
    moved = make_plan(load_study(tmp_path / "toy.yml").with_output(tmp_path / "mine"))
    text = script(moved, cost.Cost(0, 0, (), None))
    assert f"{tmp_path}/toy.yml --output {tmp_path}/mine --record --only alibi-text-1 ||" in text
