"""Draw retrieval by length and depth as heat maps, SVG and PNG, and print the table by length.

Steps that failed and have no rows (failed.jsonl beside a file) are named under both.

Example: python scripts/heatmap.py retrieval.jsonl --value gain --output out
"""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_patches.analysis import command  # noqa: E402
from megatron_patches.analysis.failures import failure_notes, gaps  # noqa: E402
from megatron_patches.analysis.heatmap import heat_map  # noqa: E402
from megatron_patches.analysis.jsonl import UsageError  # noqa: E402
from megatron_patches.analysis.render import FORMATS  # noqa: E402
from megatron_patches.analysis.retrieval_grid import VALUES, questions  # noqa: E402
from megatron_patches.analysis.retrieval_rows import RetrievalRow, read_retrieval  # noqa: E402
from megatron_patches.analysis.retrieval_tables import retrieval_table  # noqa: E402
from megatron_patches.analysis.style import save  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", type=command.existing_file, metavar="ROWS")
    parser.add_argument("--dataset", help="this data set only (else each in turn)")
    parser.add_argument("--methods", nargs="+", help="these methods only, in this order")
    parser.add_argument("--tasks", nargs="+", help="these tasks only")
    parser.add_argument(
        "--depths", type=float, nargs="+", metavar="D", help="rows of these depths only"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", metavar="S", help="rows of these training seeds only"
    )
    parser.add_argument("--value", choices=tuple(VALUES), default="gain", help="default: gain")
    parser.add_argument("--format", choices=tuple(FORMATS), default="markdown")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for the heat maps")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(where=[])  # which `command.failed_beside` asks for
    return parser


def chosen(rows: list[RetrievalRow], arguments: argparse.Namespace) -> list[list[RetrievalRow]]:
    """The rows that fit the options, by question; UsageError when none does."""
    kept = [
        row
        for row in rows
        if arguments.dataset in (None, row.dataset)
        and row.task in (arguments.tasks or [row.task])
        and row.depth in (arguments.depths or [row.depth])
        and row.seed in (arguments.seeds or [row.seed])
    ]
    if not kept:
        raise UsageError("no rows match --dataset, --tasks, --depths and --seeds")
    return questions(kept)


def with_methods(groups: list[list[RetrievalRow]], methods: list[str]) -> list[list[RetrievalRow]]:
    """The questions that one of `methods` was asked; UsageError where one of them was asked none."""
    known = {row.method for group in groups for row in group}
    absent = [name for name in methods if name not in known]
    if absent:
        raise UsageError(f"no rows of {', '.join(absent)}")
    return [group for group in groups if any(row.method in methods for row in group)]


def those_in(group: list[RetrievalRow], methods: list[str] | None) -> list[str] | None:
    """Those of `methods` that were asked this question; None: all of them."""
    known = {row.method for row in group}
    return None if methods is None else [name for name in methods if name in known]


def not_asked(own: list[str] | None, methods: list[str] | None) -> tuple[str, ...]:
    """A note on those of `methods` that are not among `own`."""
    absent = [name for name in methods or [] if name not in (own or [])]
    return (f"not asked: {', '.join(absent)}",) if absent else ()


def stems(groups: list[list[RetrievalRow]], value: str) -> list[str]:
    """A file name for each question; a number tells those apart that share the rest."""
    plain = [
        re.sub(r"[^\w.-]+", "_", f"{value}-{r.dataset}-{r.train_length}-{r.task}-{r.source}")
        for r in (group[0] for group in groups)
    ]
    return [
        name if plain.count(name) == 1 else f"{name}-{number}"
        for number, name in enumerate(plain, 1)
    ]


def main() -> int:
    arguments = make_parser().parse_args()

    def work() -> None:
        read = read_retrieval(arguments.rows)
        groups = chosen(read, arguments)
        if arguments.methods is not None:
            groups = with_methods(groups, arguments.methods)
        failed = command.failed_beside(arguments.rows, read, arguments)
        kinds = [those_in(group, arguments.methods) for group in groups]
        notes = [
            (
                *failure_notes(gaps(failed, group, unit="retrieval")),
                *not_asked(own, arguments.methods),
            )
            for group, own in zip(groups, kinds, strict=True)
        ]
        made = [
            retrieval_table(group, value=arguments.value, methods=own)
            for group, own in zip(groups, kinds, strict=True)
        ]
        tables = [
            FORMATS[arguments.format](replace(table, notes=(*table.notes, *more)))
            for table, more in zip(made, notes, strict=True)
        ]
        if arguments.format == "csv":
            # One text, one line of column names.
            tables[1:] = [text.split("\n", 1)[1] for text in tables[1:]]
        print(("" if arguments.format == "csv" else "\n").join(tables), end="")
        if arguments.output is None:
            return
        named = stems(groups, arguments.value)
        for group, own, more, stem in zip(groups, kinds, notes, named, strict=True):
            figure = heat_map(group, value=arguments.value, methods=own, notes=more)
            for path in save(figure, arguments.output / stem):
                print(path, file=sys.stderr)

    return command.guarded(work, debug=arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
