"""The end of a process in which gloo's threads still hold tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import standalone_tools as tools

# Two gloo groups in one process. The thread of the first is kept waiting for Python's lock, as on a
# busy machine, until the interpreter ends.
ENDING = """
import sys, threading, time
import torch
from torch.distributed import HashStore, ProcessGroupGloo
from megatron_patches.training.leaving import leave

store, groups = HashStore(), {}
def join(rank):
    groups[rank] = ProcessGroupGloo(store, rank, 2)
other = threading.Thread(target=join, args=(1,))
other.start()
join(0)
other.join()

tensor = torch.ones(4)
work = groups[0].allreduce([tensor])
del tensor, work
sys.setswitchinterval(100)
groups[1].allreduce([torch.ones(4)])
end = time.monotonic() + 1.0
while time.monotonic() < end:
    pass
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_process_ends_while_gloo_frees_tensors(code):
    done = python(ENDING + f"leave({code})")
    assert (done.returncode, done.stderr) == (code, "")


def test_what_python_does_at_the_end_is_done():
    done = python(
        "import atexit, logging.handlers, sys\n"
        "from megatron_patches.training.leaving import leave\n"
        "atexit.register(print, 'exit handlers ran')\n"
        "log = logging.StreamHandler(sys.stderr)\n"
        "logging.getLogger().addHandler(logging.handlers.MemoryHandler(9, target=log))\n"
        "logging.warning('kept back')\n"
        "print('not flushed', end='; ')\n"
        "leave(4)"
    )
    assert (done.returncode, done.stdout) == (4, "not flushed; exit handlers ran\n")
    assert done.stderr == "kept back\n"


@pytest.mark.skipif(
    sys.version_info >= (3, 14), reason="Python leaves such threads alone from 3.14"
)
def test_python_itself_does_not():
    """What `leave` is for: once this no longer fails, it can go."""
    for _ in range(5):  # on a busy machine the thread may come too late to be caught
        done = python(ENDING + "sys.exit(0)")
        if done.returncode:
            break
    assert done.returncode != 0
    assert (
        "terminate called" in done.stderr
    )  # without an exception, or recursively where two threads do


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=tools.ROOT,
        env=tools.clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
