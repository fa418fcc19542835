"""Draw figures of results, each as SVG and PNG, one set for each data set and training length.

From ROWS perplexity by length and loss by position (with windowed controls where there are any), from
--kernels the learned kernels and the cumulative effective length of heads, from --training the training
curves and the position parameters. A label looks the same in all of them. Steps that failed
and have no rows (failed.jsonl beside a file) are named at the foot.

Example: python scripts/figures.py results/runs.jsonl --kernels results/kernels.jsonl --output out
         python scripts/figures.py --training results/training.jsonl --output out
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_patches.analysis import command  # noqa: E402
from megatron_patches.analysis.failures import Failure, failure_notes, gaps  # noqa: E402
from megatron_patches.analysis.figures import perplexity_figure  # noqa: E402
from megatron_patches.analysis.figures_kernels import kernel_figure  # noqa: E402
from megatron_patches.analysis.figures_position import position_figure  # noqa: E402
from megatron_patches.analysis.figures_reach import reach_figure  # noqa: E402
from megatron_patches.analysis.figures_training import (  # noqa: E402
    parameters_figure,
    training_figure,
)
from megatron_patches.analysis.jsonl import UsageError  # noqa: E402
from megatron_patches.analysis.kernels import KernelSet, kernel_sets  # noqa: E402
from megatron_patches.analysis.looks import Looks, numbered  # noqa: E402
from megatron_patches.analysis.positions import position_lengths  # noqa: E402
from megatron_patches.analysis.rows import (  # noqa: E402
    KernelRow,
    Row,
    RowError,
    read_kernels,
    read_rows,
)
from megatron_patches.analysis.sections import Section, Source, cut  # noqa: E402
from megatron_patches.analysis.style import save  # noqa: E402
from megatron_patches.analysis.training_rows import (  # noqa: E402
    TrainingRow,
    read_training,
    training_groups,
)
from megatron_patches.analysis.undrawn import training_notes  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_common_arguments(parser, files="*", without="; none: kernels or training only")
    command.add_file_arguments(parser)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder for the figures"
    )
    return parser


def draw(
    rows: list[Row],
    methods: list[str] | None,
    folder: Path,
    looks: Looks,
    failed: Sequence[Failure] = (),
) -> list[Path]:
    """The figures of one data set; losses by position once for each length that has them."""
    sections = cut([Source("rows", rows)])
    paths = []
    for section, suffix in zip(sections, suffixes(sections), strict=True):
        if section.problem is not None:
            raise RowError(section.problem)
        own = section.rows
        present = {row.method for row in own}
        listed = None if methods is None else [name for name in methods if name in present]
        name = file_name(own[0].dataset)
        notes = failure_notes(gaps(failed, own))
        # One length makes no curve, and losses by position are what such rows are for.
        if len({row.eval_length for row in own}) > 1 or not position_lengths(own):
            figure = perplexity_figure(own, methods=listed, looks=looks, notes=notes)
            paths += save(figure, folder / f"perplexity-{name}{suffix}")
        for length in position_lengths(own):
            figure = position_figure(
                own, eval_length=length, methods=listed, looks=looks, notes=notes
            )
            paths += save(figure, folder / f"position-{name}-{length}{suffix}")
    return paths


def suffixes(sections: Sequence[Section]) -> list[str]:
    """What tells the files of several sections of one data set apart; nothing for a single one."""
    told = ("train_length", "protocol", "split", "stride", "last_k", "step")
    kinds = {name: {getattr(s.rows[0], name) for s in sections} for name in told}
    # Windows side by side have their own length as stride, which tells nothing apart.
    differing = [name for name in told if len(kinds[name]) > 1 and name != "stride"]
    found = [
        "".join(f"-{label(name, getattr(section.rows[0], name))}" for name in differing)
        for section in sections
    ]
    return [
        text if found.count(text) == 1 else f"{text}-{found[:place].count(text) + 1}"
        for place, text in enumerate(found)
    ]


def label(name: str, value: Any) -> str:
    return {"train_length": "train", "step": "step", "last_k": "last"}.get(name, "") + str(value)


def draw_kernels(
    kernels: list[KernelRow], folder: Path, looks: Looks, failed: Sequence[Failure] = ()
) -> list[Path]:
    """One figure of learned kernels for each set (data set, training length, step, size of the model)
    and seed, one of reach for each set."""
    paths = []
    sets = kernel_sets(kernels)
    for key, rows in sets.items():
        name, suffix = file_name(key.dataset), kernel_suffix(key, sets)
        missing = gaps(failed, rows, unit="kernels")
        for seed in sorted({row.seed for row in rows}):
            own = [row for row in rows if row.seed == seed]
            of_seed = failure_notes(item for item in missing if item.seed == seed)
            figure = kernel_figure(own, notes=of_seed)
            paths += save(figure, folder / f"kernels-{name}-seed{seed}{suffix}")
        if any(row.bias is not None for row in rows):
            figure = reach_figure(rows, looks=looks, notes=failure_notes(missing))
            paths += save(figure, folder / f"reach-{name}{suffix}")
    return paths


def kernel_suffix(key: KernelSet, sets: Iterable[KernelSet]) -> str:
    """What tells the files of several sets apart; nothing where a data set has a single one."""
    sets = list(sets)
    parts = (
        [f"-train{key.train_length or 'unknown'}"]
        if len({other.train_length for other in sets}) > 1
        else []
    )
    own = [other for other in sets if other[:2] == key[:2]]
    parts += [f"-step{key.step}"] if len({other.step for other in own}) > 1 else []
    sizes = {other.size for other in own if other.step == key.step}
    return "".join([*parts, f"-size{key.size + 1}" if len(sizes) > 1 else ""])


def draw_training(
    rows: list[TrainingRow], folder: Path, looks: Looks, failed: Sequence[Failure] = ()
) -> list[Path]:
    """Training curves, and parameters where there are any, of each group that may meet."""
    paths = []
    groups = training_groups(rows)
    keys = [(group[0].dataset, group[0].train_length) for group in groups]
    several = len({length for _, length in keys}) > 1
    for place, group in enumerate(groups):
        first = group[0]
        suffix = f"-train{first.train_length}" if several else ""
        turn = keys[:place].count(keys[place])
        name = f"{file_name(first.dataset)}{suffix}" + (f"-{turn + 1}" if turn else "")
        if all(row.status != "ok" for row in group):
            why = "; ".join(training_notes(group))
            print(f"no figure of training on {first.dataset}: {why}", file=sys.stderr)
            continue
        notes = failure_notes(gaps(failed, group, unit="train"))
        figure = training_figure(group, looks=looks, notes=notes)
        paths += save(figure, folder / f"training-{name}")
        if any(row.position for row in group if row.status == "ok"):
            paths += save(parameters_figure(group), folder / f"parameters-{name}")
    return paths


def file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)


def chosen(rows: Iterable[Any], wanted: Callable[[Any], bool], what: str) -> list[Any]:
    """The rows let through; UsageError when there were some and none is left."""
    rows = list(rows)
    kept = [row for row in rows if wanted(row)]
    if rows and not kept:
        raise UsageError(f"no {what} match the choice of data set, methods and --where")
    return kept


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    if not (arguments.rows or arguments.kernels or arguments.training):
        parser.error("name files of rows, or --kernels, or --training")

    def work() -> None:
        rows, runs = read_rows(arguments.rows), read_training(arguments.training)
        heads = read_kernels(arguments.kernels)
        # Of all that was read: what is left out below changes no look.
        looks = numbered(rows, runs, heads)

        def wanted(row: Any) -> bool:
            return command.lets_through(row, arguments)

        # A study keeps the kernels of each run in a folder below its other files.
        below = [
            path.parent if path.parent.name == "kernels" else path for path in arguments.kernels
        ]
        results = [*arguments.rows, *arguments.training, *below]
        failed = command.failed_beside(results, [*rows, *runs], arguments)
        paths = []
        if heads:
            kernels = chosen(heads, wanted, "kernels")
            paths += draw_kernels(kernels, arguments.output, looks, failed)
        if runs:
            training = chosen(runs, wanted, "training rows")
            paths += draw_training(training, arguments.output, looks, failed)
        by_dataset = command.by_dataset(rows, arguments) if arguments.rows else {}
        for own in by_dataset.values():
            paths += draw(own, arguments.methods, arguments.output, looks, failed)
        print("\n".join(str(path) for path in paths))

    return command.guarded(work, debug=arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
