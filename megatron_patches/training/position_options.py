"""From flat configuration keys to the options of the configured position method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_patches import positions

# GPT-NeoX's own keys. They may stand in a base file beside any method, which then ignores them.
NEOX_KEYS = ("rotary_pct", "rotary_emb_base", "rpe_num_buckets", "rpe_max_distance")
# This suite's keys must mean something to the method.
OWN_KEYS = {"position_init": "init", "position_precision": "precision"}
# Between the seeds of one layer's parameters and the next one's, where each layer has its own.
LAYER_SEED_STEP = 7919


def position_options(
    values: Mapping[str, Any],
    explicit: Collection[str],
    model_dtype: str,
    place: Callable[[str], str] = "`{}`".format,
) -> dict[str, Any]:
    """Options for `positions.build` from configuration keys.

    Args:
        values: `pos_emb`, `position_options` and the keys of `NEOX_KEYS` and `OWN_KEYS`.
        explicit: the keys that the user wrote.
        model_dtype: of the weights, "float32", "bfloat16" or "float16".
        place: names a key, and where it was set, for messages.

    Raises ValueError for a key or an option that the method does not have.
    """
    method = values["pos_emb"]
    known = positions.options(method)
    chosen = {key: values[key] for key in NEOX_KEYS if key in known}
    for key, option in OWN_KEYS.items():
        if option in known:
            chosen[option] = values[key]
        elif key in explicit:
            raise ValueError(f"{place(key)}: {method} has no such choice")
    if chosen.get("precision", "exact") != "exact":
        chosen["model_dtype"] = model_dtype
    for option, value in (values["position_options"] or {}).items():
        if option not in known:
            raise ValueError(
                f"{place('position_options')}: {method} has no option {option!r}; "
                f"it has {', '.join(sorted(known)) or 'none'}"
            )
        chosen[option] = value
    return chosen
