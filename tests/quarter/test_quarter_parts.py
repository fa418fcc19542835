"""The choice of an attention, and the arithmetic of time and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import quarter_tools as tools
import torch

from megatron_patches.quarter import budget, calibration, estimate, probe
from megatron_patches.quarter.budget import Speed, schedule
from megatron_patches.quarter.evaluation import HeldOut
from megatron_patches.quarter.plan import PlanError, open_text
from megatron_patches.quarter.run import QuarterHour
from megatron_patches.standalone.shape import ModelShape

CPU = torch.device("cpu")


# ---- attention ------------------------------------------------------------------------------------


def test_what_cannot_run_here_is_passed_over_with_its_reason(plan):
    shapes = [run.shape for run in plan.runs]
    chain = ("triton", "chunked")
    choice = probe.choose(chain, lambda name: probe.faults(shapes, name, CPU, "float32", 128))
    assert choice.names == {"training": "chunked", "evaluation": "chunked"}
    assert "kerple_log at 200" in choice.rejected["training"]["triton"]
    assert "GPU" in choice.rejected["evaluation"]["triton"]
    assert any("not triton" in line for line in choice.told())


def test_training_and_evaluation_may_need_different_ones():
    answers = {
        "triton": {"training": "off by 1", "evaluation": None},
        "flex": {"training": None, "evaluation": None},
    }
    choice = probe.choose(("triton", "flex", "chunked"), answers.__getitem__)
    assert choice.names == {"evaluation": "triton", "training": "flex"}
    assert choice.rejected == {"training": {"triton": "off by 1"}, "evaluation": {}}
    with pytest.raises(PlanError, match="off by 1"):
        probe.choose(("triton",), answers.__getitem__)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_attention_that_is_wrong_is_found(precision, plan, monkeypatch):
    """Right outputs with wrong gradients, and wrong only in the last rows of the longest window."""
    shapes = [run.shape for run in plan.runs]
    right = probe.attend
    assert probe.faults(shapes, "chunked", CPU, precision, 700) == dict.fromkeys(probe.MODES)

    def wrong_gradient_of_the_method(q, k, v, method, impl):
        out = right(q, k, v, method, impl=impl)
        if impl == "reference" or not out.requires_grad:
            return out
        return out + sum(((p - p.detach()).sum() * 20.0 for p in method.parameters()), 0.0)

    monkeypatch.setattr(probe, "attend", wrong_gradient_of_the_method)
    found = probe.faults(shapes, "chunked", CPU, precision, 700)
    assert "kerple_log" in (found["training"] or "") and found["evaluation"] is None

    def forgets_far_keys(q, k, v, method, impl):
        window = None if impl == "reference" or k.shape[2] < 600 else 100
        return right(q, k, v, method, impl=impl, window=window)

    monkeypatch.setattr(probe, "attend", forgets_far_keys)
    found = probe.faults(shapes, "chunked", CPU, precision, 700)
    assert found["training"] is None and "at 700: the output differs" in (found["evaluation"] or "")


def test_a_probe_in_a_child_answers_and_survives(data, tmp_path):
    ask = probe.in_a_child(data, CPU, "float32", False, 120.0)
    assert ask("chunked") == {"training": None, "evaluation": None}
    assert "GPU" in (ask("triton")["training"] or "")
    hurried = probe.in_a_child(data, CPU, "float32", False, 0.05)
    assert "no answer within" in (hurried("chunked")["training"] or "")
    lost = probe.in_a_child(tmp_path, CPU, "float32", False, 120.0)
    assert "code 2" in (lost("chunked")["evaluation"] or "")


def test_on_a_gpu_each_one_is_tried_in_a_child(plan, data, tmp_path, monkeypatch):
    hour = QuarterHour(plan, tools.request(data, tmp_path / "out"), tools.Clock(), print)
    hour.request = replace(hour.request, device=torch.device("cuda"), precision="bfloat16")
    asked = []

    def in_a_child(*given):
        assert given[:3] == (data, torch.device("cuda"), "bfloat16") and 10 < given[4] <= 150
        broken = dict.fromkeys(probe.MODES, "does not compile")
        return lambda name: asked.append(name) or (broken if name == "triton" else fine)

    fine = dict.fromkeys(probe.MODES)
    monkeypatch.setattr(probe, "in_a_child", in_a_child)
    choice = hour._choose_attention()
    assert asked == ["triton", "flex"] and set(choice.names.values()) == {"flex"}
    assert choice.rejected["training"] == {"triton": "does not compile"}


# ---- time and memory ------------------------------------------------------------------------------


def test_one_number_of_steps_from_the_slowest_method():
    fast, slow = Speed(0.1, 0.0, 0.0, 0.0), Speed(0.2, 0.0, 0.0, 1.0)
    made = schedule([fast, slow], 100.0, [512], 1000, 10_000)
    # 50 s each, at most 85% for training, 6% of it kept, 1 s to build the model, 0.2 s a step
    assert made.steps == int((42.5 * 0.94 - 1) / 0.2) and made.limit == "the time left"
    assert made.training + made.evaluation == pytest.approx(50.0)
    assert schedule([fast, slow], 100.0, [512], 1000, 7_000_000).steps == made.steps
    with pytest.raises(PlanError, match="only 0 steps"):
        schedule([fast, slow], 1.0, [512], 1000, 10_000)


def test_the_plan_limits_the_steps(plan):
    made = schedule([Speed(0.1, 0.0, 0.0, 0.0)], 1000.0, [512], 1000, 30)
    assert made.steps == 30 and "four passes" in made.limit
    run = plan.runs[0]  # 30 steps of 8 x 32 tokens
    assert budget.most_steps(run, 10**6) == 30
    assert budget.most_steps(run, 256 * 5) == 20


def test_a_slow_evaluation_takes_time_from_the_training_within_bounds():
    cheap, dear = Speed(0.1, 1e-6, 0.0, 0.0), Speed(0.1, 8e-4, 1e-6, 0.0)
    lengths, scored = [512, 1024], 10_000
    assert dear.scoring(scored, 1024) == pytest.approx(10_000 * (8e-4 + 1024e-6))
    little = schedule([cheap], 100.0, lengths, scored, 10**6)
    much = schedule([dear], 100.0, lengths, scored, 10**6)
    assert little.training == pytest.approx(85.0)
    assert much.training == pytest.approx(100 - 1.33 * 10 * (1.6 + 1.536))
    assert schedule([dear], 60.0, lengths, scored, 10**6).training == pytest.approx(33.0)


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
    assert budget.peak_flops("NVIDIA H200") == 989e12
    assert budget.peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert budget.peak_flops("Radeon") is None


def test_less_memory_means_fewer_sequences_for_all_methods(plan, data, monkeypatch):
    tried = []

    def pretend(run, text, choice, device, micro):
        tried.append((run.training.pos_emb, micro))
        if run.training.pos_emb == "alibi" and micro > 2:
            raise torch.OutOfMemoryError("pretended")
        return Speed(0.1, 0.0, 0.0, 0.0)

    monkeypatch.setattr(calibration, "_time", pretend)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    text = HeldOut.of(open_text(data, "valid", plan).tokens, plan)
    choice = probe.Choice({"training": "chunked", "evaluation": "chunked"}, {})
    found = calibration.calibrate(plan.runs, text, choice, CPU, lambda text: None)
    assert found.micro == 2 and set(found.speeds) == {run.name for run in plan.runs}
    assert tried == [(m, n) for n in (8, 4, 2) for m in tools.METHODS if n == 2 or m != "rotary"]


def test_the_estimate_has_a_line_a_machine(plan):
    lines = estimate.lines(plan, 13.0)
    assert [line.split()[0] for line in lines].count("H200") == 1
    assert any("at most 30 steps" in line for line in lines)
