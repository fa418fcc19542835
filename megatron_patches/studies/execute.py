"""Carrying a plan out: processes side by side, failures recorded, interrupts that leave it resumable."""

from __future__ import annotations

import datetime
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megatron_patches.analysis.failures import FILE, Failure, append_failures
from megatron_patches.config import ConfigError
from megatron_patches.studies.plan import Plan
from megatron_patches.studies.progress import check_cut
from megatron_patches.studies.record import Record
from megatron_patches.studies.run import Run, identity
from megatron_patches.studies.schema import ROOT, Study, shown
from megatron_patches.studies.steps import Step

GRACE = 10.0  # seconds between asking a process to end and making it
IMPORTS = 0.7  # GB that torch and DeepSpeed take before there is a model
MEMORY_SHARE = 0.8
MESSAGE = 500  # characters


def on_gpus(plan: Plan) -> bool:
    """Whether the runs take a GPU each: nccl asks for one, gloo for none, else what is there."""
    backend = plan.runs[0].config.distributed_backend
    return backend == "nccl" or (backend is None and bool(gpus()))


def gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES, one a GPU; asked of the driver, so that torch need not load."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return [str(index) for index, line in enumerate(listed.splitlines()) if line.startswith("GPU")]


def slots(plan: Plan, parallel: int | None, gigabytes: float | None) -> list[dict[str, str]]:
    """The environment of each place where a run may go; `parallel` None: as many as fit.

    On GPUs one a device, and a higher `parallel` shares them in turn; on the CPU one a core, as far as
    the memory reaches, because two runs of one thread are faster than one of two. Cores that are left
    over become threads.
    """
    if on_gpus(plan):
        here = gpus() or [""]
        return [{"CUDA_VISIBLE_DEVICES": here[i % len(here)]} for i in range(parallel or len(here))]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    fitting = cores or 1
    if gigabytes is not None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        fitting = min(fitting, max(1, int(MEMORY_SHARE * memory / (gigabytes + IMPORTS))))
    places = parallel or fitting
    threads = max(1, (cores or 1) // places)
    return [{"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}] * places


def carry_out(
    plan: Plan, places: Sequence[dict[str, str]], say: Callable[[str], None]
) -> list[Failure]:
    """Run all that is unfinished, `len(places)` at a time; the failures, which are also on file.

    A failed step ends its run's training or that protocol only; everything else goes on. On
    Ctrl-C, SIGTERM or SIGHUP the processes are ended and KeyboardInterrupt passes on: started
    again, every run continues from its last checkpoint and every cell that has a row is skipped.
    Raises ConfigError when data are missing, no GPU is there, or another sweep is at work.
    """
    for name, prefixes in plan.missing_data().items():
        raise ConfigError(
            f"dataset {name}: {prefixes[0]}.bin and .idx are missing: `python -m data_prep {name} "
            f"--output {Path(prefixes[0]).parent}` prepares them (its --help says how), or choose "
            f"runs of other datasets with --only"
        )
    if on_gpus(plan) and not gpus():
        raise ConfigError(
            "the runs ask for GPUs (nccl) and none is here: --dry-run and --slurm work without, and "
            "`cluster: cpu` in the study trains on the CPU"
        )
    with _locked(plan.study) as lock, _signals():
        check_cut(plan.study, write=True)
        return _Work(plan, list(places), say, lock).run()


class _Work:
    def __init__(
        self, plan: Plan, places: list[dict[str, str]], say: Callable[[str], None], lock: int
    ) -> None:
        self.plan, self.say, self.lock_file = plan, say, lock
        self.places: SimpleQueue[dict[str, str]] = SimpleQueue()
        for place in places:
            self.places.put(place)
        self.workers = len(places)
        self.guard = threading.Lock()
        self.stopped = False
        self.children: set[subprocess.Popen[bytes]] = set()
        self.failures: list[Failure] = []
        self.count = 0
        self.record = Record(plan, say)

    def run(self) -> list[Failure]:
        todo = self.plan.unfinished
        # Of runs that were trained before there was such a file, or by other means.
        self.record.add(run for run in self.plan.runs if run.name in self.plan.trained)
        pool = ThreadPoolExecutor(self.workers)
        try:
            parts = [pool.submit(self._one, run, len(todo)) for run in todo]
            for part in parts:
                # A wait without an end would keep a signal from this thread on some systems.
                while not part.done():
                    time.sleep(0.05)
                part.result()
        except BaseException:
            self._stop()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return self.failures

    def _one(self, run: Run, total: int) -> None:
        place = self.places.get()
        begun = time.perf_counter()
        failed: list[Failure] = []
        try:
            for step in self.plan.steps(run):
                failure = self._step(run, step, place)
                if self.stopped:
                    return
                if failure is not None:
                    failed.append(failure)
                    if step.trains:
                        self.record.failed(run, failure.message)
                        break  # no model to score
                elif step.trains:
                    self.record.add([run])
        finally:
            self.places.put(place)
        with self.guard:
            self.failures += failed
            self.count += 1
            word = f"FAILED ({failed[0].message})" if failed else "done"
            seconds = time.perf_counter() - begun
            self.say(f"[{self.count}/{total}] {run.name}: {word} after {seconds:.0f} s")

    def _step(self, run: Run, step: Step, place: dict[str, str]) -> Failure | None:
        run.folder.mkdir(parents=True, exist_ok=True)
        log = run.folder / "output.txt"
        command = [sys.executable, *step.arguments]
        if step.fresh is not None:
            (ROOT / step.fresh).unlink(missing_ok=True)
        with open(log, "ab") as stream:
            since = stream.tell()
            with self.guard:
                if self.stopped:
                    return None
                # A process group of its own: the terminal's Ctrl-C reaches this process alone, which
                # then ends all of them in order. The lock lives as long as any of them.
                child = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**os.environ, **place},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    start_new_session=True,
                    pass_fds=(self.lock_file,),
                )
                self.children.add(child)
            code = child.wait()
        with self.guard:
            self.children.discard(child)
        if code == 0 or self.stopped:
            return None
        failure = Failure(
            study=self.plan.study.name,
            run=run.name,
            step=step.title,
            command=shlex.join(["python", *step.arguments]),
            exit_code=code,
            message=_last_line(log, since) or f"exit code {code} without a message",
            log=shown(log),
            when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **identity(run),
        )
        append_failures(self.plan.study.output_dir / FILE, [failure])
        return failure

    def _stop(self) -> None:
        """End every process: politely, so that a launcher ends its workers, then without asking."""
        with self.guard:
            self.stopped = True
            children = list(self.children)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for child in children:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, number)
            end = time.monotonic() + GRACE
            while any(_group_lives(child.pid) for child in children) and time.monotonic() < end:
                time.sleep(0.05)


def _group_lives(group: int) -> bool:
    """A launcher may be gone while its workers are not."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _last_line(log: Path, since: int) -> str:
    """What the step said last: its error where it printed one, else its last line."""
    with open(log, "rb") as stream:
        stream.seek(since)
        lines = stream.read().decode("utf-8", errors="replace").splitlines()
    told = [line.strip() for line in lines if line.strip()]
    errors = [line for line in told if line.startswith("error:")]
    return (errors or told or [""])[-1][:MESSAGE]


@contextmanager
def _locked(study: Study) -> Iterator[int]:
    """One sweep of a folder of runs at a time on this machine; yields the lock's descriptor."""
    study.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(study.checkpoint_dir / ".sweep.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"{shown(study.checkpoint_dir)}: another sweep of these runs, or a run that a killed "
                "one left behind, is still at work: wait for it or end it"
            ) from error
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a sweep as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    names = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN  # nohup's wish
    ]

    def interrupt(number: int, frame: Any) -> None:
        for name in names:  # a second Ctrl-C must not stop the stopping
            signal.signal(name, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [(number, signal.signal(number, interrupt)) for number in names]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
