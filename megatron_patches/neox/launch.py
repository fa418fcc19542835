"""GPT-NeoX's own launcher with the patches in it and in every worker that it starts."""

from __future__ import annotations

import importlib.util
import os
import runpy
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_patches.config import ConfigError
from megatron_patches.neox.checkout import VARIABLE
from megatron_patches.neox.install import FIXES_OFF, install

WORKERS = Path(__file__).parent / "workers"
# Packages that NeoX imports and names in no requirement file, or that its Makefile runs.
NEEDED = ("requests", "pybind11", "sentencepiece", "transformers", "tokenizers")
# DeepSpeed hands these to the workers on other hosts.
EXPORTED = (VARIABLE, FIXES_OFF, "DS_ACCELERATOR", "PYTHONPATH", "OMP_")


def launch(
    arguments: Sequence[str], *, fixes_off: Iterable[str] = (), dry_run: bool = False
) -> None:
    """Run the checkout's deepy.py with `arguments`: WORKER.py [-d DIR] CONFIG.yml ...

    WORKER.py is train.py, eval.py or generate.py. Returns when the workers are done; with `dry_run`
    when NeoX has accepted the configuration.

    Raises:
        ConfigError: no checkout, missing packages, an unknown worker, a moved seam.
        SystemExit: with the code of a worker that failed.
    """
    worker, *rest = arguments
    script = WORKERS / Path(worker).name
    if not script.is_file():
        names = ", ".join(sorted(path.name for path in WORKERS.glob("[a-z]*.py")))
        raise ConfigError(f"{worker}: the workers are {names}")
    _check_packages()
    off = list(fixes_off)
    installed = install(launcher=True, fixes_off=off)
    os.environ.update({VARIABLE: str(installed.checkout.home), FIXES_OFF: ",".join(off)})
    import deepspeed.launcher.runner as runner

    runner.EXPORT_ENVS.extend(name for name in EXPORTED if name not in runner.EXPORT_ENVS)
    if dry_run:
        from megatron.neox_arguments import NeoXArgs

        NeoXArgs.consume_deepy_args([str(script), *rest]).get_deepspeed_main_args()
        return
    deepy = runpy.run_path(str(installed.checkout.home / "deepy.py"), run_name="deepy")
    deepy["main"]([str(script), *rest])


def _check_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"GPT-NeoX needs {', '.join(missing)}: python -m pip install '.[neox]' in this project"
        )
    tools = [name for name in ("make", "g++") if shutil.which(name) is None]
    if tools:
        raise ConfigError(f"GPT-NeoX compiles its data helpers and needs {' and '.join(tools)}")
