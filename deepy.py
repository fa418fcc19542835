"""Launcher in GPT-NeoX's grammar: compose the YAML files, check them, start DeepSpeed.

    python deepy.py train.py configs/base/tiny.yml configs/method/alibi.yml configs/dataset/local_code.yml

The resolved configuration is written beside the checkpoint, and that file is what the workers read.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_patches.config import (
    Config,
    ConfigError,
    another_run,
    batch_arithmetic,
    check_standalone,
    compose,
    config_sha,
    data_parallel_size,
    dump,
)
from megatron_patches.standalone.arguments import add_config_arguments, guarded, parser
from megatron_patches.standalone.hostfile import reach, read_hostfile, refuse_inside_a_launcher
from megatron_patches.standalone.signals import INTERRUPTED

ROOT = Path(__file__).resolve().parent
WORKERS = ("train.py", "eval.py", "generate.py")
JOB_HOSTFILE = Path("/job/hostfile")  # DeepSpeed's and GPT-NeoX's default


def main(arguments: list[str] | None = None) -> int:
    made = parser(
        "Start a run from YAML files: one process, several on this host, or those of a hostfile.",
        "python deepy.py train.py configs/base/tiny.yml configs/method/kerple_log.yml "
        "configs/dataset/local_code.yml",
    )
    made.add_argument("worker", metavar="WORKER.py", help="train.py, eval.py or generate.py")
    add_config_arguments(made)
    made.add_argument("-d", "--conf_dir", help="folder of the configuration files, as in GPT-NeoX")
    made.add_argument("--engine", choices=["standalone", "neox"], default="standalone")
    made.add_argument("--dry-run", action="store_true", help="check and describe, start nothing")
    options = made.parse_args(arguments)
    return guarded(lambda: launch(options), options.debug)


def launch(options: argparse.Namespace) -> int:
    worker = Path(options.worker)
    if worker.name not in WORKERS or str(worker.parent) not in (".", str(ROOT)):
        raise ConfigError(f"{options.worker}: the workers are {', '.join(WORKERS)}")
    config = compose(_paths(options.config, options.conf_dir), options.set)
    for change in options.set:
        print(f"--set {change}")
    refuse_inside_a_launcher()
    _check_folder(config)
    hosts = read_hostfile(config)
    # Our own evaluation and generation read the checkpoints of both engines.
    if options.engine == "neox" and worker.name == "train.py":
        return launch_neox(options, config, hosts)
    check_standalone(config, training=worker.name == "train.py")
    processes = process_count(config, hosts) if worker.name == "train.py" else 1
    batch_arithmetic(config, data_parallel_size(config, processes))
    if options.dry_run:
        from megatron_patches.standalone.describe import describe

        print(describe(config, processes), end="")
        return 0
    resolved = write_resolved(config, worker.name)
    return start(worker.name, resolved, config, processes, hosts)


def launch_neox(options: argparse.Namespace, config: Config, hosts: dict[str, int] | None) -> int:
    """Hand the run to GPT-NeoX, patched, in a process of its own."""
    from megatron_patches import neox
    from megatron_patches.neox import handover
    from megatron_patches.standalone.devices import use_cpu
    from megatron_patches.standalone.foreign import begin_neox_run, starting_step
    from megatron_patches.standalone.provenance import locked, write_text

    if hosts is None and JOB_HOSTFILE.exists():
        raise ConfigError(
            f"GPT-NeoX reads {JOB_HOSTFILE}: name it as `hostfile`, so that both count the same hosts"
        )
    if on_slurm(config, hosts):
        raise ConfigError(
            f"{config.place('launcher')} slurm: GPT-NeoX's launcher needs a `hostfile` for it"
        )
    checkout = neox.find()
    neox.check(checkout)
    processes, cpu = process_count(config, hosts), use_cpu(config)
    batch = batch_arithmetic(config, data_parallel_size(config, processes))
    port, first = _port(config, hosts), starting_step(config)
    handed = handover.neox_config(config, batch, processes, cpu=cpu, port=port, start=first)
    command = [sys.executable, "-m", "megatron_patches.neox"]
    command += [f"--without={name}" for name in config.neox_fixes_off]
    if cpu:
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(processes))
    os.environ["NEOX_HOME"] = str(checkout.home)
    if options.dry_run:
        print(dump(handed), end="")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, handover.FILE)
            write_text(file, dump(handed))
            command += ["--dry-run", "train.py", str(file)]
            done = subprocess.run(command, env=_importable(), stdout=subprocess.DEVNULL)
        if done.returncode == 0:
            print(f"GPT-NeoX at {checkout.commit[:12]} accepts this, {processes} process(es)")
        return done.returncode
    with locked(config.save_dir):
        write_resolved(config, "train.py")
        begin_neox_run(config, batch, processes, checkout.commit, first)
        file = config.save_dir / handover.FILE
        write_text(file, dump(handed))
        code = subprocess.run([*command, "train.py", str(file)], env=_importable()).returncode
    return code if code in (0, 1, 2) else 1


def _check_folder(config: Config) -> None:
    folder = config.save_dir
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{config.place('save')} {folder}: {nearest} is no folder")


def _importable() -> dict[str, str]:
    """The environment in which other processes find this suite, installed or not."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _paths(files: list[str], folder: str | None) -> list[Path]:
    paths = []
    for name in files:
        path = Path(folder, name) if folder else Path(name)
        paths.append(
            path if path.suffix in (".yml", ".yaml") else path.with_name(path.name + ".yml")
        )
    return paths


def on_slurm(config: Config, hosts: dict[str, int] | None) -> bool:
    """Slurm's own srun starts the workers: no hostfile, and the launcher is named."""
    return config.launcher == "slurm" and hosts is None


def process_count(config: Config, hosts: dict[str, int] | None) -> int:
    """Processes over all hosts: `num_gpus` a host, all GPUs, Slurm's tasks, or one on the CPU."""
    if on_slurm(config, hosts):
        if "SLURM_NTASKS" not in os.environ:
            raise ConfigError(
                f"{config.place('launcher')} slurm: start this inside an allocation (sbatch, salloc) "
                "with --ntasks, or give a `hostfile`"
            )
        return int(os.environ["SLURM_NTASKS"])
    if hosts is not None:
        return sum(config.num_gpus or slots for slots in hosts.values())
    if config.num_gpus is not None:
        return config.num_gpus
    if config.distributed_backend == "gloo":
        return 1
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 1


def write_resolved(config: Config, worker: str) -> Path:
    """The file that the workers read; for training it is the run's own `config.yml`.

    Raises ConfigError when the folder belongs to a run of another configuration.
    """
    from megatron_patches.standalone.provenance import write_text

    folder = config.save_dir
    path = folder / ("config.yml" if worker == "train.py" else worker.replace(".py", ".yml"))
    # A run that never logged a step (its data were missing, say) may be set up anew.
    begun = any((folder / name).exists() for name in ("log.jsonl", "latest"))
    if worker == "train.py" and begun and path.is_file():
        trained = compose([path])
        if config_sha(trained) != config_sha(config):
            raise another_run(folder, trained, config_sha(trained), config)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(path, dump(config))
    return path


def start(
    worker: str, resolved: Path, config: Config, processes: int, hosts: dict[str, int] | None
) -> int:
    """Hand over to DeepSpeed's launcher; the exit code is the worker's (1 if a signal ended it).

    SIGTERM and SIGUSR1 are handed on to the workers, which save and end with 75.
    """
    from megatron_patches.standalone.devices import use_cpu
    from megatron_patches.standalone.launch import run

    if use_cpu(config):
        # On the CPU DeepSpeed offers one slot unless LOCAL_SIZE says otherwise.
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(processes))
    command = [sys.executable, "-u", "-m"]
    port = str(_port(config, hosts))
    if on_slurm(config, hosts) and processes > 1:
        command = ["srun", f"--ntasks={processes}", sys.executable, "-u"]
        # Each task finds the others by Slurm's variables: `standalone.placement`.
    elif hosts is None:
        # DeepSpeed's runner would end in this same command, after looking for hosts and for ssh.
        world = base64.urlsafe_b64encode(json.dumps({"localhost": [*range(processes)]}).encode())
        command += ["megatron_patches.standalone.launch", f"--world_info={world.decode()}"]
        command += ["--master_addr=127.0.0.1", f"--master_port={port}", "--log_level=warning"]
    else:
        assert config.hostfile is not None
        if [*hosts] != ["localhost"] and not config.no_ssh_check:
            reach(hosts)
        command += ["deepspeed.launcher.runner", "--master_port", port, "--log_level", "warning"]
        command += ["--hostfile", config.hostfile, "--launcher", config.launcher]
        if config.num_gpus:
            command += ["--num_gpus", str(config.num_gpus)]
        if config.master_addr:
            command += ["--master_addr", config.master_addr]
        if [*hosts] != ["localhost"]:
            command += ["--force_multi"]  # else a single other host would run here
        command += ["--no_ssh_check"]  # of the first host alone; all were asked above
    code = run([*command, str(ROOT / worker), str(resolved.resolve())], _importable())
    # DeepSpeed's launcher hands a signal on as 256 - n.
    return code if code in (0, 1, 2, INTERRUPTED) else 1


def _port(config: Config, hosts: dict[str, int] | None) -> int:
    """A free port on this host, so that runs side by side do not meet, unless one is asked for."""
    if hosts is not None or "master_port" in config.model_fields_set:
        return config.master_port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
