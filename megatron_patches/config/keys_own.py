"""Keys of this suite, which NeoX learns from the patches. `configs/README.md` has the table."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field

from .keys_base import Keys, NonNegativeFloat, Positive, PositiveFloat

LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]


def one_spelling(options: dict[str, Any]) -> dict[str, Any]:
    """Options with whole numbers as integers: 8 and 8.0 are one setting and must be one in the rows."""
    return {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in options.items()
    }


BLOCKS = re.compile(r"blockwise:([1-9][0-9]{0,8})")


def block_of(window: int | str | None) -> int | None:
    """b of `blockwise:b`; None for other windows."""
    match = BLOCKS.fullmatch(window) if isinstance(window, str) else None
    return int(match.group(1)) if match else None


def scoring_window(value: Any) -> Any:
    """A window of an evaluation as it is: None, a `sliding_window_width`, or `blockwise:b`; else ValueError.

    In tokens. Of blocks a query sees its own and the one before (arXiv 2212.10554, section 3.2).
    """
    width = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value is not None and not width and block_of(value) is None:
        raise ValueError(
            "must be a number of tokens, at least 1, or blockwise: and the tokens of a block"
        )
    return value


# Options of a position method that an evaluation sets; the method says which it lets be set.
EvaluationOptions: TypeAlias = Annotated[dict[str, Any], AfterValidator(one_spelling)]


class Own(Keys):
    dataset: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.]*$")] | None = None
    run_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+=-]*$")] | None = None
    # What a study calls this configuration, factor -> level: it tells rows of one method apart.
    variant: dict[str, str] = Field(default_factory=dict)
    # Options of a position method that have no NeoX key; the method itself checks them.
    position_options: dict[str, Any] = Field(default_factory=dict)
    position_sharing: Literal["model", "layer"] | None = None  # None: the method's own default
    position_init: Literal["published", "alibi"] = "published"
    position_precision: Literal["exact", "as_published"] = "exact"
    position_weight_decay: bool = False
    attention_impl: Literal["auto", "reference", "chunked", "flex", "triton"] = "auto"
    # Watchdogs of a training; 0 switches each off. None of them changes a number of a run that goes on.
    watch_loss_multiple: NonNegativeFloat = 20.0  # of the lowest logged loss, taken as at least 1
    watch_stall_seconds: NonNegativeFloat = 1800.0  # without progress on a rank
    join_seconds: PositiveFloat = 300.0  # that ranks wait for each other at the start
    seq_length_val: Positive | None = None  # None: validate at seq_length
    eval_lengths: Annotated[list[Positive], Field(min_length=1)] = Field(
        default_factory=lambda: list(LENGTHS)
    )
    eval_protocol: Literal["nonoverlap", "last", "sliding", "position", "paper"] = "nonoverlap"
    eval_stride: Positive | None = None
    eval_last_k: Positive | None = None
    eval_window: Positive | None = (
        None  # score with this sliding_window_width instead of the model's
    )
    # Score with blocks of so many tokens instead: a query sees its own block and the one before.
    eval_block: Positive | None = None
    # Score with these options of the position method instead of the trained ones.
    eval_position_options: EvaluationOptions = Field(default_factory=dict)
    eval_paper_windows: Positive | None = None  # None: 320, as the authors
    eval_batch_size: Positive = 1
    eval_split: Literal["valid", "test"] = "valid"
    # Corrections of GPT-NeoX's faults to leave out, by name; the standalone engine has none of them.
    neox_fixes_off: list[str] = Field(default_factory=list)
