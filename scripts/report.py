"""Write one self-contained HTML page of all results: tables, charts, kernels, filters, provenance.

The page needs no server and no network. Without ROWS it shows all under results/: evaluated rows,
learned kernels, training runs and retrieval.

Example: python scripts/report.py results/runs.jsonl --kernels results/kernels.jsonl
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(ROOT))

from megatron_patches.analysis import command  # noqa: E402
from megatron_patches.analysis.aggregate import only  # noqa: E402
from megatron_patches.analysis.failures import FILE, read_failures  # noqa: E402
from megatron_patches.analysis.jsonl import UsageError  # noqa: E402
from megatron_patches.analysis.published import REFERENCE, read_published  # noqa: E402
from megatron_patches.analysis.report import Extras, Settings, report  # noqa: E402
from megatron_patches.analysis.retrieval_rows import read_retrieval  # noqa: E402
from megatron_patches.analysis.rows import Row, read_kernels, read_rows  # noqa: E402
from megatron_patches.analysis.sections import Found, Source, find_files  # noqa: E402
from megatron_patches.analysis.training_rows import read_training  # noqa: E402


def pair(text: str) -> tuple[str, str]:
    """argparse type: ``OURS=PUBLISHED``, the names of two data sets."""
    ours, equals, published = text.partition("=")
    if not (ours and equals and published):
        raise argparse.ArgumentTypeError(f"{text!r} is not OURS=PUBLISHED")
    return ours, published


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_common_arguments(parser, files="*", without="; all under results/ if left out")
    beside = " (without ROWS: all under results/ as well)"
    command.add_file_arguments(parser, without=beside)
    parser.add_argument(
        "--retrieval",
        nargs="+",
        type=command.existing_file,
        default=[],
        metavar="FILE",
        help=f"files of retrieval rows{beside}",
    )
    parser.add_argument("--reference", default=REFERENCE, help=f"compare with it ({REFERENCE})")
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        type=pair,
        metavar="OURS=PUBLISHED",
        help="show the published figures of another data set beside one of ours, as in "
        "--beside local_code=github; may be repeated",
    )
    parser.add_argument(
        "--published",
        type=command.existing_file,
        metavar="FILE",
        default=ROOT / "results" / "published.csv",
        help="the papers' figures (results/published.csv)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", default=Path("report.html"))
    return parser


def shown_name(path: Path) -> str:
    """The path from the current folder where it lies below, else the file's name alone: a page
    that is passed on should not carry the folders of the machine it was made on."""
    relative = os.path.relpath(path)
    return path.name if relative.startswith("..") else Path(relative).as_posix()


def chosen_rows(paths: Sequence[Path], arguments: argparse.Namespace) -> list[Source]:
    """The rows of each file that the command line lets through, files without any left out."""
    read = {path: read_rows(path) for path in paths}
    everything: list[Row] = [row for rows in read.values() for row in rows]
    if not everything:
        return []
    kept = [row for rows in command.by_dataset(everything, arguments).values() for row in rows]
    let_through = {id(row) for row in only(kept, arguments.methods)}
    sources = [
        Source(shown_name(path), [row for row in rows if id(row) in let_through])
        for path, rows in read.items()
    ]
    return [source for source in sources if source.rows]


def main() -> int:
    arguments = make_parser().parse_args()

    def work() -> None:
        named = Found(arguments.rows, arguments.kernels, arguments.training, arguments.retrieval)
        # What failed beside the rows that are named has no rows of its own.
        beside = [path.with_name(FILE) for path in dict.fromkeys(named.rows)]
        named.failed.extend(path for path in dict.fromkeys(beside) if path.is_file())
        there = Found()
        if not any(vars(named).values()):
            there = find_files(ROOT / "results")
        elif not named.rows:
            raise UsageError("name files of ROWS as well: the page is about them")
        files = Found(**{kind: paths or vars(there)[kind] for kind, paths in vars(named).items()})
        sources = chosen_rows(files.rows, arguments)

        def wanted(rows: Iterable[Any]) -> list[Any]:
            return [row for row in rows if command.lets_through(row, arguments)]

        extras = Extras(
            kernels=wanted(read_kernels(files.kernels)),
            training=wanted(read_training(files.training)),
            retrieval=wanted(read_retrieval(files.retrieval)),
            failed=wanted(read_failures(files.failed)),
        )
        settings = Settings(
            reference=arguments.reference,
            published=read_published(arguments.published),
            beside=dict(arguments.beside),
        )
        command.write_text(arguments.output, report(sources, extras, settings))
        print(arguments.output)

    return command.guarded(work, debug=arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
