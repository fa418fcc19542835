"""Study files: what is refused and how, what the shipped ones amount to, and how steps are run."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import studies_tools as tools

from megatron_patches.analysis.rows import append_rows
from megatron_patches.config import ConfigError, compose, config_sha
from megatron_patches.config.reading import flow_yaml
from megatron_patches.studies import ROOT, carry_out, cost, load_study, make_plan
from megatron_patches.studies.execute import slots
from megatron_patches.studies.plan import Plan
from megatron_patches.studies.slurm import script
from megatron_patches.studies.steps import Step

SHIPPED = {file.stem: file for file in sorted((ROOT / "configs/sweeps").glob("*.yml"))}
# runs, cells: by hand from the papers' tables
SIZES = {
    "table3": (6 * 3 * 5, 6 * 2 * 2),
    "table5": (2 * 3 * 5, 6 * 2 * 2),
    "table6": (4 * 3 * 5, 6 * 2 * 2),
    "table9_1024": (3 * 3 * 5, 5 * 2 * 2),
    "table9_1b3": (3 * 3 * 5, 6 * 2 * 2),
    "wikitext103": (2 * 5 * 2, 5 * 2),
    "factorial": (2 * 3 * 3 * 3 * 2, 6 * 2),
    "cpu_mini": (14 * 3 * 3 * 2, 8),
    "cpu_mini_early": (5 * 3 * 3, 3 * 2),
    "cpu_mini_position": (8 * 3 * 3, 2 * 2),
    "cpu_mini_last": (14 * 3 * 3, 6),
    "cpu_mini_retrieval": (8 * 3 * 3, 2 * 5 * 5),
    "cpu_mini_rotary": (3, 5 * 6),
    "cpu_mini_temperature": (3, 4 * 6),
    "cpu_mini_blocks": (3 * 3, 6),
    "cpu_mini_far": (5 * 3, 2),
    "cpu_zoo": (12 * 3, 8),
    "cpu_zoo_far": (10 * 3, 2),
    "cpu_zoo_retrieval": (12 * 3, 2 * 5 * 5),
}


def test_all_studies_are_shipped():
    assert set(SIZES) <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_studies_load_and_compose(name):
    plan = make_plan(load_study(SHIPPED[name]))
    assert len({run.name for run in plan.runs}) == len(plan.runs)
    assert len({run.sha for run in plan.runs}) == len(plan.runs)
    if name in SIZES:
        runs, asked = SIZES[name]
        assert len(plan.runs) == runs
        assert all(plan.cells(run) == asked for run in plan.runs)
    for run in plan.runs[:2]:  # the command composes to what was planned
        words = run.train.arguments
        sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        files = words[words.index("train.py") + 1 :]
        config = compose([ROOT / file for file in files], sets)
        assert config == run.config and config_sha(config) == run.sha
        assert config.save_dir == Path("checkpoints") / (plan.study.follows or name) / run.name


def test_what_the_shipped_studies_train():
    mini = make_plan(load_study(SHIPPED["cpu_mini"]))
    kerple = {"log", "log3", "power", "power_weight", "weight", "weight1", "gauss2", "gauss3"}
    others = {"alibi", "rpe", "rotary", "sinusoidal", "learned", "none"}
    assert set(mini.study.methods) == {f"kerple_{kernel}" for kernel in kerple} | others
    for run in mini.runs:
        config = run.config
        batch = config.train_micro_batch_size_per_gpu
        assert config.seq_length * batch == 2048 and config.train_iters == 2000
        assert config.lr_decay_iters == 2000 and config.max_position_embeddings == config.seq_length
    paper = make_plan(load_study(SHIPPED["table3"])).runs[0].config
    assert (paper.train_iters, paper.train_batch_size, paper.seq_length) == (50000, 32, 512)
    assert paper.is_bf16 and paper.weight_decay == 0.0
    factorial = make_plan(load_study(SHIPPED["factorial"]))
    found = {
        (r.config.weight_decay, r.config.position_weight_decay, r.config.position_sharing)
        for r in factorial.runs
    }
    assert len(found) == 6
    control = {r.sha for r in mini.runs}
    ours = [r for r in factorial.runs if r.levels == {"decay": "none", "sharing": "shared"}]
    assert len(ours) == 2 * 3 * 3 and {r.sha for r in ours} <= control
    assert all(r.config.variant == dict(r.levels) for r in factorial.runs)
    assert not any(r.config.variant for r in mini.runs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metods": ["alibi"]}, ["unknown key `metods`", "nearest: `methods`"]),
        ({"methods": None}, ["lacks the required `methods`"]),
        ({"methods": "alibi"}, ["`methods: alibi` expects a list, not a text"]),
        ({"methods": ["kerple_lgo"]}, ["configs/method/kerple_lgo.yml", "`kerple_log`"]),
        ({"cluster": "cpus"}, ["`cluster: cpus`", "nearest: `cpu`"]),
        ({"seeds": [1, 1]}, ["`seeds` lists 1 twice"]),
        ({"seeds": ["1"]}, ["expects a whole number"]),
        ({"eval": {"lengths": [16], "protocol": "last"}}, ["`eval.protocol`", "`protocols`"]),
        (
            {"eval": {"lengths": [16], "protocols": ["lasst"]}},
            ["`eval.protocols: lasst`", "`last`"],
        ),
        ({"eval": {"lengths": [16], "protocols": ["last"]}}, ["needs `eval.last_k`"]),
        ({"eval": {"lengths": [16], "last_k": 4}}, ["belongs to protocol `last`"]),
        ({"eval": {"lengths": [16], "protocols": ["sliding"], "stride": 20}}, ["would skip"]),
        ({"overrides": {"hiden_size": 8}}, ["`overrides.hiden_size`", "`hidden_size`"]),
        ({"overrides": {"seed": 8}}, ["`overrides.seed`: the study's key `seeds` decides"]),
        ({"length_overrides": {"99": {}}}, ["99 is none of `train_lengths` 16"]),
        ({"output": "elsewhere/x"}, ["must be a folder under results/"]),
        ({"output": "results/../elsewhere"}, ["must be a folder under results/"]),
        ({"name": "other"}, ["unknown key `name`"]),
    ],
)
def test_refusals_name_place_and_key(tmp_path, changes, words):
    study = tools.write_study(tmp_path, **changes)
    with pytest.raises(ConfigError) as error:
        load_study(study)
    for word in (str(study), *words):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (
            {"overrides": {"train_iters": "many"}},
            "toy, run alibi-text-1: --set: `train_iters: many`",
        ),
        ({"factors": {"f": {"a": {"train_iters": 3}}}}, "by `overrides` and by `factors.f.a`"),
    ],
)
def test_what_does_not_compose_names_the_run(tmp_path, changes, word):
    with pytest.raises(ConfigError) as error:
        make_plan(load_study(tools.write_study(tmp_path, **changes)))
    assert word in str(error.value)


def test_factors_and_lengths_are_crossed_and_named(tmp_path):
    study = tools.write_study(
        tmp_path,
        train_lengths=[16, 8],
        length_overrides={8: {"train_micro_batch_size_per_gpu": 8}},
        factors={
            "x": {"a": {}, "b": {"weight_decay": 0.1}},
            "y": {"c": {}, "d": {"warmup": 1e-05}},
        },
    )
    plan = make_plan(load_study(study))
    assert len(plan.runs) == 2 * 2 * 2 * 4
    assert [run.name for run in plan.runs[:3]] == [
        *("alibi-text-1-16-a-c", "rotary-text-1-16-a-c", "alibi-text-1-16-a-d"),
    ]
    run = next(run for run in plan.runs if run.name == "rotary-text-2-8-b-d")
    assert (run.config.weight_decay, run.config.warmup) == (0.1, 1e-05)
    assert run.config.seq_length * run.config.train_micro_batch_size_per_gpu == 64
    only = make_plan(load_study(study), ["*-1-16-a-?"])
    assert {run.name[-3:] for run in only.runs} == {"a-c", "a-d"} and len(only.runs) == 4
    with pytest.raises(ConfigError, match="no run of toy"):
        make_plan(load_study(study), ["nothing"])


@pytest.mark.parametrize(
    "value",
    [1, 0.1, 1e-05, 1e22, True, None, "text", "949,50,1", "off", [0.9, 1e-3], {"a": 1e-8}]
    + ["a/\u00e9\U0001f600"],
)
def test_override_values_survive_the_command_line(value):
    from megatron_patches.config.reading import read_override

    assert read_override(f"key={flow_yaml(value)}").value == value


def test_what_counts_as_finished(tmp_path):
    study = tools.write_study(tmp_path)
    run, other = make_plan(load_study(study)).runs[:2]

    def open_cells(length, **changes):
        cell = {"protocol": "nonoverlap", "eval_length": length, **changes}
        append_rows(tmp_path / "results" / "rows.jsonl", [tools.row(run, **cell)])
        plan = make_plan(load_study(study))
        assert plan.open_cells[other.name, "eval nonoverlap valid"] == 2
        assert bool(plan.steps(run)) == bool(plan.open_cells[run.name, "eval nonoverlap valid"])
        return plan.open_cells[run.name, "eval nonoverlap valid"]

    assert open_cells(16, split="test") == 2
    assert open_cells(16, config_sha="another") == 2
    assert open_cells(16, step=2) == 2  # scored before the training ended
    assert open_cells(16) == 1
    assert open_cells(32, status="failed") == 1  # to be tried again
    assert open_cells(32, status="refused") == 0  # that is the answer


def test_runs_that_train_the_same_model_are_refused(tmp_path):
    levels = {"a": {}, "b": {"attention_impl": "reference"}}  # how it is computed, not what
    with pytest.raises(ConfigError) as error:
        make_plan(load_study(tools.write_study(tmp_path, factors={"how": levels})))
    assert "toy: alibi-text-1-a and alibi-text-1-b train the same model" in str(error.value)


def test_gpus_take_a_run_each(monkeypatch):
    plan = make_plan(load_study(SHIPPED["table3"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert slots(plan, None, None) == [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "5"}]
    text = script(plan, cost.Cost(0, None, (), None))
    assert "#SBATCH --gpus=1\n" in text and "--array=0-89\n" in text and "/work" not in text


# ---- carrying out, with commands that take no time -----------------------------------------------


def with_commands(plan: Plan, train: str, evaluate: str = "pass") -> Plan:
    """The plan with Python code in place of its commands; `RUN` stands for the run's name."""

    def changed(run):
        code = [text.replace("RUN", run.name) for text in (train, evaluate)]
        steps = tuple(Step(("-c", code[1]), s.protocol, s.split) for s in run.evaluations)
        return replace(run, train=Step(("-c", code[0])), evaluations=steps)

    return replace(plan, runs=tuple(map(changed, plan.runs)))


def test_a_failure_is_recorded_and_the_rest_goes_on(tmp_path):
    plan = make_plan(load_study(tools.write_study(tmp_path)))
    train = "import sys; 'RUN' == 'alibi-text-1' and sys.exit('error: on purpose')"
    evaluate = f"open({str(tmp_path)!r} + '/RUN', 'w'); assert 'RUN' != 'rotary-text-2', 'why'"
    said: list[str] = []
    failures = carry_out(with_commands(plan, train, evaluate), [{}, {}], said.append)
    found = sorted((f.run, f.step, f.exit_code, f.message) for f in failures)
    assert found == [
        ("alibi-text-1", "train", 1, "error: on purpose"),
        ("rotary-text-2", "eval nonoverlap valid", 1, "AssertionError: why"),
    ]
    lines = (tmp_path / "results" / "failed.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["run"] for line in lines) == [row[0] for row in found]
    assert not (tmp_path / "alibi-text-1").exists()  # no model, so nothing to score
    assert (tmp_path / "alibi-text-2").exists()
    assert sum(text.startswith("[") for text in said) == 4
    # These trainings leave no log: that, too, is said.
    assert sum("no line of training.jsonl" in text for text in said) == 4


def test_runs_go_side_by_side_and_no_more_than_asked(tmp_path):
    plan = make_plan(load_study(tools.write_study(tmp_path)))
    mark = f"import time; open({str(tmp_path)!r} + '/times', 'a').write(TEXT + chr(10))"
    train = (
        mark.replace("TEXT", "f'{time.time()} 1'")
        + "; time.sleep(0.6); "
        + mark.replace("TEXT", "f'{time.time()} -1'")
    )
    assert carry_out(with_commands(plan, train), [{}, {}], lambda _: None) == []
    events = sorted(
        tuple(map(float, s.split())) for s in (tmp_path / "times").read_text().split("\n") if s
    )
    levels = [sum(step for _, step in events[: i + 1]) for i in range(len(events))]
    assert max(levels) == 2


def test_a_second_sweep_of_the_study_waits_its_turn(tmp_path):
    plan = make_plan(load_study(tools.write_study(tmp_path)))
    slow = with_commands(plan, "import time; time.sleep(1.5)")
    thread = threading.Thread(target=carry_out, args=(slow, [{}] * 4, lambda _: None))
    thread.start()
    while not list(tmp_path.glob("runs/*/output.txt")):
        time.sleep(0.01)
    with pytest.raises(ConfigError, match="still at work"):
        carry_out(slow, [{}], lambda _: None)
    thread.join()


def test_missing_data_stop_a_sweep_before_it_starts(tmp_path):
    study = tools.write_study(tmp_path)
    (tmp_path / "valid.idx").unlink()
    plan = make_plan(load_study(study))
    with pytest.raises(ConfigError, match="dataset text: .*valid.bin and .idx are missing"):
        carry_out(plan, [{}], lambda _: None)
    assert not (tmp_path / "runs").exists()
