"""Targets: what a training and a study leave for themselves, read again by a later process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fuzz_attacks as attacks
import fuzz_commands as commands
import torch
from fuzz_checkpoints import OURS, STEP, a_model
from fuzz_results import COMMAND, _attacks_of_rows, _failed, _others
from fuzz_target import Files, Refused, Target, read_folder

from megatron_patches.config import ConfigError
from megatron_patches.standalone import heartbeat, manifest, resuming
from megatron_patches.studies.progress import check_cut

# ---- a step that DeepSpeed is about to continue ------------------------------------------------

STATES = {"model": f"{STEP}/mp_rank_00_model_states.pt"}
STATES["optimizer"] = f"{STEP}/zero_pp_rank_0_mp_rank_00_optim_states.pt"


def _resumable() -> Files:
    """The files of ZeRO 1, with its plain records, under a manifest."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum

    moments = {key: value.detach().clone() for key, value in a_model()[0].state_dict().items()}
    states = {"loss_scaler": LossScaler(1.0), "zero_stage": ZeroStageEnum(1), "state": moments}
    with tempfile.TemporaryDirectory() as name:
        step = Path(name, STEP)
        step.mkdir()
        torch.save({"module": moments, "config_sha": "0123456789ab"}, Path(name, STATES["model"]))
        torch.save({"optimizer_state_dict": states}, Path(name, STATES["optimizer"]))
        _seal(step)
        Path(name, "latest").write_text(STEP)
        return read_folder(Path(name))


def _seal(step: Path) -> None:
    manifest.write(step, {file.name: manifest.record(file) for file in step.glob("*.pt")}, {})


def _resume(folder: Path) -> Any:
    """What stands before DeepSpeed, which unpickles without restriction."""
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    step, shas, broken = resuming._last_good(folder)
    return step.name, sorted(shas), {name: "broken" for name in broken if name != "latest"}


def _attacks_of_resumes() -> dict[str, Files]:
    """Code in either file, with sums that fit."""
    found = {}
    for part, name in STATES.items():
        code = attacks.code_in_pickles({"config_sha": "0123456789ab"})
        for what, files in attacks.with_file(_resumable(), name, code).items():
            with tempfile.TemporaryDirectory() as folder:
                step = Path(folder, STEP)
                step.mkdir()
                for state in STATES.values():
                    Path(folder, state).write_bytes(files[state])
                _seal(step)
                found[f"{part}-{what}"] = {**read_folder(Path(folder)), "latest": files["latest"]}
    return found


# ---- signs of life -------------------------------------------------------------------------------


def _signs() -> Sequence[Files]:
    sign = {"process": 7, "host": "node2", "iteration": 3, "micro": 0, "phase": 2, "turns": 9}
    return [{".ranks/1.json": json.dumps(sign).encode()}]


def _blamed(folder: Path) -> str:
    heart = heartbeat.Heartbeat(folder, 0, 2, 0.02, lambda *_: "")
    said = "; ".join(heart.gone())
    if heartbeat.UNSEEN["is"] in said:
        raise Refused(1, f"error: {folder}: {said}")
    return said


def _attacks_of_signs() -> dict[str, Files]:
    (base,) = _signs()
    ((name, content),) = base.items()
    sign = json.loads(content)
    wrong: dict[str, Any] = {
        f"no-{key}": {k: v for k, v in sign.items() if k != key} for key in sign
    }
    wrong |= {f"text-{key}": {**sign, key: "x"} for key in sign if key != "host"}
    wrong |= {f"below-{key}": {**sign, key: -1} for key in sign if key != "host"}
    wrong |= {
        "phase": {**sign, "phase": 99},
        "process": {**sign, "process": 1 << 80},
        "list": [sign],
    }
    found = {key: {name: json.dumps(value).encode()} for key, value in wrong.items()}
    host = {**sign, "host": "\x1b[2J" * 400}
    return {**found, "deep": {name: attacks.deep_json()},
            "harmless-host": {name: json.dumps(host).encode()}}  # fmt: skip


# ---- the cut of a study's text -------------------------------------------------------------------


def _cuts() -> Sequence[Files]:
    cut = {"longest": 16384, "max_tokens": 131072, "paper_windows": 320}
    return [{"cut.json": json.dumps(cut).encode(), "rows.jsonl": b"{}\n"}]


def _cut(folder: Path) -> Any:
    protocols, lengths = ("nonoverlap", "paper"), (512, 16384)
    asked = {
        "protocols": protocols,
        "lengths": lengths,
        "max_tokens": 131072,
        "paper_windows": None,
    }
    study: Any = SimpleNamespace(output_dir=folder, eval=SimpleNamespace(**asked))
    check_cut(study, write=True)
    return json.loads((folder / "cut.json").read_bytes())


def _attacks_of_cuts() -> dict[str, Files]:
    (base,) = _cuts()
    texts = {"deep": attacks.deep_json(), "list": b"[" + b"1," * 50_000 + b"1]"}
    texts |= {
        "value": json.dumps({"longest": "\x1b[2J" * 400}).encode(),
        "true": b'{"longest":true}',
    }
    texts |= {"other": b'{"longest": 512}', "inside": b'{"note": [[[]]]}'}
    return attacks.with_file(base, "cut.json", texts)


# ---- heat maps -----------------------------------------------------------------------------------


def _retrieved() -> Sequence[Files]:
    return [{"retrieval.jsonl": _others()["retrieval.jsonl"], "failed.jsonl": _failed()}]


def _heat_maps(folder: Path) -> tuple[str, list[str]]:
    out = folder / "out"
    out.mkdir()
    rows = str(folder / "retrieval.jsonl")
    printed = commands.run(commands.script("heatmap").main, rows, "--output", str(out))
    return printed, [path.read_text(encoding="utf-8") for path in sorted(out.rglob("*.svg"))]


def _attacks_of_heat_maps() -> dict[str, Files]:
    """A drawing takes its time: markup in the names that it shows alone."""
    made = _attacks_of_rows(_retrieved()[0], "retrieval.jsonl")
    shown = ("harmless-method", "harmless-dataset")
    return {k: v for k, v in made.items() if k.startswith(shown) or not k.startswith("harmless")}


def _judged(made: tuple[str, list[str]]) -> str | None:
    return commands.markdown(made[0]) or commands.drawings(made[1])


TARGETS = (
    Target(
        "resume",
        "steps that DeepSpeed would continue: any damage must be noticed",
        lambda: [_resumable()],
        _resume,
        OURS,
        sealed=True,
        attacks=_attacks_of_resumes,
        kept=frozenset({"latest"}),
        stays=frozenset({f"{STEP}/manifest.json"}),  # without it a step is read as an older one
        share=0.3,
    ),
    Target(
        "signs",
        "`.ranks/`: what the ranks of a run say of themselves",
        _signs,
        _blamed,
        (Refused,),
        judge=commands.controls,
        attacks=_attacks_of_signs,
        share=0.2,
    ),
    Target(
        "cut",
        "`cut.json` beside the rows of a study",
        _cuts,
        _cut,
        (ConfigError,),
        attacks=_attacks_of_cuts,
        share=0.5,
    ),
    Target(
        "heat_maps",
        "`retrieval.jsonl` and `failed.jsonl` in tables and heat maps",
        _retrieved,
        _heat_maps,
        COMMAND,
        judge=_judged,
        attacks=_attacks_of_heat_maps,
        share=0.01,
    ),
)
