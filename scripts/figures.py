"""Draw perplexity by length, loss by position and learned kernels, each as SVG and PNG.

Example: python scripts/figures.py results/runs.jsonl --kernels results/kernels.jsonl --output out
"""

import argparse
import re
import sys
from pathlib import Path

# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_patches.analysis import command  # noqa: E402
from megatron_patches.analysis.figures import (  # noqa: E402
    kernel_figure,
    perplexity_figure,
    position_figure,
)
from megatron_patches.analysis.rows import KernelRow, Row, read_kernels, read_rows  # noqa: E402
from megatron_patches.analysis.style import save  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_common_arguments(parser)
    parser.add_argument(
        "--kernels",
        nargs="+",
        type=command.existing_file,
        default=[],
        metavar="FILE",
        help="files of learned kernels",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder for the figures"
    )
    return parser


def draw(rows: list[Row], methods: list[str] | None, folder: Path) -> list[Path]:
    """The figures of one data set; losses by position once for each length that has them."""
    name = file_name(rows[0].dataset)
    paths = save(perplexity_figure(rows, methods=methods), folder / f"perplexity-{name}")
    for length in sorted({row.eval_length for row in rows if row.position_losses}):
        figure = position_figure(rows, eval_length=length, methods=methods)
        paths += save(figure, folder / f"position-{name}-{length}")
    return paths


def draw_kernels(kernels: list[KernelRow], folder: Path) -> list[Path]:
    """One figure of learned kernels for each data set and seed."""
    paths = []
    for dataset, seed in sorted({(row.dataset, row.seed) for row in kernels}):
        figure = kernel_figure(r for r in kernels if (r.dataset, r.seed) == (dataset, seed))
        paths += save(figure, folder / f"kernels-{file_name(dataset)}-seed{seed}")
    return paths


def file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text)


def main() -> int:
    arguments = make_parser().parse_args()

    def work() -> None:
        chosen = command.by_dataset(read_rows(arguments.rows), arguments)
        kernels = [
            row
            for row in read_kernels(arguments.kernels)
            if row.dataset in chosen and row.method in (arguments.methods or [row.method])
        ]
        paths = draw_kernels(kernels, arguments.output)
        for rows in chosen.values():
            paths += draw(rows, arguments.methods, arguments.output)
        print("\n".join(str(path) for path in paths))

    return command.guarded(work, debug=arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
