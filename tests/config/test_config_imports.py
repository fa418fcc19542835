"""The package stands alone: no torch, no DeepSpeed, not even through a composed run."""

from __future__ import annotations

import subprocess
import sys

from config_files import ROOT

CODE = """
import sys
from megatron_patches.config import compose, config_sha, dump, check_standalone, batch_arithmetic
files = ["configs/base/tiny.yml", "configs/method/rpe.yml", "configs/dataset/local_code.yml"]
config = compose(files)
check_standalone(config); batch_arithmetic(config, 1); dump(config); config_sha(config)
ours = {name.split(".")[1] for name in sys.modules if name.startswith("megatron_patches.")}
print(sorted(ours), sorted({"torch", "numpy", "deepspeed"} & set(sys.modules)))
"""


def test_composing_a_run_imports_neither_torch_nor_our_other_packages():
    result = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True)
    assert result.stderr == ""
    assert result.stdout.strip() == "['config', 'positions'] []"
