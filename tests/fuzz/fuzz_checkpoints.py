"""Targets: checkpoints of this suite, of GPT-NeoX, released archives."""

from __future__ import annotations

import functools
import io
import json
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fuzz_attacks as attacks
import torch
from fuzz_target import Files, Target, read_folder

from data_prep.errors import DataError
from megatron_patches.config import Config, ConfigError, from_mapping
from megatron_patches.standalone import GPT, CheckpointError, export, load_model, manifest
from megatron_patches.standalone.archive import Archive
from megatron_patches.standalone.build import shape_of
from megatron_patches.standalone.moments import Moments, read_moments
from megatron_patches.standalone.provenance import RunRecordError, read_run
from megatron_patches.standalone.safety import check_untrusted, step_that_neox_loads
from megatron_patches.standalone.unpack import select, unpack

TESTS = Path(__file__).resolve().parents[1]
sys.path.append(str(TESTS / "checkpoints"))
STEP = "global_step7"
WEIGHTS = f"{STEP}/mp_rank_00_model_states.pt"
SETTINGS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "pos_emb": "kerple_log",
    "no_weight_tying": True,
    "train_iters": 9,
    "train_micro_batch_size_per_gpu": 1,
    "padded_vocab_size": 16,
    "dataset": "toy",
}
RUN = {"config_sha": "0123456789ab", "git_sha": "unknown", "data": "d", "tokenizer": "t"}
RUN |= {"engine": "standalone", "parameters": 1000, "global_batch": 1, "processes": 1}
OURS = (ConfigError, CheckpointError, DataError, RunRecordError)


@functools.cache
def a_model(method: str = "kerple_log") -> tuple[GPT, Config]:
    config = from_mapping({**SETTINGS, "pos_emb": method})
    model = GPT(shape_of(config, config.padded_vocab_size))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.1)
    return model.eval(), config


def a_run(form: export.Form, *, sealed: bool = False, with_moments: bool = False) -> Files:
    model, config = a_model()
    moments = None
    if with_moments:
        values = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        moments = Moments(dict.fromkeys(values, 7), values, values)
    with tempfile.TemporaryDirectory() as folder:
        step = export.export(model, Path(folder), step=7, config=config, form=form, moments=moments)
        if sealed:
            files = {file.name: manifest.record(file) for file in manifest.files_of(step)}
            manifest.write(step, files, {"step": 7})
        (Path(folder) / "run.json").write_text(json.dumps(RUN))
        found = read_folder(Path(folder))
    return {name: data for name, data in found.items() if not name.startswith(f"{STEP}/configs")}


def shown(model: GPT) -> dict[str, Any]:
    """All weights as numbers that compare, whatever their dtype."""
    return {name: tensor.double().tolist() for name, tensor in model.state_dict().items()}


# ---- checkpoints of either engine ------------------------------------------------------------


def _load(folder: Path) -> Any:
    return shown(load_model(folder)), read_run(folder)


def _load_sealed(folder: Path) -> Any:
    return shown(load_model(folder))


def _attacks_of_runs() -> dict[str, Files]:
    base = a_run(export.Form("single"))
    sound = {"module": {k: v.clone() for k, v in a_model()[0].state_dict().items()}}
    huge = {"module": dict(sound["module"])}
    key = next(iter(huge["module"]))
    huge["module"][key] = torch.zeros(1).expand(1 << 40)  # one stored number, a huge shape
    found = attacks.with_file(base, WEIGHTS, attacks.code_in_pickles(sound))
    found["huge-shape"] = {**base, WEIGHTS: attacks.pickled(None, names=huge)}
    found["bomb"] = {**base, WEIGHTS: _torch_bomb(base[WEIGHTS])}
    for name in ("../outside", "/etc", f"{STEP}/..", "", "x" * 5000):
        found[f"latest-{len(found)}"] = {**base, "latest": name.encode()}
    found["run-deep"] = {**base, "run.json": attacks.deep_json()}
    found |= attacks.with_file(base, "config.yml", attacks.yaml_attacks(base["config.yml"]))
    return found


def _torch_bomb(good: bytes) -> bytes:
    """A file of torch whose first tensor is stored compressed, a thousand times smaller."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as old, zipfile.ZipFile(stream, "w") as new:
        first = next(n for n in old.namelist() if "/data/" in n)
        for name in old.namelist():
            content = bytes(1 << 29) if name == first else old.read(name)
            kind = zipfile.ZIP_DEFLATED if name == first else zipfile.ZIP_STORED
            new.writestr(zipfile.ZipInfo(name), content, kind)
    return stream.getvalue()


def _attacks_of_manifests() -> dict[str, Files]:
    base = a_run(export.Form("single"), sealed=True)
    name, content = f"{STEP}/manifest.json", json.loads(base[f"{STEP}/manifest.json"])
    entry = next(iter(content["files"].values()))
    outside = {**content, "files": {**content["files"], "../../outside/secret": entry}}
    return {
        "outside": {
            **base,
            name: json.dumps({"files": {"../../../outside/secret": entry}}).encode(),
        },
        "harmless-outside-beside": {**base, name: json.dumps(outside).encode()},
        "deep": {**base, name: attacks.deep_json()},
        "code-with-hash": _code_with_hash(base),
    }


def _code_with_hash(base: Files) -> Files:
    """Code in the weights, and a manifest that fits."""
    weights = attacks.pickled(attacks.Runs())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, Path(WEIGHTS).name)
        file.write_bytes(weights)
        manifest.write(Path(folder), {file.name: manifest.record(file)}, {})
        made = Path(folder, "manifest.json").read_bytes()
    return {**base, WEIGHTS: weights, f"{STEP}/manifest.json": made}


def _moments(folder: Path) -> Any:
    step = step_that_neox_loads(folder)
    check_untrusted(step)
    model = load_model(folder)
    found = read_moments(step, model)
    return found.steps, {key: tensor.double().tolist() for key, tensor in found.mean.items()}


# ---- released archives -----------------------------------------------------------------------


def _releases() -> Sequence[Files]:
    from fetch_cases import pack

    layers = {f"layer_{n:02d}-model_00-model_states.pt": b"weights %d" % n * 9 for n in (0, 2, 3)}
    files = {f"KERPLE/runs/{STEP}/{name}": data for name, data in layers.items()}
    files |= {"KERPLE/runs/latest": STEP.encode(), "KERPLE/README.md": b"hello"}
    files |= {f"KERPLE/runs/{STEP}/configs/train.yml": b"seed: 1\n"}
    found = []
    for kind in ("tar", "tar.gz", "tar.zst", "zip"):
        with tempfile.TemporaryDirectory() as folder:
            found.append({f"release.{kind}": pack(Path(folder), kind, files).read_bytes()})
    return found


def _unpack(folder: Path) -> Any:
    (file,) = folder.iterdir()
    archive = Archive(file)
    (folder / "out").mkdir()
    hashes = unpack(archive, select(archive), folder / "out")
    return dict(sorted(hashes.items()))


def _attacks_of_releases() -> Mapping[str, Files]:
    good = f"runs/{STEP}/layer_00-model_00-model_states.pt"
    found = {name: {"release.tar": data} for name, data in attacks.escapes(good).items()}
    found["zip-bomb"] = {"release.zip": attacks.zip_of_zeros(good)}
    found["gzip-bomb"] = {"release.tar.gz": attacks.gzip_of_zeros()}
    found["zstd-bomb"] = {"release.tar.zst": attacks.zstd_of(b"\0")}
    found["zstd-window"] = {"release.tar.zst": attacks.zstd_window()}
    return found


TARGETS = (
    Target(
        "checkpoint",
        "run folders: `latest`, `config.yml`, `run.json`, weights of one file, of layers, of shards",
        lambda: [
            a_run(export.Form("single")),
            a_run(export.Form("layers")),
            a_run(export.Form("single", 2)),
        ],
        _load,
        OURS,
        attacks=_attacks_of_runs,
        share=0.5,
    ),
    Target(
        "manifest",
        "steps with `manifest.json`: any damage must be noticed",
        lambda: [a_run(export.Form("single"), sealed=True)],
        _load_sealed,
        OURS,
        sealed=True,
        attacks=_attacks_of_manifests,
        kept=frozenset({"config.yml", "run.json"}),
        stays=frozenset({f"{STEP}/manifest.json"}),  # without it a step is read as a foreign one
        share=0.5,
    ),
    Target(
        "moments",
        "optimizer states, and what GPT-NeoX would unpickle",
        lambda: [a_run(export.Form("single"), with_moments=True)],
        _moments,
        OURS,
        share=0.3,
    ),
    Target(
        "release",
        "archives of released checkpoints: tar, tar.gz, tar.zst, zip",
        _releases,
        _unpack,
        OURS,
        stays=frozenset(f"release.{kind}" for kind in ("tar", "tar.gz", "tar.zst", "zip")),
        attacks=_attacks_of_releases,
    ),
)
