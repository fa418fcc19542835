"""What a study asks of every trained model: the `eval` section of a study file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import AfterValidator, Field

from megatron_patches.config import Config
from megatron_patches.config.keys_base import Keys, Positive
from megatron_patches.config.keys_own import EvaluationOptions, scoring_window
from megatron_patches.config.messages import nearest

# What `eval.py` can do; one list, the configuration's.
PROTOCOLS: tuple[str, ...] = get_args(Config.model_fields["eval_protocol"].annotation)
# Protocols that cut the text by these options of `eval`.
STRIDED = ("sliding", "last")
# Rows that `scripts/retrieval.py` writes for a task at one length and depth: copies have two sources.
ROWS_A_CELL = {"passkey": 1, "copy": 2}


def _width(value: Any) -> Any:
    return value if value == "none" else scoring_window("" if value is None else value)


Split: TypeAlias = Literal["valid", "test"]
Width: TypeAlias = Annotated[Any, AfterValidator(_width)]
Options: TypeAlias = EvaluationOptions | Literal["none"]
Depth: TypeAlias = Annotated[float, Field(ge=0, le=1)]


def _valid() -> list[Split]:
    return ["valid"]


def _no_window() -> list[Width]:
    return ["none"]


def _trained_options() -> list[Options]:
    return ["none"]


class Retrieval(Keys):
    """Tasks x lengths (tokens) x depths, `samples` questions each."""

    tasks: Annotated[list[Literal["passkey", "copy"]], Field(min_length=1)]
    lengths: Annotated[list[Positive], Field(min_length=1)]
    depths: Annotated[list[Depth], Field(min_length=1)]
    samples: Positive


class Eval(Keys):
    """What every trained model is scored on. Lengths, `stride`, `last_k`, `max_tokens` in tokens."""

    lengths: list[Positive] = Field(default_factory=list)
    protocols: list[str] = Field(default_factory=lambda: ["nonoverlap"])
    splits: Annotated[list[Split], Field(min_length=1)] = Field(default_factory=_valid)
    # `sliding_window_width` of the weights as they are scored, or `blockwise:b`; `none`: as trained.
    window_widths: Annotated[list[Width], Field(min_length=1)] = Field(default_factory=_no_window)
    # Options of the position method that the weights are read with, `none`: as they were trained.
    position_options: Annotated[list[Options], Field(min_length=1)] = Field(
        default_factory=_trained_options
    )
    max_tokens: Annotated[int, Field(ge=2)] | None = None  # None: the whole split; not of `paper`
    stride: Positive | None = None  # of `sliding`; of `last` where it shall be denser
    last_k: Positive | None = None  # of `last`
    paper_windows: Positive | None = None  # of `paper`; None: 320
    batch_size: Positive | None = None
    kernels: bool = False  # also write the learned kernels, OUTPUT/kernels/<run>.jsonl
    retrieval: Retrieval | None = None


def eval_problems(asked: Eval) -> Iterator[tuple[str, str]]:
    """(key, sentence) for what no single type shows."""
    for key in ("lengths", "protocols", "splits", "window_widths", "position_options"):
        yield from repeated(f"eval.{key}", getattr(asked, key))
    if asked.retrieval is not None:
        for key in ("tasks", "lengths", "depths"):
            yield from repeated(f"eval.retrieval.{key}", getattr(asked.retrieval, key))
    for protocol in asked.protocols:
        if protocol not in PROTOCOLS:
            near = nearest(protocol, PROTOCOLS)
            text = f"`eval.protocols: {protocol}` is none of {', '.join(PROTOCOLS)}{near}"
            yield "eval.protocols", text
    if not asked.protocols:
        yield from _problems_without_protocols(asked)
    elif not asked.lengths:
        yield (
            "eval.lengths",
            "`eval.lengths` is needed: the lengths at which `eval.protocols` score",
        )
    else:
        yield from _option_problems(asked)


def repeated(key: str, items: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """A problem for each item that is listed more than once."""
    seen = list(items)
    for place, item in enumerate(seen):
        if seen.count(item) > 1 and seen.index(item) == place:
            yield key, f"`{key}` lists {item} twice"


def _problems_without_protocols(asked: Eval) -> Iterator[tuple[str, str]]:
    if asked.retrieval is None:
        yield (
            "eval.protocols",
            "`eval.protocols` is empty and there is no `eval.retrieval`: ask one",
        )
    defaults = Eval()
    for key in ("lengths", "max_tokens", "stride", "last_k", "paper_windows"):
        if getattr(asked, key) != getattr(defaults, key):
            yield f"eval.{key}", f"`eval.{key}` belongs to protocols, and `eval.protocols` is empty"


def _option_problems(asked: Eval) -> Iterator[tuple[str, str]]:
    shortest, asked_for = min(asked.lengths), asked.protocols
    if "last" in asked_for and asked.last_k is None:
        yield "eval.protocols", "protocol `last` needs `eval.last_k`"
    elif "last" not in asked_for and asked.last_k is not None:
        yield "eval.last_k", "`eval.last_k` belongs to protocol `last`, which is not asked for"
    elif asked.last_k is not None and asked.last_k > shortest:
        text = f"`eval.last_k: {asked.last_k}` is more than the shortest length, {shortest}"
        yield "eval.last_k", text
    if "last" in asked_for and asked.stride and asked.last_k and asked.stride < asked.last_k:
        yield (
            "eval.stride",
            f"`eval.stride: {asked.stride}` is less than `eval.last_k: {asked.last_k}`: `last` would "
            "score targets more than once; leave `sliding` and its stride to a study of its own",
        )
    if "sliding" in asked_for and asked.stride is None:
        yield "eval.protocols", "protocol `sliding` needs `eval.stride`"
    elif not set(STRIDED) & set(asked_for) and asked.stride is not None:
        yield "eval.stride", "`eval.stride` belongs to protocols `sliding` and `last`"
    elif "sliding" in asked_for and asked.stride is not None and asked.stride > shortest:
        text = f"`eval.stride: {asked.stride}` would skip targets of windows of {shortest}"
        yield "eval.stride", text
    if "paper" not in asked_for and asked.paper_windows is not None:
        text = "`eval.paper_windows` belongs to protocol `paper`, which is not asked for"
        yield "eval.paper_windows", text
