"""The rotary positions of a GPT-NeoX's `config.json`, as transformers 5 reads it, in our keys."""

from __future__ import annotations

import math
from typing import Any

from megatron_patches.config import ConfigError

# transformers' kinds of rotary frequencies -> their names -> our options of rotary, with our defaults.
_SCALINGS: dict[str, dict[str, tuple[str, Any]]] = {
    "default": {},
    "linear": {"factor": ("factor", None)},
    "yarn": {
        "factor": ("factor", None),
        "original_max_position_embeddings": ("original_length", None),
        "beta_fast": ("beta_fast", 32.0),
        "beta_slow": ("beta_slow", 1.0),
        "attention_factor": ("attention_factor", None),
        "truncate": ("truncate", True),
    },
}
_ANY_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
# Of yarn; they decide where there is no attention_factor.
_AMPLITUDES = ("mscale", "mscale_all_dim")


def rotary_keys(values: dict[str, Any]) -> dict[str, Any]:
    """`pos_emb`, `rotary_pct`, `rotary_emb_base` and `position_options` from a `config.json`.

    transformers takes `rope_scaling` before `rope_parameters`, and what neither of them says from
    `rotary_pct` and `rotary_emb_base`.

    Raises ConfigError for what our rotary does not have, and for keys that transformers overlooks.
    """
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _SCALINGS:
        raise ConfigError(f"rope_type is {kind!r}; known here are {', '.join(_SCALINGS)}")
    known = {*_ANY_ROPE, *_SCALINGS[kind], *(_AMPLITUDES if kind == "yarn" else ())}
    unknown = sorted(key for key, value in rope.items() if key not in known and value is not None)
    if unknown:
        raise ConfigError(
            f"rope_parameters names {', '.join(unknown)}, which rope_type {kind!r} does not have here; known "
            f"are {', '.join(sorted(known))}: take out what has no effect"
        )
    base = rope.get("rope_theta", values.get("rotary_emb_base", 10000))
    if values.get("rope_theta") not in (None, base):
        raise ConfigError(
            f"rope_theta is {values['rope_theta']}, but transformers' GPT-NeoX turns by {base}, from "
            "rope_parameters or rotary_emb_base: make them equal"
        )
    if base != int(base):
        raise ConfigError(f"rope_theta {base} is no whole number")
    share = rope.get("partial_rotary_factor", values.get("rotary_pct", 0.25))
    # GPT-NeoX's name for what this file's model type is
    keys = {"pos_emb": "rotary", "rotary_pct": float(share), "rotary_emb_base": int(base)}
    keys["position_options"] = {}
    if kind == "yarn":
        rope = _inferred(rope, values)
    if kind != "default":
        given = {k: rope.get(k, default) for k, (_, default) in _SCALINGS[kind].items()}
        named = {_SCALINGS[kind][k][0]: value for k, value in given.items() if value is not None}
        keys["position_options"] = {"scaling": kind, **named}
    return keys


def _inferred(rope: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Parameters of yarn with what transformers makes of others where they are not given.

    The original length beside them comes first. `factor` is then the ratio of the two lengths. The factor on
    cosines and sines is the ratio of 0.1 m log(factor) + 1 for m = mscale and m = mscale_all_dim; our rotary
    has it for m = 1 over 1 alone. A `truncate` of null does not truncate, one that is not there does.
    """
    original = "original_max_position_embeddings"
    found = {original: values.get("max_position_embeddings"), **rope}
    if original in values:
        found[original] = values[original]
    if "truncate" in rope and rope["truncate"] is None:
        found["truncate"] = False
    if found.get("factor") is None:
        found["factor"] = values["max_position_embeddings"] / found[original]
    pair = [found.get(key) for key in _AMPLITUDES]
    if found.get("attention_factor") is None and all(pair):
        stretch = math.log(max(found["factor"], 1))
        above, below = (0.1 * m * stretch + 1 for m in pair if m)
        found["attention_factor"] = above / below
    return found
