"""Peak memory in fresh processes, and what the package imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from attention_cases import make

from megatron_patches.positions import names

HERE = Path(__file__).parent
WHOLE_ROWS = [name for name in names() if make(name).whole_rows]
MEASURE = f"""
import json, os, sys
os.environ.update(OMP_NUM_THREADS="1")
sys.path.insert(0, {str(HERE)!r})
import torch
torch.set_num_threads(1)
from attention_cases import Counting, Slanted, make
from megatron_patches.attention import attend

impl, name, length, heads, training, queries = json.loads(sys.argv[1])

def resident(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(key)) / 1024

def run(q, k, v):
    out = attend(q, k, v, method, impl=impl)
    if training:
        out.backward(grad_out)

hand_made = dict(positional=Slanted, content=Counting)
method = hand_made[name](heads, 64) if name in hand_made else make(name, heads, 64)
method.requires_grad_(training)
def inputs(length, queries):
    lengths = (queries, length, length)
    return [torch.randn(1, heads, n, 64).requires_grad_(training) for n in lengths]
grad_out = torch.ones(1, heads, 64, 64)
run(*inputs(64, 64))
queries = queries or length
qkv, grad_out = inputs(length, queries), torch.ones(1, heads, queries, 64)
before = resident("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
run(*qkv)
print(resident("VmHWM") - before)
"""
linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc"
)


def peak(
    impl: str,
    name: str,
    length: int,
    heads: int = 12,
    training: bool = False,
    queries: int | None = None,
) -> float:
    """MB above the inputs; of the last `queries` alone, or of all."""
    request = json.dumps([impl, name, length, heads, training, queries])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, request], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@linux
@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_weight"])
def test_a_long_forward_pass(name):
    # The output alone takes 24 MB; scores of 12 heads would take 3 GB.
    assert peak("chunked", name, 8192) < 100


@linux
@pytest.mark.slow
def test_the_longest_forward_pass():
    assert peak("chunked", "kerple_log", 16384) < 100


@linux
@pytest.mark.slow
def test_training_memory_against_the_reference():
    ours, theirs = (peak(impl, "kerple_log", 2048, 12, True) for impl in ("chunked", "reference"))
    assert ours < theirs / 8, f"{ours:.0f} MB against {theirs:.0f} MB"


@linux
@pytest.mark.slow
@pytest.mark.parametrize("name", ["positional", "content"])
def test_other_tiers_take_linear_memory(name):
    """Four times the length: about four times the memory, where squares would take sixteen."""
    short, long = (peak("chunked", name, length, 2, True) for length in (1024, 4096))
    assert long < 7 * short, f"{short:.0f} MB, then {long:.0f} MB"


@linux
@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_whole_rows_of_16384_keys(name):
    """The longest rows of that length; all queries add their output, 48 MB."""
    assert peak("chunked", name, 16384, queries=128) < 150


@linux
@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE_ROWS)
def test_whole_rows_of_16384_keys_in_training(name):
    """All queries add their output and the gradient of q, 96 MB."""
    assert peak("chunked", name, 16384, training=True, queries=512) < 450


IMPORTS = """
import sys
BLOCKED = ("deepspeed", "pydantic", "yaml", "triton", "transformers", "data_prep")
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import torch
from megatron_patches.attention import attend
from megatron_patches.positions import build
method = build("kerple_log", heads=2, head_dim=4, hidden_size=8)
q = torch.zeros(1, 2, 3, 4, requires_grad=True)
for impl in ("auto", "reference", "chunked"):
    attend(q, q, q, method, impl=impl).sum().backward()
ours = {name.split(".")[1] for name in sys.modules if name.startswith("megatron_patches.")}
print(sorted(ours), sorted(set(BLOCKED) & set(sys.modules)))
"""


def test_attention_needs_torch_and_the_positions_alone():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['attention', 'positions'] []"
