"""Training rows: from a run's folder, on disk and in the table."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from analysis_rows import training
from scipy import stats

from megatron_patches.analysis.layout import ABSENT
from megatron_patches.analysis.run_folder import (
    NOT_RECORDED,
    PLAIN,
    failed_training_row,
    read_run_folder,
)
from megatron_patches.analysis.training_curves import (
    loss_curves,
    parameter_curves,
    training_table,
    validation_curves,
    validation_drop,
)
from megatron_patches.analysis.training_rows import (
    RowError,
    append_training,
    comparable_training,
    end_slope,
    read_training,
    training_groups,
)

CONFIG = """\
pos_emb: kerple_log
dataset: books
seed: 7
seq_length: 512
train_iters: 100
position_sharing: layer
position_init: published
optimizer: {type: Adam, params: {lr: 1.0e-3}}
"""
RUN = {
    **{"config_sha": "c0ffee", "git_sha": "abc", "engine": "standalone", "parameters": 1000},
    **{"data": "d1", "tokenizer": "t1", "machine": "a CPU, 2 cores", "global_batch": 4},
}


def line(step: int, **changes: object) -> dict[str, object]:
    numbers: dict[str, object] = {
        **{"iteration": step, "lm_loss": 5 - step / 50 + 1e-9, "learning_rate": 1e-3},
        **{"tokens": 2048 * step, "tokens_per_second": 1000.0 * step, "gradient_norm": None},
        **{"position/layer0/bias_p_mean": 1.0, "position/layer0/bias_p_std": 0.5},
        **{"position/layer0/bias_p_min": 0.5, "position/layer0/bias_p_max": 1.5},
    }
    return numbers | changes


def make_run(folder: Path, lines: list[dict[str, object]] | None = None, **run: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yml").write_text(CONFIG)
    (folder / "run.json").write_text(json.dumps(RUN | run))
    log = [line(step) for step in range(10, 101, 10)] if lines is None else lines
    log.insert(min(5, len(log)), {"iteration": 50, "validation_loss": 4.123456789})
    (folder / "log.jsonl").write_text("".join(json.dumps(item) + "\n" for item in log))
    return folder


def test_a_folder_becomes_a_row(tmp_path: Path) -> None:
    row = read_run_folder(make_run(tmp_path))
    assert (row.method, row.dataset, row.seed, row.train_length) == ("kerple_log", "books", 7, 512)
    assert (row.step, row.tokens, row.parameters) == (100, 204_800, 1000)
    assert row.machine == "a CPU, 2 cores" and row.options == {"position_sharing": "layer"}
    assert row.lm_loss[0] == 4.8 and row.validation_loss == [4.12346]  # six digits
    assert row.iterations == list(range(10, 101, 10)) and row.validation_iterations == [50]
    # 10 steps of 2048 tokens at 10,000, 20,000, ... tokens/s: 2.048 s times 1 + 1/2 + ... + 1/10.
    assert row.seconds == pytest.approx(2.048 * sum(1 / k for k in range(1, 11)), rel=1e-5)
    assert row.tokens_per_second == 55_000
    assert row.position["layer0/bias_p"]["max"] == [1.5] * 10
    assert (row.end_slope, row.end_slope_error) == (None, None)  # one point in the last tenth
    assert row.tokens_at([10, 100]) == [20_480, 204_800]


def test_machine_not_recorded_is_said(tmp_path: Path) -> None:
    make_run(tmp_path, machine=None)
    assert read_run_folder(tmp_path).machine == NOT_RECORDED
    assert read_run_folder(tmp_path, machine="a laptop").machine == "a laptop"
    # What the run itself recorded counts more than what somebody says of it.
    assert read_run_folder(make_run(tmp_path), machine="a laptop").machine == "a CPU, 2 cores"


def test_engines_without_speed_give_none(tmp_path: Path) -> None:
    lines = [line(step, tokens_per_second=None) for step in range(10, 101, 10)]
    row = read_run_folder(make_run(tmp_path, lines, global_batch=None))
    assert (row.seconds, row.tokens_per_second, row.global_batch) == (None, None, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "run.json").unlink(), "run.json: cannot be read"),
        (lambda f: (f / "run.json").write_text("[]"), "run.json: expected an object"),
        (lambda f: (f / "run.json").write_text("{"), "run.json: not JSON"),
        (lambda f: (f / "config.yml").write_text("a: [1"), "config.yml: not YAML"),
        (
            lambda f: (f / "config.yml").write_text("!!python/name:os.system ''"),
            "config.yml: not YAML",
        ),
        (
            lambda f: (f / "config.yml").write_text("pos_emb: alibi"),
            "config.yml: train_iters is miss",
        ),
        (lambda f: (f / "log.jsonl").write_text('{"iteration": 1'), "log.jsonl:1: not JSON"),
        (
            lambda f: (f / "log.jsonl").write_text("{}\n"),
            "log.jsonl:1: expected an object with an it",
        ),
        (lambda f: make_run(f, [line(90)]), "log.jsonl: ends at iteration 90 of 100"),
        (lambda f: make_run(f, []), "log.jsonl: ends at iteration 0 of 100"),
        (lambda f: make_run(f, [line(100, lm_loss=math.nan)]), "lm_loss: not finite"),
        (lambda f: make_run(f, [line(100, tokens_per_second=0)]), "bad tokens_per_second"),
        (
            lambda f: make_run(f, [line(100, tokens=2049)]),
            "tokens: 2049 are not 100 steps of 4 seq",
        ),
        (lambda f: make_run(f, [line(90), line(80), line(100)]), "bad tokens_per_second or tokens"),
        (lambda f: make_run(f, git_sha=None), "run.json: git_sha is missing"),
    ],
)
def test_a_bad_folder_is_named(tmp_path: Path, change, message: str) -> None:
    change(make_run(tmp_path))
    with pytest.raises(RowError, match=message) as refusal:
        read_run_folder(tmp_path)
    assert str(tmp_path) in str(refusal.value)


def test_a_failed_run_is_a_row_with_its_reason(tmp_path: Path) -> None:
    row = read_run_folder(make_run(tmp_path, [line(10), line(20)]), message="loss is not finite")
    assert (row.status, row.iterations, row.end_slope) == ("failed", [10, 20], None)
    assert row.step == 50  # a validation came later than the last step logged
    done = training("alibi", 1)
    failed = dataclasses.replace(row, options={}, data="data-1", tokenizer="tok-1")
    (group,) = training_groups(
        [failed, done]
    )  # it failed early, yet its line stands beside the others
    table = training_table(group)
    cells = dict(table.rows)["kerple_log, seed 7"]
    assert [cell.text for cell in cells][:3] == ["4.6000", "4.1235", ABSENT]
    assert cells[0].marks == ("[1]",)
    assert table.notes == ("[1] failed after 50 steps: loss is not finite",)
    assert [curve.label for curve in loss_curves([failed, done])] == ["alibi"]


IDENTITY = {"method": "kerple_log", "dataset": "books", "seed": 7, "train_length": 512}
IDENTITY["config_sha"] = "c0ffee"


@pytest.mark.parametrize(
    "end",
    [
        json.dumps(line(30, lm_loss=math.nan)) + "\n",
        json.dumps(line(30, lm_loss=math.inf)) + "\n",
        json.dumps(line(30, **{"position/layer0/bias_p_max": math.nan})) + "\n",
        json.dumps({"iteration": 60, "validation_loss": math.nan}) + "\n",
        '{"iteration": 30, "lm_lo',
        "[]\n",
        "\udcff",
    ],
)
def test_a_diverged_or_killed_run_keeps_its_good_lines(tmp_path: Path, end: str) -> None:
    make_run(tmp_path, [line(10), line(20)])
    log = tmp_path / "log.jsonl"
    more = json.dumps(line(40)) + "\n"  # nothing after the first bad line counts
    log.write_bytes(log.read_bytes() + end.encode("utf-8", "surrogateescape") + more.encode())
    with pytest.raises(RowError):
        read_run_folder(tmp_path)
    for row in (
        read_run_folder(tmp_path, message="loss is nan"),
        failed_training_row(tmp_path, IDENTITY, "loss is nan"),
    ):
        assert (row.status, row.message) == ("failed", "loss is nan")
        assert row.iterations == [10, 20]
        assert row.lm_loss == pytest.approx([4.8, 4.6]) and row.tokens == 2048 * 20


@pytest.mark.parametrize(
    ("spoil", "kept"),
    [
        (lambda f: (f / "log.jsonl").unlink(), []),
        (lambda f: make_run(f, [line(20), line(10)]), None),
        (lambda f: make_run(f, [line(10, tokens_per_second=0)]), None),
        (lambda f: make_run(f, [line(10, tokens=10**400)]), None),
        (lambda f: make_run(f, [line(10, learning_rate="x")]), None),
    ],
)
def test_a_failed_run_always_has_its_row(tmp_path: Path, spoil, kept: list[int] | None) -> None:
    """Curves that nobody can trust are left out, and the message says so."""
    spoil(make_run(tmp_path, [line(10), line(20)]))
    row = failed_training_row(tmp_path, IDENTITY, "out of memory")
    assert row.status == "failed" and row.message.startswith("out of memory")
    assert row.iterations == [] and row.lm_loss == []
    assert ("no curves: " in row.message) is (kept is None)
    append_training(tmp_path / "training.jsonl", [row])
    assert read_training([tmp_path / "training.jsonl"]) == [row]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: (f / "run.json").unlink(),
        lambda f: (f / "run.json").write_text("{"),
        lambda f: (f / "config.yml").write_text("seed: 2026-99-99"),
        lambda f: (f / "config.yml").write_bytes(b"\xff"),
        lambda f: make_run(f, config_sha="of an earlier run"),
    ],
)
def test_a_folder_that_does_not_tell_what_failed_has_no_row(tmp_path: Path, spoil) -> None:
    spoil(make_run(tmp_path, [line(10)]))
    assert failed_training_row(tmp_path, IDENTITY, "out of memory") is None
    assert failed_training_row(tmp_path / "nowhere", IDENTITY, "out of memory") is None


def test_variants_are_those_of_evaluated_rows() -> None:
    """The keys and plain values equal what the configuration says of them."""
    from megatron_patches.config import Config

    fields = Config.model_fields
    for key, plain in PLAIN.items():
        assert fields[key].get_default(call_default_factory=True) == plain
    assert fields["seed"].get_default() == 1234


def test_slope_is_least_squares_by_hand() -> None:
    # x = 91, 92, 93 (thousandths of a step), y = 3, 1, 2: slope -1 / 2 a step, residuals 1/2, -1, 1/2;
    # error sqrt((3 / 2) / (3 - 2) / 2).
    slope, error = end_slope([1, 91, 92, 93], [99.0, 3.0, 1.0, 2.0], 100)
    assert slope == pytest.approx(-0.5 * 1000)
    assert error == pytest.approx(math.sqrt(0.75) * 1000)
    assert end_slope([90, 91, 92], [1.0, 2.0, 3.0], 100) is None  # 90 is not in the last tenth
    steps = list(range(10, 2001, 10))
    losses = [3 + math.sin(step) for step in steps]
    fit = stats.linregress(steps[-20:], losses[-20:])
    assert end_slope(steps, losses, 2000) == pytest.approx((1000 * fit.slope, 1000 * fit.stderr))


def test_rows_come_back_from_disk(tmp_path: Path) -> None:
    rows = [training("alibi", 1), training("alibi", 2, options={"x": 1}, end_slope=-0.1,
                                            end_slope_error=0.01)]  # fmt: skip
    append_training(tmp_path / "t.jsonl", rows[:1])
    append_training(tmp_path / "t.jsonl", rows[1:])
    assert read_training(tmp_path / "t.jsonl") == rows
    record = dataclasses.asdict(rows[0])
    del record["machine"]
    (tmp_path / "bad.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(RowError, match=r"bad.jsonl:1: missing machine"):
        read_training(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": -1}, "step: expected an integer >= 0"),
        ({"machine": " "}, "machine: expected text"),
        ({"iterations": list(range(10, 100, 10))}, "lm_loss: 10 values for 9 logged steps"),
        ({"step": 110}, "end at 100, step is 110, train_iters 100"),
        ({"train_iters": 110}, "end at 100, step is 100, train_iters 110"),
        ({"step": 90}, "iterations: 100 is beyond step 90"),
        ({"iterations": [10] * 10}, "iterations: not ascending"),
        ({"lm_loss": [-1.0] * 10}, r"lm_loss\[0\]: expected a finite number >= 0"),
        ({"validation_loss": [1.0]}, "validation_loss: 1 values for 2"),
        ({"tokens": 7}, "tokens: 7 are not 100 steps of 4 sequences of 512"),
        ({"end_slope": 1.0}, "end_slope, end_slope_error: both or neither"),
        ({"position": {"a": {"mean": []}}}, "position.a: expected mean, std, min, max"),
        (
            {
                "position": {
                    "a": {k: [1.0 + (k == "mean")] * 10 for k in ("mean", "std", "min", "max")}
                }
            },
            "position.a: mean 2.0 lies outside",
        ),
        ({"status": "done"}, "status: 'done' is none of"),
        ({"status": "failed"}, "message: expected text"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(RowError, match=message):
        training("alibi", 1, **changes)


def test_curves_over_seeds_by_hand() -> None:
    shifted = training("alibi", 2, lm_loss=[5.5 - step / 50 for step in range(10, 101, 10)])
    (curve,) = loss_curves([training("alibi", 1), shifted])
    assert (curve.label, curve.seeds) == ("alibi", 2)
    assert curve.tokens[:2] == [20_480, 40_960] and curve.tokens[-1] == 204_800
    assert (curve.low[0], curve.mean[0], curve.high[0]) == pytest.approx((4.8, 5.05, 5.3))
    # Seeds logged at other steps meet at the common ones.
    every = {
        "iterations": [20, 100],
        "lm_loss": [4.0, 3.0],
        "learning_rate": [0.1, 0.1],
        "position": {},
    }
    (sparse,) = loss_curves([training("alibi", 1), training("alibi", 2, **every)])
    assert sparse.tokens == [40_960, 204_800] and sparse.mean[1] == pytest.approx(3.0)
    assert validation_curves([shifted])[0].mean == [4.2, 3.3]


def test_parameters_over_heads_layers_and_seeds() -> None:
    both = training("alibi", 1).position["bias_p"]
    higher = {
        kind: [v + 1 if kind != "std" else v for v in values] for kind, values in both.items()
    }
    layered = training("alibi", 1, position={"layer0/bias_p": both, "layer1/bias_p": higher})
    (curve,) = parameter_curves([layered])["bias_p"]
    assert (curve.low[0], curve.mean[0], curve.high[0]) == pytest.approx((0.6, 1.6, 2.6))
    second = training("alibi", 2, position={"bias_p": higher})
    (seeds,) = parameter_curves([training("alibi", 1), second])["bias_p"]
    assert (seeds.low[0], seeds.mean[0], seeds.high[0]) == pytest.approx((0.6, 1.6, 2.6))


def test_unlike_runs_never_meet() -> None:
    for change in (
        *(
            {"dataset": "code"},
            {"data": "other"},
            {"tokenizer": "x"},
            {"train_length": 128, "global_batch": 16},
        ),
        *({"global_batch": 8, "tokens": 409_600}, {"parameters": 1501}),
    ):
        rows = [training("alibi", 1), training("rotary", 1, **change)]
        with pytest.raises(RowError, match=rf"differ in: {next(iter(change))}"):
            comparable_training(rows)
        assert [len(group) for group in training_groups(rows)] == [1, 1]
    with pytest.raises(RowError, match="two configurations"):
        training_groups([training("alibi", 1), training("alibi", 1, config_sha="other")])
    again = training("alibi", 1, seconds=9.0)
    failed = training("alibi", 1, status="failed", message="out of memory")
    assert comparable_training([training("alibi", 1), again, failed]) == [again]
    with pytest.raises(RowError, match="nothing to show"):
        comparable_training([])


def test_table_has_a_line_a_run() -> None:
    row = training("alibi", 1, end_slope=-0.25, end_slope_error=0.03)
    table = training_table([row, training("rotary", 1, seconds=None, tokens_per_second=None)])
    lines = {label: [(c.text, c.spread) for c in cells] for label, cells in table.rows}
    assert lines["alibi, seed 1"] == [
        *(("3.0000", ""), ("3.3000", ""), ("-0.250", "0.030"), ("+18.000", "")),
        *(("10,240", ""), ("20", "")),
    ]
    assert [text for text, _ in lines["rotary, seed 1"]][2:] == [ABSENT, "+18.000", *[ABSENT] * 2]
    assert "machine: a CPU, 2 cores, 1 process of 1 thread" in table.header


def test_validation_drop_by_hand() -> None:
    """From 4.2 at step 50 to 3.3 at step 100; a rise has a minus; one validation has none."""
    row = training("alibi", 1)
    assert validation_drop(row) == pytest.approx(1000 * 0.9 / 50)
    at = [10, 60, 100]
    rise = dataclasses.replace(row, validation_iterations=at, validation_loss=[4.0, 3.1, 3.12])
    assert validation_drop(rise) == pytest.approx(-0.5)
    one = dataclasses.replace(row, validation_iterations=[100], validation_loss=[3.0])
    assert validation_drop(one) is None
    cells = dict(training_table([one]).rows)["alibi, seed 1"]
    assert cells[3].text == ABSENT
