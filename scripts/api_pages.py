"""Write the API pages of positions, attention and hf from their docstrings; needs the extra `docs`."""

import argparse
import importlib
import pkgutil
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(ROOT))

from megatron_patches.config import ConfigError  # noqa: E402
from megatron_patches.standalone.arguments import guarded, parser  # noqa: E402

PACKAGES = ("positions", "attention", "hf")


def make_parser() -> argparse.ArgumentParser:
    made = parser(__doc__, "python scripts/api_pages.py build/api")
    made.add_argument("output", type=Path, help="folder of the pages; index.html is the first")
    return made


def modules() -> list[str]:
    """The packages and their public modules, with what loads on first use loaded."""
    found = []
    for short in PACKAGES:
        package = importlib.import_module(f"megatron_patches.{short}")
        for name in package.__all__:
            setattr(package, name, getattr(package, name))  # the generator looks in __dict__
        found.append(package.__name__)
        inside = pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
        # Without Triton's kernels, which are for its compiler, not for callers.
        found += [module.name for module in inside if "._triton" not in module.name]
    return found


def write(output: Path) -> None:
    """One page a module. ConfigError where the generator is not installed."""
    try:
        import pdoc
        import pdoc.render
    except ImportError as error:
        raise ConfigError(f"this needs pdoc: pip install '.[docs]' ({error})") from error
    # Types of NamedTuples' fields, which it looks for in the wrong module.
    warnings.filterwarnings("ignore", message="Error parsing type annotation")
    pdoc.render.configure(docformat="google", search=True, show_source=False)
    pdoc.pdoc(*modules(), output_directory=output)


def main() -> int:
    options = make_parser().parse_args()

    def run() -> int:
        write(options.output)
        print(f"wrote {options.output / 'index.html'}")
        return 0

    return guarded(run, options.debug)


if __name__ == "__main__":
    sys.exit(main())
