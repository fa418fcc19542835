"""Print tables of result rows: perplexity by length beside the published one, differences, training.

Example: python scripts/tables.py results/runs.jsonl --table table3 --dataset openwebtext2
         python scripts/tables.py results/runs.jsonl --table differences --reference alibi
         python scripts/tables.py results/training.jsonl --table training
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(ROOT))

from megatron_patches.analysis import command  # noqa: E402
from megatron_patches.analysis.aggregate import only  # noqa: E402
from megatron_patches.analysis.comparison import comparison_table, same_question  # noqa: E402
from megatron_patches.analysis.differences_table import differences_table  # noqa: E402
from megatron_patches.analysis.early import MAY_DIFFER, SIDE_BY_SIDE, SLIDING, early_table  # noqa: E402
from megatron_patches.analysis.failures import Failure, failure_notes, gaps  # noqa: E402
from megatron_patches.analysis.jsonl import UsageError  # noqa: E402
from megatron_patches.analysis.layout import Table  # noqa: E402
from megatron_patches.analysis.published import (  # noqa: E402
    REFERENCE,
    PublishedRow,
    read_published,
)
from megatron_patches.analysis.reach_table import reach_table  # noqa: E402
from megatron_patches.analysis.render import FORMATS  # noqa: E402
from megatron_patches.analysis.rows import Row, read_kernels, read_rows  # noqa: E402
from megatron_patches.analysis.sections import alike  # noqa: E402
from megatron_patches.analysis.tables import (  # noqa: E402
    check_whole_windows,
    extrapolation_table,
    published_rows,
    published_table,
    relative_table,
)
from megatron_patches.analysis.training_curves import training_table  # noqa: E402
from megatron_patches.analysis.training_rows import read_training, training_groups  # noqa: E402

PUBLISHED = {f"table{number}": f"Table {number}" for number in (3, 5, 6, 9)}
OF_MODELS = ("training", "reach")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_common_arguments(parser)
    parser.add_argument(
        "--table",
        choices=("extrapolation", "relative", "differences", "early", *OF_MODELS, *PUBLISHED),
        default="extrapolation",
        help="extrapolation: perplexity by length (default); relative: divided by that at the "
        "training length; differences: loss minus that of --reference, with intervals over seeds and "
        "over windows and p corrected for the number of tests; early: windows side by side beside "
        "sliding ones of the same models (early-token effect, ALiBi's appendix B); training: losses, "
        "slope at the end and speed of every run, of files of training rows; reach: effective length of "
        "heads, of files of learned kernels; tableN: perplexity, that table of the KERPLE paper, and "
        "ours beside it with the difference (of perplexities for models of the paper's size, steps, "
        "tokenizer and data, else relative). Rows of several training lengths, protocols, ... are a "
        "table each",
    )
    parser.add_argument("--reference", default=REFERENCE, help=f"compare with it ({REFERENCE})")
    parser.add_argument("--format", choices=tuple(FORMATS), default="markdown")
    parser.add_argument(
        "--brief", action="store_true", help="leave out the hashes, which stand in the rows"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write here, not to stdout")
    parser.add_argument(
        "--published",
        type=command.existing_file,
        metavar="FILE",
        default=ROOT / "results" / "published.csv",
        help="the papers' figures (results/published.csv)",
    )
    parser.add_argument(
        "--published-dataset",
        metavar="D",
        help="published data set to compare trends with, where it is not the rows' own "
        "(with `relative`: of Table 3)",
    )
    return parser


def make_tables(
    rows: list[Row], published: list[PublishedRow], arguments: argparse.Namespace
) -> list[Table]:
    """The tables asked for, of rows that answer one question."""
    # Of several questions, each need not have every method.
    there = {row.method for row in rows}
    methods = arguments.methods and [name for name in arguments.methods if name in there]
    if arguments.table == "relative":
        beside = arguments.published_dataset
        trend = published_rows(published, PUBLISHED["table3"], beside) if beside else ()
        return [relative_table(rows, trend, methods=methods)]
    if arguments.table == "early":
        return [early_table(rows, methods=methods)]
    if arguments.table == "differences":
        return [differences_table(rows, reference=arguments.reference, methods=methods)]
    ours = extrapolation_table(rows, reference=arguments.reference, methods=methods)
    if arguments.table not in PUBLISHED:
        return [ours]
    check_whole_windows(rows)
    table, dataset = PUBLISHED[arguments.table], arguments.published_dataset or rows[0].dataset
    # Table 9 holds two models, told apart by their training length; the others hold one.
    length = rows[0].train_length if arguments.table == "table9" else None
    found = published_rows(published, table, dataset, train_length=length)
    paper = published_table(published, table=table, dataset=dataset, train_length=length)
    tables = [ours, paper, comparison_table(rows, found, methods=methods)]
    if same_question(rows, found):
        tables.append(relative_table(rows, found, methods=methods))
    return tables


def questions(rows: list[Row], arguments: argparse.Namespace) -> list[list[Row]]:
    """Rows of one data set cut into those that may meet in one table; UsageError for a method of none.

    Windows side by side and sliding ones meet in the early-token table, whose protocols differ.
    """
    only(rows, arguments.methods)
    if arguments.table == "early":
        both = {SIDE_BY_SIDE, SLIDING}
        groups = alike((row for row in rows if row.protocol in both), MAY_DIFFER)
        return [g for g in groups if {row.protocol for row in g} == both] or [rows]
    groups = alike(rows)
    chosen = [g for g in groups if {row.method for row in g} & set(arguments.methods or ())]
    return chosen or groups


def model_tables(arguments: argparse.Namespace) -> list[Table]:
    """Tables of training rows or of learned kernels; UsageError when the choice leaves none."""
    training = arguments.table == "training"
    read = read_training(arguments.rows) if training else read_kernels(arguments.rows)
    rows: list[Any] = [row for row in read if command.lets_through(row, arguments)]
    if not rows:
        raise UsageError("no rows match the choice of data set, methods and --where")
    if not training:
        return [reach_table(rows)]
    failed = command.failed_beside(arguments.rows, read, arguments)
    return [
        with_failures(training_table(group), gaps(failed, group, unit="train"))
        for group in training_groups(rows)
    ]


def with_failures(table: Table, failures: list[Failure]) -> Table:
    """The table with a note on each failure that left a gap in it."""
    return replace(table, notes=(*table.notes, *failure_notes(failures)))


def without_hashes(header: Iterable[str]) -> tuple[str, ...]:
    """The lines that say what was measured, without those that only identify it."""
    return tuple(line for line in header if not line.startswith(("data ", "commit ", "configs ")))


def briefed(tables: list[Table]) -> list[Table]:
    """Tables without hashes, but for those that only their hashes tell apart."""
    brief = [replace(table, header=without_hashes(table.header)) for table in tables]
    heads = [(table.title, table.header) for table in brief]
    pairs = zip(tables, brief, heads, strict=True)
    return [short if heads.count(head) == 1 else whole for whole, short, head in pairs]


def main() -> int:
    arguments = make_parser().parse_args()

    def work() -> None:
        if arguments.table in OF_MODELS:
            tables = model_tables(arguments)
        else:
            wanted = arguments.table in PUBLISHED or arguments.published_dataset is not None
            published = read_published(arguments.published) if wanted else []
            read = read_rows(arguments.rows)
            failed = command.failed_beside(arguments.rows, read, arguments)
            tables = []
            for of_dataset in command.by_dataset(read, arguments).values():
                for rows in questions(of_dataset, arguments):
                    first, *others = make_tables(rows, published, arguments)
                    tables += [with_failures(first, gaps(failed, rows)), *others]
            # Several training lengths stand beside the same published table.
            tables = [t for n, t in enumerate(tables) if t not in tables[:n]]
        if arguments.brief:
            tables = briefed(tables)
        texts = [FORMATS[arguments.format](table) for table in tables]
        if arguments.format == "csv":
            # One file, one line of column names.
            texts[1:] = [text.split("\n", 1)[1] for text in texts[1:]]
        text = ("" if arguments.format == "csv" else "\n").join(texts)
        if arguments.output is None:
            print(text, end="")
        else:
            command.write_text(arguments.output, text)

    return command.guarded(work, debug=arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
