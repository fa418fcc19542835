"""The files of a folder that hold documents: which are read, and which are known to hold none."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path

from data_prep.errors import DataError
from data_prep.readers.base import check_regular

# What a Hugging Face data set has beside its .arrow or .parquet files.
_ABOUT = {"dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json", "README.md"}


def files_below(folder: Path) -> list[Path]:
    """All files in and below ``folder`` by name, hidden ones left out; shards in their order.

    DataError for what cannot be read: a folder, a link to nothing, an entry that is no file.
    """
    files: list[Path] = []
    for above, folders, names in os.walk(folder, onerror=_refuse_folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(above, name) for name in folders):
            if path.is_symlink():  # not walked into, and what lies there must not go missing
                raise DataError(
                    f"{path} is a link to a folder: give that folder as an --input of its own"
                )
        files += [Path(above, name) for name in names if not name.startswith(".")]
    files.sort()
    for path in files:
        check_regular(path)
    # lm_dataformat leaves this file in every archive, empty; with content it is a crash.
    files = [p for p in files if p.name != "current_chunk_incomplete" or _refuse_chunk(p)]
    if any(path.suffix in (".arrow", ".parquet") for path in files):
        files = _of_datasets(files)
    return files


def matching(pattern: str) -> list[Path]:
    """What a glob names, sorted; DataError for a folder or link it has to go through and cannot.

    `glob` itself passes these over without a word.
    """
    parts = Path(pattern).parts
    magic = [at for at, part in enumerate(parts) if glob.has_magic(part)]
    for at in range(magic[0], len(parts)) if magic else ():
        # `a/**` names all folders below a, which the pattern goes through itself.
        prefix = Path(*parts[: at + (parts[at] == "**")])
        for found in glob.glob(str(prefix), recursive=True):
            if os.path.isdir(found):
                try:
                    os.scandir(found).close()
                except OSError as error:
                    _refuse_folder(error)
            elif not os.path.exists(found):  # a link to nothing, perhaps once to a folder
                check_regular(Path(found))
    return sorted(map(Path, glob.glob(pattern, recursive=True)))


def _refuse_folder(error: OSError) -> None:
    raise DataError(
        f"{error.filename}: this folder cannot be listed ({error.strerror}), so its documents "
        "would be missing; make it readable, or name inputs that leave it out"
    ) from error


def _refuse_chunk(path: Path) -> bool:
    if path.stat().st_size:
        raise DataError(
            f"{path}: an lm_dataformat archive that was never committed; finish it first"
        )
    return False


def _of_datasets(files: list[Path]) -> list[Path]:
    """A folder of `save_to_disk` says which .arrow files are its data: others are leftovers."""
    saved = {path.parent: _shards(path) for path in files if path.name == "state.json"}
    kept: list[Path] = []
    for path in files:
        if path.name == "state.json":
            kept += saved[path.parent]
        elif path.suffix == ".arrow" and path.parent in saved:
            continue
        elif path.name.startswith("cache-") and path.suffix == ".arrow":
            raise DataError(
                f"{path}: an intermediate result of `datasets`, its rows may repeat others; name "
                "the files that are wanted, or move it away"
            )
        elif path.name not in _ABOUT and not (path.suffix == ".lock" and not path.stat().st_size):
            kept.append(path)
    return kept


def _shards(state: Path) -> list[Path]:
    try:
        content = json.loads(state.read_bytes())
        names = [entry["filename"] for entry in content["_data_files"]]
        picked = content.get("_indices_data_files") or content.get("_indices_files")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{state}: not the state of a saved data set ({error!r})") from error
    if picked:
        raise DataError(f"{state}: rows picked by an index; save it anew with a newer `datasets`")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise DataError(f"{state}: names a file outside its folder, {name!r}")
        if not (state.parent / name).is_file():
            raise DataError(f"{state}: names {name}, which is not there; get the folder anew")
    return [state.parent / name for name in names]
