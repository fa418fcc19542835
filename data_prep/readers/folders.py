"""The files of a folder that hold documents: which are read, and which are known to hold none."""

from __future__ import annotations

import json
from pathlib import Path

from data_prep.errors import DataError

# What a Hugging Face data set has beside its .arrow or .parquet files.
_ABOUT = {"dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json", "README.md"}


def files_below(folder: Path) -> list[Path]:
    """All files in and below ``folder`` by name, hidden ones left out; shards in their order."""
    # rglob does not look behind links to folders, and what lies there must not go missing.
    links = [path for path in folder.rglob("*") if path.is_symlink() and path.is_dir()]
    if links:
        raise DataError(
            f"{links[0]} is a link to a folder: give that folder as an --input of its own"
        )
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    files = [p for p in files if not any(n.startswith(".") for n in p.relative_to(folder).parts)]
    # lm_dataformat leaves this file in every archive, empty; with content it is a crash.
    files = [p for p in files if p.name != "current_chunk_incomplete" or _refuse_chunk(p)]
    if any(path.suffix in (".arrow", ".parquet") for path in files):
        files = _of_datasets(files)
    return files


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
