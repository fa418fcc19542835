"""Commands that compute nothing load nothing heavy: seen in what was imported, not in seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest
import standalone_tools as tools

COMMANDS = {
    "deepy.py": ["--help"],
    "train.py": ["--help"],
    "eval.py": ["--help"],
    "generate.py": ["--help"],
    "scripts/tables.py": ["--help"],
    "scripts/sweep.py": ["configs/sweeps/table3.yml", "--dry-run", "--tokens-per-second", "1e6"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_what_computes_nothing_loads_nothing_heavy(command):
    code = (
        "import runpy, sys\n"
        "sys.argv = sys.argv[1:]\n"
        "sys.path[0] = sys.argv[0].rpartition('/')[0] or '.'\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert end.code in (0, None), end.code\n"
        "heavy = {'torch', 'deepspeed', 'matplotlib', 'scipy', 'wandb', 'tensorboard'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    arguments = [sys.executable, "-c", code, command, *COMMANDS[command]]
    done = subprocess.run(arguments, cwd=tools.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"
