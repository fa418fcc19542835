"""What a study asks beyond one protocol: windows, the authors' evaluation, retrieval, follow-ups."""

from __future__ import annotations

import json

import pytest
import studies_tools as tools

from megatron_patches import positions
from megatron_patches.analysis.cuts import PAPER_WINDOWS
from megatron_patches.analysis.retrieval_rows import append_retrieval
from megatron_patches.analysis.rows import append_rows
from megatron_patches.config import ConfigError
from megatron_patches.studies import (
    cost,
    estimate,
    load_study,
    make_plan,
    report,
)
from megatron_patches.studies import plan as plans
from megatron_patches.studies.kernels import evaluation_options
from megatron_patches.studies.progress import check_cut
from megatron_patches.studies.questions import ROWS_A_CELL
from megatron_patches.studies.slurm import script
from megatron_patches.studies.speed import operations

RETRIEVAL = {"tasks": ["passkey", "copy"], "lengths": [16, 32], "depths": [0, 0.5], "samples": 3}


def plan_of(folder, **asked):
    return make_plan(load_study(tools.write_study(folder, eval=asked)))


def test_each_window_is_a_step_of_its_own(tmp_path):
    asked = {"lengths": [16], "protocols": ["position"], "window_widths": ["none", 8]}
    asked["max_tokens"] = 129
    plan = plan_of(tmp_path, **asked)
    run = plan.runs[0]
    plain, windowed = run.evaluations
    assert [step.title for step in plan.steps(run)] == [
        "train",
        "eval position valid",
        "eval position valid window 8",
    ]
    assert "--window" not in plain.arguments
    assert windowed.arguments[windowed.arguments.index("--window") + 1] == "8"
    rows = tmp_path / "results" / "rows.jsonl"
    cut = {"longest": 16}
    append_rows(rows, [tools.row(run, options={"sliding_window_width": 9}, asked=cut)])
    assert sum(plan_of(tmp_path, **asked).open_cells.values()) == 8
    append_rows(rows, [tools.row(run, options={"sliding_window_width": 8}, asked=cut)])
    left = plan_of(tmp_path, **asked)
    assert left.open_cells[run.name, windowed.title] == 0
    assert left.open_cells[run.name, plain.title] == 1
    append_rows(rows, [tools.row(run, asked=cut)])
    assert plan_of(tmp_path, **asked).steps(run) == []


def test_blocks_are_a_window_like_others(tmp_path):
    asked = {"lengths": [16], "protocols": ["position"], "max_tokens": 129}
    asked["window_widths"] = ["none", "blockwise:4"]
    plan = plan_of(tmp_path, **asked)
    run = plan.runs[0]
    step = run.evaluations[1]
    assert step.title == "eval position valid window blockwise:4"
    assert "--window blockwise:4 " in " ".join(step.arguments)
    row = tools.row(run, options={"sliding_window_width": "blockwise:4"}, asked={"longest": 16})
    append_rows(tmp_path / "results" / "rows.jsonl", [row])
    cells = plan_of(tmp_path, **asked).open_cells
    assert cells[run.name, step.title] == 0 and cells[run.name, "eval position valid"] == 1
    assert estimate(plan, 10.0).seconds is not None
    whole, blocks, sliding = (
        operations(run.config, (length, window), 60)
        for length, window in ((1024, None), (1024, "blockwise:4"), (1024, 8))
    )
    assert blocks < sliding < whole


def test_options_of_the_method_are_steps_of_their_own(tmp_path, monkeypatch):
    asked = {"lengths": [16], "protocols": ["position"], "max_tokens": 129, "retrieval": RETRIEVAL}
    asked["position_options"] = ["none", {"scaling": "yarn", "factor": 8.0}]
    known = {"alibi": ["factor", "scaling"], "rotary": ["factor", "scaling"]}
    monkeypatch.setattr(plans, "evaluation_options", lambda methods: known)
    plan = plan_of(tmp_path, **asked)
    run = plan.runs[0]
    plain, read, found, found_read = run.evaluations
    assert [step.title for step in run.evaluations] == [
        "eval position valid",
        "eval position valid, scaling yarn, factor 8",
        "retrieval valid",
        "retrieval valid, scaling yarn, factor 8",
    ]
    for step in (read, found_read):
        words = " ".join(step.arguments)
        # the order of the file, which YAML's writer sorts
        assert "--position-option factor=8 --position-option scaling=yarn " in words
    assert not any("--position-option" in step.arguments for step in (plain, found))
    rows = tmp_path / "results" / "rows.jsonl"
    cut = {"longest": 16}
    for options, left in (
        ({"factor": 4, "scaling": "yarn"}, 1),
        ({"factor": 8, "scaling": "yarn"}, 0),
    ):
        append_rows(rows, [tools.row(run, options={"eval_position_options": options}, asked=cut)])
        cells = plan_of(tmp_path, **asked).open_cells
        assert cells[run.name, read.title] == left and cells[run.name, plain.title] == 1
    assert "read with     none; {factor: 8, scaling: yarn}\n" in report(
        plan, estimate(plan, 10.0), 2, "the CPU"
    )
    known["alibi"] = []
    with pytest.raises(ConfigError, match="trained alibi is not read with another factor, scaling"):
        plan_of(tmp_path, **asked)


def test_methods_say_themselves_what_may_be_set():
    found = evaluation_options(["alibi", "kerple_power_ap_", "rotary"])
    assert found["alibi"] == found["kerple_power_ap_"] == []
    assert found["rotary"] == list(positions.method_class("rotary").evaluation_options)
    for name in positions.names():
        assert set(positions.method_class(name).evaluation_options) <= set(
            positions.options(name)
        ), name


def test_a_model_trained_with_a_window_is_told_apart_by_it(tmp_path):
    study = tools.write_study(
        tmp_path,
        overrides={"train_iters": 4, "sliding_window_width": 8},
        eval={"lengths": [16], "protocols": ["position"], "max_tokens": 129},
    )
    run = make_plan(load_study(study)).runs[0]
    for options, left in (({}, 1), ({"sliding_window_width": 8}, 0)):
        row = tools.row(run, options=options, asked={"longest": 16})
        append_rows(tmp_path / "results" / "rows.jsonl", [row])
        assert make_plan(load_study(study)).open_cells[run.name, "eval position valid"] == left


def test_paper_asks_for_its_windows_and_not_for_a_cut(tmp_path):
    asked = {"lengths": [16, 32], "protocols": ["nonoverlap", "paper"], "max_tokens": 129}
    plan = plan_of(tmp_path, **asked)
    run = plan.runs[0]
    side, paper = run.evaluations
    assert "--max-tokens" in side.arguments and "--max-tokens" not in paper.arguments
    assert "--paper-windows" not in paper.arguments
    few = plan_of(tmp_path, **asked, paper_windows=5)
    words = few.runs[0].evaluations[1].arguments
    assert words[words.index("--paper-windows") + 1] == "5"
    rows = tmp_path / "results" / "rows.jsonl"
    five = tools.row(run, protocol="paper", windows=5, asked={"paper_windows": 5})
    append_rows(rows, [five])
    title = "eval paper valid"
    assert plan_of(tmp_path, **asked).open_cells[run.name, title] == 2
    assert plan_of(tmp_path, **asked, paper_windows=5).open_cells[run.name, title] == 1
    append_rows(rows, [tools.row(run, protocol="paper", windows=PAPER_WINDOWS)])
    assert plan_of(tmp_path, **asked).open_cells[run.name, title] == 1


def test_a_number_of_paper_windows_does_not_join_another(tmp_path):
    asked = {"lengths": [16], "max_tokens": 129}
    plan = plan_of(tmp_path, **asked)
    file = tmp_path / "results" / "cut.json"
    cut = {"longest": 16}
    append_rows(file.with_name("rows.jsonl"), [tools.row(plan.runs[0], asked=cut)])
    check_cut(plan.study, write=True)
    more = plan_of(tmp_path, **asked, protocols=["nonoverlap", "paper"], paper_windows=5)
    check_cut(more.study, write=True)
    assert json.loads(file.read_text()) == {"longest": 16, "max_tokens": 129, "paper_windows": 5}
    with pytest.raises(ConfigError, match="`eval.paper_windows` 5, the study has 320"):
        plan_of(tmp_path, **asked, protocols=["nonoverlap", "paper"])


@pytest.mark.parametrize(
    ("asked", "cut"),
    [
        ({"protocols": ["paper"], "lengths": [16]}, {"paper_windows": 320}),
        ({"protocols": ["sliding"], "lengths": [16, 32], "stride": 8}, {"max_tokens": None}),
        (
            {"protocols": ["last"], "lengths": [16], "last_k": 4},
            {"max_tokens": None, "longest": 16},
        ),
        ({"protocols": [], "retrieval": RETRIEVAL}, None),
    ],
)
def test_the_cut_holds_what_decides_it_and_no_more(tmp_path, asked, cut):
    file = tmp_path / "results" / "cut.json"
    check_cut(plan_of(tmp_path, **asked).study, write=True)
    assert (json.loads(file.read_text()) if file.is_file() else None) == cut
    assert [path.name for path in file.parent.glob(".*")] == []


def test_a_cut_without_rows_binds_nobody(tmp_path):
    file = tmp_path / "results" / "cut.json"
    file.parent.mkdir()
    file.write_text('{"longest": 64, "max_tokens": 500}')
    asked = {"lengths": [16], "max_tokens": 129}
    check_cut(plan_of(tmp_path, **asked).study, write=True)
    assert json.loads(file.read_text()) == {"longest": 16, "max_tokens": 129}
    # The file of the measured study, which may not change under its rows.
    file.with_name("rows.jsonl").write_text("")
    assert plan_of(tmp_path, lengths=[32], max_tokens=99)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"longest": 3', "not JSON"),
        ("[1]", "an object"),
        ('{"note": [[]]}', "an object of whole numbers"),
        ('{"longest": true}', "an object of whole numbers"),
        ("[" + "1," * 3000 + "1]", r"found \[1, 1, .{,80}: restore"),
    ],
)
def test_a_damaged_cut_is_named(tmp_path, text, word):
    file = tmp_path / "results" / "cut.json"
    plan = plan_of(tmp_path, lengths=[16], max_tokens=129)
    append_rows(file.with_name("rows.jsonl"), [tools.row(plan.runs[0], asked={"longest": 16})])
    file.write_text(text)
    with pytest.raises(ConfigError, match=word) as error:
        plan_of(tmp_path, lengths=[16], max_tokens=129)
    assert str(file) in str(error.value)


def test_retrieval_is_a_step_and_needs_no_protocol(tmp_path):
    asked = {"protocols": [], "retrieval": RETRIEVAL}
    plan = plan_of(tmp_path, **asked)
    run = plan.runs[0]
    (step,) = run.evaluations
    assert (step.title, step.trains) == ("retrieval valid", False) and plan.cells(run) == 8
    assert list(step.arguments) == [
        *("scripts/retrieval.py", "--checkpoint", f"{tmp_path}/runs/alibi-text-1"),
        *("--tasks", "passkey", "copy", "--lengths", "16", "32", "--depths", "0.0", "0.5"),
        *("--split", "valid", "--samples", "3", "--resume"),
        *("--output", f"{tmp_path}/results/retrieval.jsonl"),
    ]
    rows = tmp_path / "results" / "retrieval.jsonl"

    def left(task, source, **changes):
        append_retrieval(rows, [tools.retrieved(run, task, source, **changes)])
        return plan_of(tmp_path, **asked).open_cells[run.name, "retrieval valid"]

    assert left("passkey", "digits", eval_length=64) == 8
    assert left("passkey", "digits", split="test") == 8
    assert left("passkey", "digits", status="failed") == 8
    assert left("passkey", "digits", options={"sliding_window_width": 4}) == 8
    assert left("passkey", "digits") == 7
    assert left("copy", "random") == 7  # a copy has two sources
    assert left("copy", "text") == 6
    assert left("passkey", "digits", depth=0, status="refused") == 5
    with pytest.raises(KeyError):  # nothing of perplexity is asked for
        _ = plan.open_cells[run.name, "eval nonoverlap valid"]
    assert "step alibi-text-1 'retrieval valid' scripts/retrieval.py" in script(
        plan, cost.Cost(0, 0, (), None)
    )


def test_retrieval_of_each_split_and_window_is_a_step_of_its_own(tmp_path):
    asked = {"protocols": [], "retrieval": RETRIEVAL}
    asked |= {"splits": ["valid", "test"], "window_widths": ["none", 8]}
    plan = plan_of(tmp_path, **asked)
    run = plan.runs[0]
    assert [step.title for step in run.evaluations] == [
        *("retrieval valid", "retrieval valid window 8"),
        *("retrieval test", "retrieval test window 8"),
    ]
    assert plan.cells(run) == 4 * 8
    told = [
        (words[words.index("--split") + 1], "--window" in words)
        for words in (step.arguments for step in run.evaluations)
    ]
    assert told == [("valid", False), ("valid", True), ("test", False), ("test", True)]
    windowed = {"split": "test", "options": {"sliding_window_width": 8}}
    row = tools.retrieved(run, "passkey", "digits", **windowed)
    append_retrieval(tmp_path / "results" / "retrieval.jsonl", [row])
    found = plan_of(tmp_path, **asked).open_cells
    assert [found[run.name, step.title] for step in run.evaluations] == [8, 8, 8, 7]
    (tmp_path / "test.bin").unlink()
    assert plan.missing_data() == {"text": [f"{tmp_path}/test"]}


def test_copies_have_as_many_sources_as_the_tasks_say():
    from megatron_patches.standalone.retrieval_tasks import SPANS

    assert {"passkey": 1, "copy": len(SPANS)} == ROWS_A_CELL


def test_cost_of_windows_paper_and_retrieval(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "_describe", lambda run: cost.Model(16, "a model", 1.5))
    asked = {"lengths": [16, 32], "protocols": ["nonoverlap", "paper"], "max_tokens": 129}
    asked |= {"window_widths": ["none", 8], "retrieval": RETRIEVAL}
    plan = plan_of(tmp_path, **asked)
    found = estimate(plan, 10.0)
    paper = 320 * 48
    # 3 rows a place (copies have two sources), 2 depths, 3 samples, each with its control
    retrieval = 3 * 2 * 3 * 2 * 48
    assert found.evaluation_tokens == 4 * 2 * (129 * 2 + paper + retrieval)
    text = report(plan, found, 2, "the CPU")
    assert "windows       none 8\n" in text
    assert "the first 129 tokens of it; paper: 320 windows a length\n" in text
    assert "retrieval     passkey copy at 16 32, depths 0.0 0.5, 3 samples\n" in text
    assert "0 of 96 cells" in text  # 4 runs x 2 windows x (2 protocols x 2 lengths + 8)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"lengths": [16], "window_widths": [0]}, ["`eval.window_widths"]),
        ({"lengths": [16], "window_widths": [8, 8]}, ["`eval.window_widths` lists 8 twice"]),
        ({"lengths": [16], "window_widths": ["non"]}, ["`eval.window_widths"]),
        ({"lengths": [16], "position_options": [8]}, ["`eval.position_options"]),
        ({"lengths": [16], "position_options": [{"a": 1}, {"a": 1.0}]}, ["lists {'a': 1} twice"]),
        (
            {"lengths": [16], "protocols": ["last", "sliding"], "last_k": 4, "stride": 3},
            ["`eval.stride: 3` is less than `eval.last_k: 4`"],
        ),
        ({"lengths": [16], "paper_windows": 3}, ["`eval.paper_windows` belongs to protocol"]),
        ({"protocols": []}, ["there is no `eval.retrieval`"]),
        ({"protocols": ["nonoverlap"]}, ["`eval.lengths` is needed"]),
        ({"protocols": [], "retrieval": RETRIEVAL, "max_tokens": 9}, ["`eval.max_tokens` belongs"]),
        (
            {"lengths": [16], "retrieval": {**RETRIEVAL, "depths": [1.5]}},
            ["`eval.retrieval.depths"],
        ),
        ({"lengths": [16], "retrieval": {**RETRIEVAL, "tasks": ["needle"]}}, ["retrieval.tasks"]),
        ({"lengths": [16], "retrieval": {"tasks": ["copy"]}}, ["`eval.retrieval.lengths`"]),
        ({"lengths": [16], "retrieval": {**RETRIEVAL, "lengths": [8, 8]}}, ["lists 8 twice"]),
    ],
)
def test_questions_that_cannot_be_asked(tmp_path, asked, words):
    study = tools.write_study(tmp_path, eval=asked)
    with pytest.raises(ConfigError) as error:
        load_study(study)
    for word in (str(study), *words):
        assert word in str(error.value)
