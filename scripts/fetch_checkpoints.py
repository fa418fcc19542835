"""Check and unpack an archive of a released checkpoint that you have downloaded.

Nothing is downloaded: checkpoints/manifest.yml says what the KERPLE authors released, and where.
"""

import argparse
import datetime
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(ROOT))

from data_prep.errors import DataError  # noqa: E402
from data_prep.files import sha256_file, write_json  # noqa: E402
from megatron_patches.config import Config, ConfigError, dump  # noqa: E402
from megatron_patches.standalone.archive import Archive  # noqa: E402
from megatron_patches.standalone.arguments import guarded, parser, whole  # noqa: E402
from megatron_patches.standalone.released import (  # noqa: E402
    Released,
    check_files,
    check_values,
    read_manifest,
    stored_settings,
)
from megatron_patches.standalone.unpack import (  # noqa: E402
    Selection,
    select,
    unpack,
)
from megatron_patches.standalone.whole_folder import whole_or_nothing  # noqa: E402

SHOWN = 12  # names of left-out members on the screen; source.json has all


@dataclass(frozen=True)
class Arrived:
    """What was found in the archive, once its files are in the folder."""

    selection: Selection
    hashes: dict[str, str]
    sha256: str | None


def sha256(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a sha256 of 64 hexadecimal digits")
    return text.lower()


def make_parser() -> argparse.ArgumentParser:
    made = parser(
        __doc__,
        "python scripts/fetch_checkpoints.py kerple_log-github-released --archive ARCHIVE.zip",
    )
    made.add_argument("name", nargs="?", metavar="NAME", help="a checkpoint of the manifest")
    made.add_argument("--list", action="store_true", help="what the manifest has, and where it is")
    made.add_argument(
        "--archive",
        type=Path,
        metavar="FILE",
        help=".zip, .tar, .tar.gz, .tgz, .tar.zst, or the folder if it is already unpacked",
    )
    made.add_argument("--sha256", type=sha256, metavar="HEX", help="what the archive must have")
    made.add_argument("--step", type=whole(0), metavar="N", help="where there are several")
    made.add_argument("--output", type=Path, metavar="DIR", help="default: checkpoints/NAME")
    made.add_argument(
        "--accept-outside",
        action="store_true",
        help="take position parameters above their method's limit",
    )
    made.add_argument(
        "--manifest", type=Path, default=ROOT / "checkpoints" / "manifest.yml", metavar="FILE"
    )
    return made


def show(manifest: dict[str, Released]) -> None:
    width = max(map(len, manifest))
    for released in manifest.values():
        figures = " ".join(f"{f.length}:{f.perplexity:g}" for f in released.figures)
        print(f"{released.name:{width}}  {figures}")
    for where in sorted({released.where for released in manifest.values()}):
        print(f"perplexity by length, as published; to be had from: {where}")


def check_hash(path: Path, released: Released, wanted: str | None) -> str | None:
    """The archive's sha256, printed and compared; a folder has none."""
    wanted = wanted or released.sha256
    if path.is_dir():
        if wanted:
            raise ConfigError(f"{path}: a folder has no sha256; give the archive itself")
        return None
    found = sha256_file(path)
    print(f"sha256 {found}  {path.name}", flush=True)
    if wanted not in (None, found):
        raise DataError(f"{path}: sha256 {found}, expected {wanted}: another file, or damaged")
    if wanted is None:
        print("no sha256 is known to compare with: only the contents are checked")
    return found


def write_records(
    folder: Path, released: Released, archive: Path, arrived: Arrived, config: Config
) -> None:
    head = (
        f"# {released.name}, composed by scripts/fetch_checkpoints.py from the manifest's files\n"
    )
    (folder / "config.yml").write_text(head + dump(config), encoding="utf-8")
    (folder / "latest").write_text(f"global_step{arrived.selection.step}", encoding="utf-8")
    source = {
        "name": released.name,
        "archive": archive.resolve().name,
        "sha256": arrived.sha256,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": arrived.selection.step,
        "files": dict(sorted(arrived.hashes.items())),
        "left_out": list(arrived.selection.left_out),
        "where": released.where,
        "manifest": released.entry,
    }
    write_json(folder / "source.json", source)


def report(released: Released, output: Path, config: Config) -> None:
    """What to do next, and what to expect of it."""
    lengths = [str(figure.length) for figure in released.figures]
    command = ["python", "eval.py", "--checkpoint", str(output), "--lengths", *lengths]
    command += ["--output", f"results/{released.name}.jsonl"]
    print(f"\n{output} is ready. To score it:\n\n  {shlex.join(command)}\n")
    missing = [p for p in config.valid_data_paths or () if not Path(f"{p}.idx").exists()]
    if missing:
        print(f"Its text is not here yet ({', '.join(missing)}.idx): see configs/dataset/.\n")
    print("published (mean over seeds ± standard deviation):\n")
    for figure in released.figures:
        deviation = "" if figure.std is None else f" ± {figure.std:g}"
        print(f"  {figure.length:>6}  {figure.perplexity:g}{deviation}")


def fetch(options: argparse.Namespace, released: Released) -> int:
    from megatron_patches.standalone.checkpoint import load_model

    config = released.config(ROOT)  # a wrong manifest shows before anything is read
    output = options.output or Path("checkpoints") / released.name
    if not options.archive.exists():
        raise ConfigError(f"{options.archive}: no such file or folder")
    archive = Archive(options.archive)
    with whole_or_nothing(output) as folder:
        found = check_hash(options.archive, released, options.sha256)
        selection = select(archive, options.step)
        for name in selection.left_out[:SHOWN]:
            print(f"left out: {name}")
        if len(selection.left_out) > SHOWN:
            print(f"left out: {len(selection.left_out) - SHOWN} more")
        arrived = Arrived(selection, unpack(archive, selection, folder), found)
        overrides, notes = stored_settings(released, folder)
        config = released.config(ROOT, overrides)
        check_files(released, folder / f"global_step{selection.step}")
        write_records(folder, released, options.archive, arrived, config)
        # The same way as eval.py will: strictly, with the configuration just written.
        model = load_model(folder)
        notes += check_values(model, accept_outside=options.accept_outside)
        print(f"{len(arrived.hashes)} files taken, {model.parameter_count():,} parameters")
        print("\n".join(notes))
    report(released, output, config)
    return 0


def main(arguments: list[str] | None = None) -> int:
    made = make_parser()
    options = made.parse_args(arguments)
    if not options.list and (options.name is None or options.archive is None):
        made.error("give a NAME and its --archive, or --list")

    def work() -> int:
        manifest = read_manifest(options.manifest)
        if options.list:
            show(manifest)
            return 0
        if options.name not in manifest:
            known = ", ".join(manifest)
            raise ConfigError(f"{options.manifest} has no {options.name}; it has {known}")
        return fetch(options, manifest[options.name])

    return guarded(work, options.debug)


if __name__ == "__main__":
    sys.exit(main())
