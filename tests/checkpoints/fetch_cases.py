"""Archives as the authors' releases may look, made from a tiny checkpoint of their fork."""

from __future__ import annotations

import gzip
import importlib.util
import io
import sys
import tarfile
import zipfile
from pathlib import Path

import zstandard

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "goldens" / "fork" / "kerple_log"
MANIFEST = ROOT / "checkpoints" / "manifest.yml"
STEP = "global_step7"
KINDS = ("zip", "tar", "tar.gz", "tgz", "tar.zst", "folder")
LAYERS = [f"layer_{n:02d}-model_00-model_states.pt" for n in (0, 2, 3, 5, 6)]

_spec = importlib.util.spec_from_file_location(
    "fetch_checkpoints", ROOT / "scripts" / "fetch_checkpoints.py"
)
assert _spec is not None and _spec.loader is not None
script = importlib.util.module_from_spec(_spec)
sys.modules["fetch_checkpoints"] = script
_spec.loader.exec_module(script)


def members(**changes: bytes | None) -> dict[str, bytes]:
    """A release as archives hold it: folders above, bookkeeping beside; None leaves a file out."""
    top = f"KERPLE/runs/{STEP}"
    found = {f"{top}/{file.name}": file.read_bytes() for file in sorted(GOLDEN.glob("layer_*"))}
    found |= {
        "KERPLE/runs/latest": STEP.encode(),
        "KERPLE/README.md": b"hello",
        f"{top}/mp_rank_00_model_states.pt": b"settings",
        f"{top}/zero_pp_rank_0_mp_rank_00_optim_states.pt": b"moments",
        f"{top}/configs/train.yml": b'{"pos-emb": "kerple_log", "seed": 1237}',
    }
    return {name: data for name, data in {**found, **changes}.items() if data is not None}


def tar_bytes(files: dict[str, bytes], *extra: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        for info in extra:
            tar.addfile(info)
    return buffer.getvalue()


def pack(folder: Path, kind: str, files: dict[str, bytes]) -> Path:
    path = folder / f"release.{kind}"
    if kind == "folder":
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    elif kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
            for name, data in files.items():
                out.writestr(name, data)
    else:
        data = tar_bytes(files)
        if kind in ("tar.gz", "tgz"):
            data = gzip.compress(data, 1)
        path.write_bytes(zstandard.compress(data) if kind == "tar.zst" else data)
    return path
