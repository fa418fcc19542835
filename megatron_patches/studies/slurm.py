"""A Slurm array script of what is left of a plan: one task a run, with the exact commands."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_patches.analysis.failures import FILE
from megatron_patches.studies.cost import Cost
from megatron_patches.studies.execute import on_gpus
from megatron_patches.studies.plan import Plan
from megatron_patches.studies.progress import check_cut
from megatron_patches.studies.run import Run, identity
from megatron_patches.studies.schema import ROOT, shown

# Machines differ, and a run that is cut off continues where it was when it is submitted again.
TIME_MARGIN = 1.5


def script(plan: Plan, cost: Cost) -> str:
    """The text; ValueError when nothing is left to run."""
    runs = plan.unfinished
    if not runs:
        raise ValueError(f"{plan.study.name}: every run is finished, there is nothing to submit")
    study = plan.study
    logs = shown(study.checkpoint_dir)
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={study.name}",
        f"#SBATCH --array=0-{len(runs) - 1}",
        f"#SBATCH --output={logs}/slurm-%A_%a.txt",
        "#SBATCH --ntasks=1",
        *(["#SBATCH --gpus=1", "#SBATCH --cpus-per-task=4"] if on_gpus(plan) else []),
        *([] if on_gpus(plan) else ["#SBATCH --cpus-per-task=1"]),
        *_time(cost),
        "",
        "# Submit from the repository's root. Submitted again, a finished part is skipped and a run",
        "# that was cut off continues; `python scripts/sweep.py STUDY.yml --slurm FILE` writes a",
        "# shorter script for what is then left.",
        'cd "${SLURM_SUBMIT_DIR:-.}" || exit 1',
        'PYTHON="${PYTHON:-.venv/bin/python}"',
        "export OMP_WAIT_POLICY=PASSIVE",
        *([] if on_gpus(plan) else ["export OMP_NUM_THREADS=1"]),
        "failed=0",
        "",
        "# step RUN TITLE COMMAND...: run it; a failure becomes a line of failed.jsonl, with what $told and",
        "# $about hold in JSON",
        "step() {",
        "  local code",
        "  shift 2",
        '  "$PYTHON" "$@" && return 0',
        "  code=$?",
        "  failed=1",
        f"  {_record(plan)} \\",
        f"    >> {shlex.quote(shown(study.output_dir / FILE))}",
        '  return "$code"',
        "}",
        "",
        'case "$SLURM_ARRAY_TASK_ID" in',
    ]
    for index, run in enumerate(runs):
        about = json.dumps(identity(run)).strip("{}")
        lines += [f"{index})", f"  about={shlex.quote(about)}", *_commands(plan, run), "  ;;"]
    lines += [
        "*)",
        '  echo "error: no run has the number $SLURM_ARRAY_TASK_ID" >&2',
        "  exit 2",
        "  ;;",
        "esac",
        'exit "$failed"',
    ]
    return "\n".join(lines) + "\n"


def _time(cost: Cost) -> list[str]:
    """--time in minutes, for the longest of the tasks: a task that it cuts off in its evaluation would be
    cut off there at every submission."""
    hours = cost.longest_hours
    if hours is not None:
        return [f"#SBATCH --time={max(10, math.ceil(hours * 60 * TIME_MARGIN))}"]
    unknown = "speed" if cost.seconds is None else "size of the text"
    return [f"# No --time, because the {unknown} is not known yet: name one, sbatch --time=..."]


def _record(plan: Plan) -> str:
    """printf with the fields of `Failure`; those that may need escaping in JSON have it in the script.

    The command is recorded in full: its lengths tell which rows would answer for the step.
    """
    logs = shown(plan.study.checkpoint_dir).replace("%", "%%")
    fields = {
        **{"study": plan.study.name, "exit_code": "%d", "when": "%s"},
        **{"message": "task %s of job %s: see the log", "log": f"{logs}/slurm-%s_%s.txt"},
    }
    text = json.dumps(fields).replace('"%d"', "%d").removesuffix("}") + ", %s, %s}"
    task = ['"$SLURM_ARRAY_TASK_ID"', '"$SLURM_ARRAY_JOB_ID"']
    values = ['"$code"', '"$(date -u +%Y-%m-%dT%H:%M:%S+00:00)"', *task, *reversed(task)]
    values += ['"$told"', '"$about"']
    return f"printf {shlex.quote(text)}'\\n' {' '.join(values)}"


def _commands(plan: Plan, run: Run) -> list[str]:
    """The run's steps; the evaluations depend on the training, not on each other."""
    lines = []
    for step in plan.steps(run):
        # A training that failed leaves nothing to score, but its failure must be the exit code.
        ending = " || exit 1" if step.trains else " || true"
        command, told = _step(run, step.title, step.arguments, ending)
        fresh = [] if step.fresh is None else ["  rm -f " + shlex.quote(step.fresh)]
        lines += [told, *fresh, command]
        if step.trains:
            study = plan.study
            words = ["scripts/sweep.py", shown(study.file.resolve())]
            words += ["--output", shown(study.output_dir)] if study.moved else []
            words += ["--record", "--only", run.name]
            command, told = _step(run, "record", words, " || true")
            lines += [told, command]
    return lines


def _step(run: Run, title: str, arguments: Sequence[str], ending: str) -> tuple[str, str]:
    """The line of one step, and the one of what failed.jsonl would say of it."""
    told = {"run": run.name, "step": title, "command": shlex.join(["python", *arguments])}
    return (
        f"  step {shlex.join([run.name, title, *arguments])}{ending}",
        f"  told={shlex.quote(json.dumps(told).strip('{}'))}",
    )


def write_script(plan: Plan, cost: Cost, path: Path) -> None:
    """Write the script, and make the folders that its tasks write to."""
    text = script(plan, cost)
    for folder in (plan.study.checkpoint_dir, plan.study.output_dir):
        folder.mkdir(parents=True, exist_ok=True)
    check_cut(plan.study, write=True)
    target = path if path.is_absolute() else ROOT / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
