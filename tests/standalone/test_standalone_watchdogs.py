"""Losses that explode, parameters out of bounds: stopped by name, with evidence."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import standalone_tools as tools
import torch

from megatron_patches.config import compose, config_sha
from megatron_patches.standalone import evidence, guard
from megatron_patches.standalone.train import Trainer, TrainingError, train
from megatron_patches.training import position_state


def after(monkeypatch: pytest.MonkeyPatch, step: int, change) -> None:
    """`change(trainer)` after update number `step`."""
    original = Trainer._one_step

    def one_step(self, *arguments):
        loss = original(self, *arguments)
        if self.step + 1 == step:
            change(self)
        return loss

    monkeypatch.setattr(Trainer, "_one_step", one_step)


def evidence_of(folder: Path) -> dict:
    (file,) = (folder / evidence.FOLDER).iterdir()
    return json.loads(file.read_text())


def enlarge(name: str, factor: float):
    def change(trainer):
        trainer.model.get_parameter(name).data.mul_(factor)

    return change


OUTPUT = "sequential.6.final_linear.weight"


def test_an_exploding_loss(config, monkeypatch):
    """From one step to the next; the interval of the log is 2, the checkpoint before stays."""
    changes = {"train_iters": 12, "log_interval": 2, "checkpoint_factor": 4}
    quiet = train(config("quiet", **changes))
    after(monkeypatch, 5, enlarge(OUTPUT, 1000.0))
    made = config(**changes, watch_loss_multiple=5)
    with pytest.raises(TrainingError) as caught:
        train(made)
    message = str(caught.value)
    assert "at iteration 6 is above" in message and "5 times (`watch_loss_multiple`)" in message
    assert "largest on rank 0" in message and f"is in {OUTPUT}" in message
    rows = tools.log(made.save_dir)
    assert [row["iteration"] for row in rows] == [2, 4, 6]
    assert tools.losses(made.save_dir)[:2] == tools.losses(quiet)[:2]
    assert rows[2]["lm_loss"] > 5 * rows[1]["lm_loss"] > 5
    assert [f.name for f in made.save_dir.glob("global_step*")] == ["global_step4"]
    kept = evidence_of(made.save_dir)
    assert (
        kept["iteration"] == 6 and kept["rank"] == 0 and kept["last_checkpoint"] == "global_step4"
    )
    # Iterations 5 and 6 of four sequences each, in the shuffled order of the run.
    assert kept["samples"] == [
        {"iteration": 5, "first": 16, "count": 4},
        {"iteration": 6, "first": 20, "count": 4},
    ]
    assert [row["lm_loss"] for row in kept["losses"]] == tools.losses(made.save_dir)
    assert kept["lowest_loss"] == min(tools.losses(made.save_dir))
    (found,) = (r for r in kept["tensors"] if r["name"] == OUTPUT and r["kind"] == "parameter")
    assert found["nan"] == found["infinite"] == 0 and found["shape"] == [64, 16]
    assert found["rms"] > 20 * max(r["rms"] for r in kept["tensors"] if r["name"] != OUTPUT)


def test_the_lowest_loss_is_part_of_a_checkpoint(config, monkeypatch):
    """Stopped and gone on, a run knows how low it had been."""
    seen = []
    original = guard.Guard.logged

    def logged(self, iteration, loss, own):
        seen.append((iteration, self.lowest))
        original(self, iteration, loss, own)

    monkeypatch.setattr(guard.Guard, "logged", logged)
    folder = train(config(train_iters=4, lr_decay_iters=8))
    first = tools.losses(folder)
    train(config(train_iters=4, lr_decay_iters=8))
    # The same run, asked for more steps, is another configuration: the state alone is compared.
    step = torch.load(folder / "global_step4" / "mp_rank_00_model_states.pt", weights_only=False)
    assert step["lowest_loss"] == min(first) and seen[0] == (1, math.inf)
    assert seen[3] == (4, min(first[:3]))


@pytest.mark.parametrize("multiple", [0, 1e9])
def test_the_watchdog_can_be_switched_off(config, monkeypatch, multiple):
    after(monkeypatch, 2, enlarge(OUTPUT, 1000.0))
    folder = train(config(watch_loss_multiple=multiple))
    assert max(tools.losses(folder)) > 20 and (folder / "latest").is_file()


def test_ordinary_runs_do_not_trip_it(config):
    """At a learning rate that makes the loss jump about, and for a loss that falls to nearly nothing."""
    lr = {"type": "Adam", "params": {"lr": 0.5, "betas": [0.9, 0.95], "eps": 1e-8}}
    wild = train(config("wild", train_iters=25, optimizer=lr, min_lr=0.0))
    assert max(tools.losses(wild)) > 1.3 * tools.losses(wild)[0]
    assert (wild / "latest").read_text() == "global_step25"
    watch = guard.Guard.__new__(guard.Guard)
    watch.lowest, watch._losses, watch._read = math.inf, [], []
    watch.config = config()
    watch.model = type("M", (), {"own_methods": lambda self: []})()
    for iteration, loss in enumerate([4.2, 0.4, 0.001, 0.9, 11.0, 19.0]):
        watch.logged(iteration, loss, torch.tensor(loss))


def test_the_keys_change_no_hash():
    """A run that is under way with older code goes on under the same name."""
    files = [tools.ROOT / "configs" / name for name in ("base/tiny.yml", "method/alibi.yml")]
    plain = config_sha(compose(files))
    for change in ("watch_loss_multiple=3.0", "watch_stall_seconds=0"):
        assert config_sha(compose(files, [change])) == plain


# ---- bounds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"), [(-0.5, "-0.5"), (0.0, "0"), (float("nan"), "nan"), (float("inf"), "inf")]
)
@pytest.mark.parametrize("sharing", ["model", "layer"])
def test_a_parameter_outside_its_bounds(config, monkeypatch, value, shown, sharing):
    """What a flipped bit leaves behind an update is found before the next logged step is over."""

    def spoil(trainer):
        trainer.model.own_methods()[-1].bias_p.data[1] = value

    after(monkeypatch, 4, spoil)
    made = config(log_interval=2, checkpoint_factor=2, position_sharing=sharing)
    with pytest.raises(
        TrainingError, match=r"holds .* outside of its bounds \[0\.01, inf\] at it"
    ) as e:
        train(made)
    layer = "layer 1's " if sharing == "layer" else ""
    assert f"position parameter {layer}bias_p holds {shown}, outside" in str(e.value)
    assert "at iteration 4 (seen by rank 0)" in str(e.value)
    assert (made.save_dir / "latest").read_text() == "global_step2"
    assert evidence_of(made.save_dir)["reason"].startswith("position parameter")


@pytest.mark.parametrize("precision", ["fp32", "bfloat16"])
@pytest.mark.parametrize("zero", [0, 3])
def test_parameters_at_their_bounds_are_inside(config, precision, zero, monkeypatch):
    """bfloat16 under ZeRO 3 rounds the bound itself."""
    lr = {"type": "Adam", "params": {"lr": 1.0, "betas": [0.9, 0.95], "eps": 1e-8}}
    monkeypatch.setattr(guard, "LEAST_LOSS", 1e6)
    changes = {"precision": precision, "zero_optimization": {"stage": zero}, "train_iters": 3}
    folder = train(config(optimizer=lr, **changes))
    lows = [
        row[key]
        for row in tools.log(folder)
        for key in row
        if key.startswith("position/") and key.endswith("_min")
    ]
    assert min(lows) == pytest.approx(0.01, rel=0.01)


def test_outside_compares_with_each_bound():
    class Method(torch.nn.Module):
        bounds = {"a": (0.01, 2.0)}

        def __init__(self, values):
            super().__init__()
            self.a = torch.nn.Parameter(torch.tensor(values))

    for values in ([0.01, 2.0], [0.0099, 2.019], [0.5, 1.0]):
        assert position_state.outside([Method(values)]) == []
    for values, shown in (
        ([0.5, 2.03], "2.03"),
        ([0.0098, 1.0], "0.0098"),
        ([-0.01, 1.0], "-0.01"),
    ):
        (line,) = position_state.outside([Method(values)])
        assert line == f"position parameter a holds {shown}, outside of its bounds [0.01, 2]"


# ---- evidence --------------------------------------------------------------------------------


def test_evidence_of_nan_names_the_samples(config, monkeypatch):
    after(monkeypatch, 3, enlarge("sequential.3.mlp.linear1.weight", math.nan))
    made = config(checkpoint_factor=2, gradient_accumulation_steps=2)
    with pytest.raises(
        TrainingError, match=r"parameter sequential\.3\.mlp\.linear1.*; evidence in "
    ):
        train(made)
    kept = evidence_of(made.save_dir)
    # The first of two micro batches of iteration 4 was read: three iterations of 8 sequences before.
    assert kept["samples"] == [{"iteration": 4, "first": 24, "count": 4}]
    (row,) = (r for r in kept["tensors"] if r["nan"])
    assert row["name"] == "sequential.3.mlp.linear1.weight" and row["nan"] == 64 * 16
    assert kept["last_checkpoint"] == "global_step2"


def test_evidence_that_cannot_be_written_hides_nothing(config, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(evidence, "write_text", full)
    after(monkeypatch, 1, enlarge(OUTPUT, math.nan))
    with pytest.raises(
        TrainingError, match="holds NaN .*evidence could not be written: .*No space"
    ):
        train(config())


def test_statistics_by_hand():
    model = torch.nn.Linear(3, 1, bias=False)
    model.weight.data = torch.tensor([[3.0, float("nan"), -4.0]])
    model.weight.grad = torch.tensor([[float("inf"), 1.0, 1.0]])
    parameter, gradient = evidence.statistics(model)
    assert parameter["nan"] == 1 and parameter["infinite"] == 0
    assert (parameter["min"], parameter["max"], parameter["mean"]) == (-4.0, 3.0, -0.5)
    assert parameter["rms"] == pytest.approx(math.sqrt((9 + 16) / 2))
    assert gradient["infinite"] == 1 and gradient["kind"] == "gradient"
    assert evidence.largest([parameter, gradient]) == "the largest value, 4, is in weight"
    with pytest.raises(ValueError):
        json.loads("{")  # and what is written is JSON:
    json.loads(json.dumps([parameter, gradient], allow_nan=False))


def test_earlier_evidence_stays(tmp_path):
    for number in range(3):
        evidence.write(tmp_path, 7, 0, {"n": number})
    found = sorted((tmp_path / evidence.FOLDER).iterdir())
    assert [json.loads(f.read_text())["n"] for f in found] == [1, 2, 0]  # -2, -3, the first
