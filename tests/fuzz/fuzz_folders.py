"""Target: folders of Hugging Face models, ours and any GPT-NeoX's."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fuzz_attacks as attacks
from fuzz_checkpoints import OURS, RUN, a_model, shown
from fuzz_target import Files, Target

from megatron_patches.hf.describing import training_record
from megatron_patches.hf.naming import renamed
from megatron_patches.hf.reading import read_model, run_record


def _carried() -> Sequence[Files]:
    from safetensors.torch import save

    found = []
    for method in ("kerple_log", "rotary"):
        model, config = a_model(method)
        neox = method == "rotary"
        described = {
            "model_type": "gpt_neox" if neox else "gpt_positions",
            "vocab_size": 16,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 8,
            "use_parallel_residual": False,
            "tie_word_embeddings": False,
            **({"rotary_pct": 1.0, "rotary_emb_base": 10000} if neox else {}),
            **({} if neox else {"position": method, "position_sharing": "model"}),
        }
        files = {"config.json": json.dumps(described).encode()}
        files["model.safetensors"] = save(renamed(model, neox=neox), {"format": "pt"})
        files["provenance.json"] = json.dumps({**RUN, "step": 7}).encode()
        if not neox:
            files["training.yml"] = training_record(config).encode()
            files["modeling_gpt_positions.py"] = b"raise SystemExit('this code must not run')\n"
        found.append(files)
    found.append({n: d for n, d in found[0].items() if n != "training.yml"})
    return found


def _import(folder: Path) -> Any:
    model, _ = read_model(folder)
    return shown(model), run_record(folder, model)


def _attacks_of_folders() -> dict[str, Files]:
    base = _carried()[0]
    data = base["model.safetensors"]
    (length,) = struct.unpack("<Q", data[:8])
    header, rest = json.loads(data[8 : 8 + length]), data[8 + length :]
    name = next(key for key in header if key != "__metadata__")
    huge = {**header, name: {**header[name], "shape": [1 << 31, 1 << 31]}}
    weights = {
        "header-length": struct.pack("<Q", 1 << 62) + data[8:],
        "header-deep": struct.pack("<Q", 400_000) + attacks.deep_json(),
        "huge-shape": attacks.safetensors(huge, rest),
        "overlap": attacks.safetensors(dict.fromkeys(header, header[name]), rest),
    }
    found = attacks.with_file(base, "model.safetensors", weights)
    plain = {n: d for n, d in base.items() if n != "model.safetensors"}
    found["code"] = {**plain, "pytorch_model.bin": attacks.pickled(attacks.Runs())}
    index = {"weight_map": {"embed_in.weight": "../outside/secret"}}
    found["index-outside"] = {**plain, "model.safetensors.index.json": json.dumps(index).encode()}
    found["config-deep"] = {**base, "config.json": attacks.deep_json()}
    described = json.loads(base["config.json"])
    for key in ("num_hidden_layers", "hidden_size", "max_position_embeddings"):
        large = {**described, key: 1 << 40}
        mark = "harmless-" if key == "max_position_embeddings" else ""  # no table has that length
        found[f"{mark}huge-{key}"] = {**plain, "config.json": json.dumps(large).encode(),
                                "model.safetensors": data}  # fmt: skip
    layers = found["huge-num_hidden_layers"]
    no_record = {n: d for n, d in layers.items() if n != "training.yml"}
    return {**found, "huge-layers-alone": no_record}


TARGETS = (
    Target(
        "hugging_face",
        "exported folders: `config.json`, safetensors, `training.yml`, remote code",
        _carried,
        _import,
        OURS,
        attacks=_attacks_of_folders,
        share=0.5,
    ),
)
