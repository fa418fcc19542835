"""The arithmetic of time and memory, and the calibration."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import quarter_tools as tools
import torch

from megatron_patches.quarter import budget, calibration, estimate, machine
from megatron_patches.quarter.batches import Batches, shared_batches
from megatron_patches.quarter.budget import Speed, schedule
from megatron_patches.quarter.evaluation import HeldOut
from megatron_patches.quarter.plan import PlanError, open_text
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.shape import ModelShape

CPU = torch.device("cpu")


def speed(step, base=0.0, slope=0.0, setup=0.0):
    return Speed(step, base, slope, setup)


def test_one_number_of_steps_for_all_methods():
    speeds = [speed(0.1), speed(0.2, setup=1.1)]
    made = schedule(speeds, 200.0, [512], 1000, 10_000)
    # at most 85% for training, 11% of it kept, 1.1 s to build a model, 0.3 s a step of both
    assert made.steps == int((170 * 0.89 - 1.1) / 0.3) and made.limit == "the time left"
    assert made.training == pytest.approx((0.1 * made.steps, 1.1 + 0.2 * made.steps))
    assert made.evaluation == pytest.approx(30.0)
    assert schedule(speeds, 200.0, [512], 1000, 7_000_000).steps == made.steps


def test_too_few_steps_say_what_to_do():
    with pytest.raises(PlanError, match="only 160 steps a method fit into the 85 s left"):
        schedule([speed(0.2), speed(0.2)], 85.0, [512], 1000, 10_000)
    with pytest.raises(PlanError, match="about 2 --minutes more"):
        # 200 steps of 0.4 s in 55% of the time, less 11%: 163.4 s
        schedule([speed(0.2), speed(0.2)], 85.0, [512], 1000, 10_000)
    assert schedule([speed(0.2), speed(0.2)], 85.0, [512], 1000, 10_000, 10).steps == 160
    assert schedule([speed(0.2), speed(0.2)], 85.0, [512], 1000, 150).steps == 150
    with pytest.raises(PlanError, match="only 0 steps"):
        schedule([speed(0.2)], -3.0, [512], 1000, 10_000, 10)


def test_the_plan_limits_the_steps(plan):
    made = schedule([speed(0.1)], 1000.0, [512], 1000, 30)
    assert made.steps == 30 and "four passes" in made.limit
    run = plan.runs[0]  # 30 steps of 8 x 32 tokens
    assert budget.most_steps(run, 10**6) == 30
    assert budget.most_steps(run, 256 * 5) == 20


def test_a_slow_evaluation_takes_time_from_the_training_within_bounds():
    cheap, dear = speed(0.1, 1e-6), speed(0.1, 8e-4, 1e-6)
    lengths, scored = [512, 1024], 10_000
    assert dear.scoring(scored, 1024) == pytest.approx(10_000 * (8e-4 + 1024e-6))

    def kept(one, seconds):
        return seconds - schedule([one], seconds, lengths, scored, 10**6).evaluation

    assert kept(cheap, 100.0) == pytest.approx(85.0)
    assert kept(dear, 100.0) == pytest.approx(100 - 1.33 * 10 * (1.6 + 1.536))
    assert kept(dear, 60.0) == pytest.approx(33.0)


@pytest.mark.parametrize("start", [60.0, 200.0])
@pytest.mark.parametrize("slower", [1.0, 1.03, 1.05, 1.08, 1.10])
def test_steps_slower_than_calibrated_cost_no_method(slower, start):
    """The real study's size on an H200, by arithmetic: steps and scoring slower all along."""
    lengths, deadline = (512, 1024, 2048, 4096, 8192, 16384, 131072), 540 * 0.98
    speeds = [speed(s, 0.5e-6, 1.0e-10, 2.0) for s in (0.125, 0.115, 0.12)]
    made = schedule(speeds, deadline - start, lengths, 1 << 20, 1600)
    assert made.limit == "the time left"
    now = start
    for number, one in enumerate(speeds):
        now += one.setup + made.steps * one.step * slower
        assert now <= made.training_end(number, deadline)
    assert now + made.expected_evaluation * slower <= deadline


def test_all_slack_is_there_for_the_first_method():
    made = schedule([speed(0.1), speed(0.1), speed(0.2, setup=1.0)], 400.0, [512], 10, 10_000)
    later = 0.1 * made.steps + 1 + 0.2 * made.steps
    ends = [made.training_end(n, 500.0) for n in range(3)]
    assert ends == pytest.approx([500 - later, 499 - 0.2 * made.steps, 500.0])


def test_a_line_through_two_measurements():
    speed = Speed.of(1.0, 2.0, (512, 612e-9), (16384, 16484e-9))
    assert speed.slope == pytest.approx(1e-9) and speed.base == pytest.approx(100e-9)
    assert Speed.of(1.0, 2.0, (512, 5e-9), (16384, 4e-9)).slope == 0.0
    assert Speed.of(1.0, 2.0, (512, 5e-9), (512, 5e-9)).base == pytest.approx(5e-9)


def test_model_flops_by_hand():
    """12 layers of width 768 with 8192 entries: 84,934,656 + 6,291,456 weights in products."""
    shape = ModelShape(12, 768, 12, 8192, "alibi", 512)
    weights = 12 * 12 * 768 * 768 + 8192 * 768
    assert weights == 91_226_112
    attention = 12 * 2 * 512 * 768
    assert budget.flops_per_token(shape, 512, training=False) == 2 * weights + attention
    assert budget.flops_per_token(shape, 512, training=True) == 3 * (2 * weights + attention)


def test_peaks_are_of_the_devices_that_they_belong_to():
    peaks = {
        "NVIDIA H200": 989e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A100-PCIE-40GB": 312e12,
        "NVIDIA H100 PCIe": None,
        "NVIDIA H200 NVL": None,
        "NVIDIA H200 MIG 1g.18gb": None,
        "NVIDIA GH200 480GB": None,
        "NVIDIA H20": None,
        "NVIDIA L40S": None,
        "Radeon": None,
    }
    assert {name: budget.peak_flops(name) for name in peaks} == peaks


@pytest.fixture
def setting(plan, data):
    text = HeldOut.of(open_text(data, "valid", plan).tokens, plan.evaluation)
    batches = shared_batches(open_text(data, "train", plan), plan.runs, 30, CPU)
    return calibration.Setting(text, batches, "chunked", CPU, 0.0)


def failing(run, error):
    raise error


def test_less_memory_means_fewer_sequences_for_all_methods(plan, setting, monkeypatch):
    tried = []

    def pretend(run, setting, micro):
        tried.append((run.training.pos_emb, micro))
        if run.training.pos_emb == "alibi" and micro > 2:
            raise torch.cuda.OutOfMemoryError("pretended")
        return SimpleNamespace(model=GPT(run.shape)), 0.0, 0.1

    monkeypatch.setattr(calibration, "_time_training", pretend)
    found = calibration.calibrate(plan.runs, setting, print, failing)
    assert found.micro == 2 and set(found.speeds) == {run.name for run in plan.runs}
    assert tried == [(m, n) for n in (8, 4, 2) for m in tools.METHODS if n == 2 or m != "rotary"]
    assert found.pass_tokens == 4096


def test_less_memory_in_evaluation_leaves_the_training_alone(plan, setting, monkeypatch):
    original, tried = calibration.seconds_a_token, []

    def pretend(model, text, length, pass_tokens):
        tried.append(pass_tokens)
        if pass_tokens > 1024:
            raise torch.cuda.OutOfMemoryError("pretended")
        return original(model, text, length, pass_tokens)

    monkeypatch.setattr(calibration, "seconds_a_token", pretend)
    found = calibration.calibrate(plan.runs, setting, print, failing)
    assert (found.micro, found.pass_tokens) == (8, 1024)
    assert tried[:3] == [4096, 2048, 1024]

    def never(*given):
        raise torch.cuda.OutOfMemoryError("pretended")

    monkeypatch.setattr(calibration, "seconds_a_token", never)
    with pytest.raises(PlanError, match="smallest evaluation pass has no room"):
        calibration.calibrate(plan.runs, setting, print, failing)


def test_calibration_times_the_steps_of_a_real_run(plan, setting, monkeypatch):
    """Real samples, for as long as asked: the time of a step is the mean over all of them."""
    read, original = [], Batches.rows
    monkeypatch.setattr(Batches, "rows", lambda s, n: read.append(n) or original(s, n))
    before = time.perf_counter()
    longer = replace(setting, seconds=0.5)
    trainer, setup, step = calibration._time_training(plan.runs[0], longer, 8)
    spent = time.perf_counter() - before
    timed = len(read) - calibration.WARM_UP
    assert 0.5 <= step * timed <= spent and max(read) < 30
    assert read[:4] == [0, 1, 2, 3] and timed % calibration.TIMED == 0


def test_runs_that_read_the_same_share_their_batches(plan, data):
    text = open_text(data, "train", plan)
    other = replace(plan.runs[2], training=replace(plan.runs[2].training, seed=8))
    a, b, c = shared_batches(text, (*plan.runs[:2], other), 10, CPU).values()
    assert a is b and a is not c and not torch.equal(a.rows(0), c.rows(0))


def test_a_slot_of_nvidia_smi_is_read_where_it_exists(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho name, pstate\necho Some GPU, P0\n")
    fake.chmod(0o755)
    cuda = torch.device("cuda")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert machine.clocks(cuda) == "name, pstate\nSome GPU, P0" and machine.clocks(CPU) is None
    fake.write_text("#!/bin/sh\nexit 9\n")
    assert machine.clocks(cuda) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert machine.clocks(cuda) is None


def test_the_estimate_guesses_no_speed(plan):
    lines = estimate.lines(plan, 9.0)
    assert any("at most 30 steps" in line for line in lines)
    run = plan.runs[0]
    step = 256 * budget.flops_per_token(run.shape, 32, training=True)
    needed = 3 * 30 * step / (540 * 0.85 * 0.89) / 1e12
    assert f"need {needed:.3g} TFLOP/s" in lines[-1] and f"{step / 1e12:.3g} TFLOP" in lines[-1]
