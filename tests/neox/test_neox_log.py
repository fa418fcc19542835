"""`log.jsonl` of a run, written from what GPT-NeoX's loop calls."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from neox_tools import LEARNS_ONCE, Engine, make_model, random

from megatron_patches.neox import training
from megatron_patches.neox.model import own_methods
from megatron_patches.training.log import forget_after

pytestmark = pytest.mark.usefixtures("shared")


class Run:
    """One process of a run: steps and validations as GPT-NeoX calls what `Record` wraps."""

    def __init__(self, folder: Path | None, **changes: Any) -> None:
        save = None if folder is None else str(folder)
        changes = {"log_interval": 2, "train_batch_size": 4, "eval_iters": 1, **changes}
        self.made = make_model(LEARNS_ONCE, save=save, **changes)
        self.args = self.made.neox_args
        record = training.Record()
        self.step = record.train_step(lambda *_, **__: ({"lm_loss": self.loss}, 0))
        self.log = record.training_log(lambda *_, **__: "flag")
        self.evaluate = record.evaluate(lambda **_: {"lm_loss": self.loss})

        def neox(
            neox_args: Any, prefix: Any, step_func: Any, data: Any, model: Any, iteration: int,
            verbose: bool = False, timers: Any = None, chart_name: str = "validation",
        ) -> None:  # fmt: skip
            self.evaluate(neox_args=neox_args)

        self.validate = record.evaluate_and_print_results(neox)

    def train(self, *steps: int) -> None:
        engine = Engine(self.made)
        for step in steps:
            self.loss = torch.tensor(float(step))
            self.step(neox_args=self.args, model=engine, timers=None)
            positional = (self.args, None, {}, {}, 0.25, step, 1.0, False, 0, engine, None, None)
            assert self.log(*positional) == "flag"

    def check(self, step: int, chart: str = "validation") -> None:
        self.loss = torch.tensor(100.0 + step)
        self.validate(self.args, "somewhere", None, None, None, step, chart_name=chart)


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "log.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def brief(folder: Path) -> list[tuple[int, float | None, float | None]]:
    return [(e["iteration"], e.get("lm_loss"), e.get("validation_loss")) for e in lines(folder)]


@pytest.fixture
def run(alone, tmp_path):
    return lambda **changes: Run(tmp_path, **changes)


def test_a_step_has_the_mean_loss_since_the_last_one(run, tmp_path, capsys):
    made = run()
    made.train(1, 2, 3, 4)
    made.check(4)
    assert brief(tmp_path) == [(2, 1.5, None), (4, 3.5, None), (4, None, 104.0)]
    first = lines(tmp_path)[0]
    assert first["learning_rate"] == 0.25 and first["gradient_norm"] == 2.5
    assert first["tokens"] == 2 * 4 * 12
    (method,) = own_methods(made.made)
    expected = {f"position/{key}": value for key, value in method.statistics().items()}
    assert {k: v for k, v in first.items() if k.startswith("position/")} == expected
    told = capsys.readouterr().out
    assert " iteration 2 | position/" in told and " iteration 4 | position/" in told
    from megatron.logging import TRACKED

    key, value = next(iter(expected.items()))
    assert (key, value, 2) in TRACKED and (key, value, 4) in TRACKED


def test_a_resumed_run_repeats_no_step(run, tmp_path):
    first = run(log_interval=1)
    first.train(1, 2)
    first.check(2)
    first.train(3, 4)  # lost: the checkpoint is that of step 2
    with open(tmp_path / "log.jsonl", "a", encoding="utf-8") as file:
        file.write('{"iteration": 5, "lm_lo')  # cut by the interruption
    second = run(log_interval=1)
    second.train(3, 4)
    expected = [(1, 1.0, None), (2, 2.0, None), (2, None, 102.0), (3, 3.0, None), (4, 4.0, None)]
    assert brief(tmp_path) == expected


def test_a_finished_run_that_is_started_again_keeps_its_last_step(run, tmp_path):
    first = run(log_interval=1)
    first.train(1, 2)
    again = run(log_interval=1)
    again.check(2)  # nothing is left to train
    assert brief(tmp_path) == [(1, 1.0, None), (2, 2.0, None), (2, None, 102.0)]


def test_other_charts_have_their_own_name(run, tmp_path):
    made = run()
    made.check(3, "test")
    assert lines(tmp_path) == [{"iteration": 3, "test_loss": 103.0}]


def test_nothing_is_written_without_save(alone, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = Run(None)
    made.train(1, 2)
    made.check(2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("interval", [None, 0, 3])
def test_only_logged_steps_are_written(run, tmp_path, interval):
    made = run(log_interval=interval)
    made.train(1, 2, 3, 4)
    if interval:
        assert [entry["iteration"] for entry in lines(tmp_path)] == [3]
    else:
        assert not (tmp_path / "log.jsonl").exists()


def test_only_the_first_rank_writes(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.distributed.get_rank", lambda *_, **__: 1)
    made = run()
    made.train(1, 2)
    made.check(2)
    assert not (tmp_path / "log.jsonl").exists() and capsys.readouterr().out == ""


def test_an_engine_that_keeps_no_norm(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "get_global_grad_norm", lambda self: None)
    run().train(1, 2)
    assert lines(tmp_path)[0]["gradient_norm"] is None


def test_forget_after(tmp_path):
    path = tmp_path / "log.jsonl"
    forget_after(path, 1)  # nothing is there yet
    entries = ['{"iteration": 1}', "[]", "{}", '{"iteration": 2}', '{"iteration": 10}', "{"]
    path.write_text("\n".join(entries), encoding="utf-8")
    forget_after(path, 2)
    assert path.read_text(encoding="utf-8") == '{"iteration": 1}\n{"iteration": 2}\n'
    assert [file.name for file in tmp_path.iterdir()] == ["log.jsonl"]


def test_the_loop_of_the_stub_runs_with_everything_installed(alone, tmp_path):
    """Real names, called as GPT-NeoX calls them: with keywords and without."""
    from megatron import training as loop

    made = make_model(LEARNS_ONCE, save=str(tmp_path), log_interval=1, eval_iters=2)
    args, engine = made.neox_args, Engine(made)
    optimizer = torch.optim.AdamW(loop.get_optimizer(made, args), lr=0.01)
    batches = iter([random(2, 12, 32, seed=i) for i in range(9)])
    for step in (1, 2):
        loss, _ = loop.train_step(
            neox_args=args, timers=None, data_iterator=batches, model=engine,
            optimizer=optimizer, lr_scheduler=None,
        )  # fmt: skip
        loop.training_log(
            neox_args=args, timers=None, loss_dict=loss, total_loss_dict={}, learning_rate=0.01,
            iteration=step, loss_scale=1.0, report_memory_flag=False, skipped_iter=0, model=engine,
            optimizer=optimizer, noise_scale_logger=SimpleNamespace(),
        )  # fmt: skip
    loop.evaluate_and_print_results(
        neox_args=args, prefix="x", forward_step_func=loop.forward_step, data_iterator=batches,
        model=engine, iteration=2,
    )  # fmt: skip
    found = brief(tmp_path)
    assert [(step, train is None) for step, train, _ in found] == [
        (1, False),
        (2, False),
        (2, True),
    ]
    assert found[-1][2] is not None
