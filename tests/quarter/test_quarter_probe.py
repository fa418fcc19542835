"""The choice of an attention."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

import pytest
import quarter_tools as tools
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_patches.attention import chunked
from megatron_patches.attention.blocks import block_shape
from megatron_patches.attention.problem import Problem, Sight
from megatron_patches.positions import build
from megatron_patches.quarter import probe
from megatron_patches.quarter.plan import PlanError
from megatron_patches.quarter.run import QuarterHour

CPU = torch.device("cpu")


def test_what_cannot_run_here_is_passed_over_with_its_reason(plan):
    notes: list[str] = []
    ask = probe.here(plan, CPU, "float32", notes.append)
    choice = probe.choose(("triton", "chunked"), ask)
    assert choice.name == "chunked" and set(choice.rejected) == {"triton"}
    assert "kerple_log at 208" in choice.rejected["triton"] and "GPU" in choice.rejected["triton"]
    assert "not triton" in choice.told() and set(choice.seconds) == {"triton", "chunked"}
    assert len(notes) == 1 and "Traceback" in notes[0] and "attend(" in notes[0]


def test_one_implementation_serves_training_and_evaluation():
    answers = {"triton": probe.Answer("off by 1"), "flex": probe.Answer(None, 3.0)}
    choice = probe.choose(("triton", "flex", "chunked"), answers.__getitem__)
    assert choice == probe.Choice("flex", {"triton": "off by 1"}, {"triton": 0.0, "flex": 3.0})
    with pytest.raises(PlanError, match="runs right here.*off by 1"):
        probe.choose(("triton",), answers.__getitem__)


def test_no_answer_in_time_is_not_called_wrong():
    late = probe.Answer("no answer within 30 s", 30.0, timed_out=True)
    with pytest.raises(PlanError, match="did not answer in time") as caught:
        probe.choose(("triton", "flex"), lambda name: late)
    assert "right here" not in str(caught.value) and "--minutes" in str(caught.value)


def test_a_probe_has_ninety_seconds_where_the_run_is_long_enough():
    assert [probe.probe_seconds(60 * m) for m in (1, 3, 5, 9, 60)] == [30, 90, 90, 108, 150]


def test_probed_lengths_are_compiled_once():
    """triton makes other kernels for numbers that 16 does not divide, and a run has none."""
    assert all(length % 16 == 0 for length in probe.LENGTHS) and probe.LENGTHS[0] % 64


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_attention_that_is_wrong_is_found(precision, plan, monkeypatch):
    """Right outputs with wrong gradients, and wrong only in the last rows of the longest window."""
    shapes = [run.shape for run in plan.runs]
    right = probe.attend
    assert probe.faults(shapes, "chunked", CPU, precision, 700) is None

    def wrong_gradient_of_the_method(q, k, v, method, impl):
        out = right(q, k, v, method, impl=impl)
        if impl == "reference" or not out.requires_grad:
            return out
        return out + sum(((p - p.detach()).sum() * 20.0 for p in method.parameters()), 0.0)

    monkeypatch.setattr(probe, "attend", wrong_gradient_of_the_method)
    found = probe.faults(shapes, "chunked", CPU, precision, 700)
    assert "kerple_log at 208: the gradient of a parameter differs" in (found or "")

    def forgets_far_keys(q, k, v, method, impl):
        window = None if impl == "reference" or k.shape[2] < 600 else 100
        return right(q, k, v, method, impl=impl, window=window)

    monkeypatch.setattr(probe, "attend", forgets_far_keys)
    found = probe.faults(shapes, "chunked", CPU, precision, 700)
    assert "at 700: the output differs" in (found or "")


def test_a_probe_in_a_child_answers_and_leaves_its_words(data, tmp_path):
    log = tmp_path / "probe.log"
    ask = probe.in_a_child(data, CPU, "float32", False, log, lambda: 120.0)
    assert ask("chunked").fault is None
    assert "GPU" in (ask("triton").fault or "")
    text = log.read_text()
    assert text.index("---- chunked") < text.index("---- triton") < text.index("Traceback")
    lost = probe.in_a_child(tmp_path, CPU, "float32", False, log, lambda: 120.0)("chunked")
    assert "code 2: error: " in (lost.fault or "") and not lost.timed_out
    assert "plan.json is missing" in log.read_text()
    hurried = probe.in_a_child(data, CPU, "float32", False, log, lambda: 0.05)("chunked")
    assert hurried.timed_out and "no answer within" in (hurried.fault or "")


def test_a_child_that_hangs_is_ended_with_what_it_started(tmp_path):
    """Compilers start processes that would keep the pipe and the device."""
    inner = f"import time; time.sleep(4); open({str(tmp_path / 'alive')!r}, 'w')"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {inner!r}])"
    with open(tmp_path / "out", "w") as out:
        begun = time.monotonic()
        command = [sys.executable, "-c", f"{code}; time.sleep(60)"]
        assert probe._watched(command, out.fileno(), out.fileno(), 2.0) is None
    assert time.monotonic() - begun < 4
    time.sleep(3)
    assert not (tmp_path / "alive").exists()


def test_on_a_gpu_each_one_is_tried_in_a_child(plan, data, tmp_path, monkeypatch):
    hour = QuarterHour(plan, tools.request(data, tmp_path / "out"), tools.Clock(), print)
    hour.request = replace(hour.request, device=torch.device("cuda"), precision="bfloat16")
    asked = []

    def in_a_child(*given):
        assert given[:3] == (data, torch.device("cuda"), "bfloat16") and given[3] is False
        assert given[4] == tmp_path / "out" / "probe.log" and given[5]() == 90.0
        hour.clock = tools.FakeClock(0.0)
        hour.clock.seconds = 234.0  # of 294: no child may live on after the run
        assert given[5]() == 30.0
        broken, fine = probe.Answer("does not compile"), probe.Answer(None)
        return lambda name: asked.append(name) or (broken if name == "triton" else fine)

    monkeypatch.setattr(probe, "in_a_child", in_a_child)
    choice = hour._choose_attention()
    assert asked == ["triton", "flex"] and choice.name == "flex"
    assert choice.rejected == {"triton": "does not compile"}


class Counted(TorchDispatchMode):
    """Counts operators that move data: on a GPU each is a kernel or more."""

    VIEWS = (
        "view",
        "_unsafe_view",
        "slice",
        "transpose",
        "select",
        "unsqueeze",
        "expand",
        "detach",
    )
    kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split("::")[1].split(".")[0]
        self.kernels += name not in (*self.VIEWS, "as_strided", "permute", "alias", "t")
        return func(*args, **(kwargs or {}))


def test_the_chains_end_needs_few_launches_off_the_cpu(plan):
    """A training batch of the real study; blocks made for a CPU's cache would take 14,000 and more."""
    method = build("kerple_log", heads=12, head_dim=64, hidden_size=768).to("meta")
    qkv = [
        torch.empty(128, 12, 512, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(3)
    ]
    with Counted() as counted:
        out = chunked.run(Problem(*qkv, method, 0.125, Sight()))
        out.backward(torch.empty_like(out))
    assert counted.kernels < 250
    assert block_shape(128, 12, 512) == (4, 1)  # 1 MB of scores, as it was
