"""Score a checkpoint on tasks of EleutherAI's lm-evaluation-harness; needs the extra `hf`."""

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(ROOT))

from megatron_patches.config import ConfigError  # noqa: E402
from megatron_patches.standalone.arguments import guarded, parser, whole  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    made = parser(
        __doc__,
        "python scripts/harness.py checkpoints/alibi-local_code-1234 --tasks my_task --include-path tasks",
    )
    made.add_argument(
        "checkpoint",
        type=Path,
        help="run or step folder of either engine, or a Hugging Face folder",
    )
    made.add_argument("--tasks", nargs="+", required=True, metavar="TASK", help="names of tasks")
    made.add_argument(
        "--include-path", metavar="FOLDER", help="YAML files of tasks of your own, read offline"
    )
    made.add_argument("--limit", type=whole(1), help="examples a task; default: all")
    made.add_argument("--shots", type=whole(0), default=0, help="examples shown before each (0)")
    made.add_argument(
        "--max-length", type=whole(1), help="longest input in tokens; default: the training length"
    )
    made.add_argument("--tokenizer", metavar="PATH", help="default: the run's `vocab_file`")
    made.add_argument("--batch-size", type=whole(1), help="inputs at a time; default: 4096 tokens")
    made.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: as stored"
    )
    made.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    made.add_argument("--output", type=Path, help="write the results to this .json file")
    return made


def run(options: argparse.Namespace) -> int:
    from megatron_patches.hf import register

    if options.output is not None and options.output.exists():
        raise ConfigError(f"--output {options.output}: exists")
    register()
    import lm_eval
    from lm_eval.tasks import TaskManager

    given = {
        "checkpoint": str(options.checkpoint),
        "max_length": options.max_length,
        "tokenizer": options.tokenizer,
        "dtype": options.dtype,
    }
    # The harness's own tasks are thousands of files to look through: only where they are asked for.
    manager = TaskManager(include_path=options.include_path, include_defaults=False)
    if not set(options.tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=options.include_path)
    unknown = sorted(set(options.tasks) - set(manager.all_tasks))
    if unknown:
        raise ConfigError(f"--tasks: no task is named {', '.join(unknown)}")
    found = lm_eval.simple_evaluate(
        model="megatron_patches",
        model_args={key: value for key, value in given.items() if value is not None},
        tasks=options.tasks,
        task_manager=manager,
        num_fewshot=options.shots,
        limit=options.limit,
        batch_size=options.batch_size,
        device=options.device,
        log_samples=False,
        bootstrap_iters=0,
    )
    results = {task: found["results"][task] for task in sorted(found["results"])}
    for task, values in results.items():
        numbers = {k.partition(",")[0]: v for k, v in values.items() if isinstance(v, float)}
        print(task, " ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
    if options.output is not None:
        record = {"checkpoint": str(options.checkpoint), "results": results}
        options.output.write_text(json.dumps(record, indent=1, default=str), encoding="utf-8")
    return 0


def main() -> int:
    options = make_parser().parse_args()
    return guarded(lambda: run(options), options.debug)


if __name__ == "__main__":
    sys.exit(main())
