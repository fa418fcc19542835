"""Rotary frequencies stretched for texts longer than those of the training.

Position interpolation (Chen et al., arXiv 2306.15595), "NTK-aware" bases, static and dynamic (known from
forum posts; formulas as in YaRN's paper), and YaRN (Peng et al., arXiv 2309.00071, section 3). The
dynamic kinds follow the length of the text and leave alone what is no longer than the training's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

YARN = ("beta_fast", "beta_slow", "attention_factor", "truncate")
# Kind -> the options that it takes besides `original_length` where it needs that.
KINDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "yarn": ("factor", "original_length", *YARN),
    "dynamic_linear": ("original_length",),
    "dynamic_ntk": ("factor", "original_length"),
    "dynamic_yarn": ("original_length", *YARN),
}

_MODEL = ("rotated", "base", "trained_length", "scaling")


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How frequencies change; `base` and `rotated` dimensions are those of the rotary. ValueError if wrong.

    L is `original_length`, or else `trained_length`.

    An angle is position / spacing. Kinds, with the spacings s = base^(2m/R), stretch t = max(1, length / L):
        linear: s * factor;  dynamic_linear: s * t
        ntk: of the base * factor^(R/(R-2));  dynamic_ntk: of the base * (1 + factor (t - 1))^(R/(R-2))
        yarn: s where a pair turns more than `beta_fast` times in L tokens, s * factor where less than
            `beta_slow` times, between them the frequencies in proportion;  dynamic_yarn: factor = t
    """

    rotated: int
    base: float
    trained_length: int | None = None
    scaling: str = "none"
    factor: float | None = None
    original_length: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.scaling, str) or self.scaling not in KINDS:
            raise ValueError(f"scaling={self.scaling!r} is none of {', '.join(KINDS)}")
        taken = KINDS[self.scaling]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in (*_MODEL, *taken) and value != field.default:
                listed = ", ".join(taken) or "no further option"
                raise ValueError(
                    f"{field.name}={value!r} means nothing to scaling={self.scaling}, which takes {listed}"
                )
        self._check_values(taken)

    def _check_values(self, taken: tuple[str, ...]) -> None:
        if "original_length" in taken and self.original_length is None:
            object.__setattr__(self, "original_length", self.trained_length)
        needed = "factor" in taken and self.scaling != "dynamic_ntk"
        for name in ("factor", "attention_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if value is None:
                if name == "factor" and needed:
                    raise ValueError(f"scaling={self.scaling} needs factor, a number of at least 1")
                continue
            least = 1.0 if name == "factor" else 0.0
            if not _is_number(value) or value < least or value == 0:
                word = "of at least 1" if name == "factor" else "above 0"
                raise ValueError(f"{name}={value!r} must be a number {word}")
        length = self.original_length
        if "original_length" in taken and length is None:
            raise ValueError(
                f"scaling={self.scaling} needs original_length, the tokens that the model was trained on: "
                "the method was built without max_length"
            )
        if length is not None and (
            isinstance(length, bool) or not isinstance(length, int) or length < 1
        ):
            raise ValueError(f"original_length={length!r} must be a whole number of at least 1")
        if not isinstance(self.truncate, bool):
            raise ValueError(f"truncate={self.truncate!r} must be true or false")
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast} must be above beta_slow={self.beta_slow}")
        if self.scaling in ("ntk", "dynamic_ntk") and self.rotated < 4:
            raise ValueError(f"scaling={self.scaling} needs at least 4 rotated dimensions")
        if self.scaling in ("yarn", "dynamic_yarn") and self.base <= 1:
            raise ValueError(f"scaling={self.scaling} needs rotary_emb_base above 1")

    @property
    def dynamic(self) -> bool:
        """Whether the length of the text decides."""
        return self.scaling.startswith("dynamic_")

    def spacing(self, length: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor | float]:
        """Positions a radian, [R/2] (of `length` [B]: [B, R/2]), and the factor on cosines and sines.

        `length` counts tokens, a scalar or [B]; only the dynamic kinds read it. Dtype and device are
        those of `like`.
        """
        steps = torch.arange(0, self.rotated, 2, device=like.device, dtype=like.dtype)
        powers = steps / self.rotated
        if not self.dynamic:
            return self._static(powers, like)
        assert length is not None and self.original_length is not None
        stretch = (length.to(like) / self.original_length).clamp(min=1.0)[..., None]
        if self.scaling == "dynamic_linear":
            return self.base**powers * stretch, 1.0
        if self.scaling == "dynamic_ntk":
            growth = 1.0 + (self.factor or 1.0) * (stretch - 1.0)
            return (self.base * growth**self._exponent) ** powers, 1.0
        amplitude = 0.1 * stretch.log() + 1.0
        if self.attention_factor is not None:
            given = torch.full_like(stretch, self.attention_factor)
            amplitude = torch.where(stretch > 1.0, given, torch.ones_like(stretch))
        return self._yarn(powers, stretch), amplitude

    def _static(self, powers: Tensor, like: Tensor) -> tuple[Tensor, float]:
        factor = self.factor or 1.0
        if self.scaling == "ntk":
            return (self.base * factor**self._exponent) ** powers, 1.0
        if self.scaling == "linear":
            return self.base**powers * factor, 1.0
        if self.scaling == "none":
            return self.base**powers, 1.0
        amplitude = 0.1 * math.log(factor) + 1.0
        if self.attention_factor is not None:
            amplitude = self.attention_factor
        return self._yarn(powers, factor), amplitude

    @property
    def _exponent(self) -> float:
        return self.rotated / (self.rotated - 2)

    def _yarn(self, powers: Tensor, factor: Tensor | float) -> Tensor:
        # (1 - share) / s + share / (s * factor), turned over
        share = self.share(powers)
        return self.base**powers / (1.0 - share * (1.0 - 1.0 / factor))

    def share(self, powers: Tensor) -> Tensor:
        """YaRN's ramp: 0 for pairs that turn fast and stay, 1 for those that are interpolated."""
        low, high = (self._pair_of(turns) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotated - 1)
        if high <= low:  # one pair, or a training length below one turn of the fastest
            high = low + 0.001
        return ((powers * (self.rotated / 2) - low) / (high - low)).clamp(0.0, 1.0)

    def _pair_of(self, turns: float) -> float:
        """The pair, a fraction between two, that turns so often within the training length."""
        assert self.original_length is not None
        ratio = self.original_length / (turns * 2 * math.pi)
        return self.rotated * math.log(ratio) / (2 * math.log(self.base))

    def rope_parameters(self) -> dict[str, Any] | None:
        """As transformers' `rope_parameters` say it, without the rotated share; None: they cannot.

        Their dynamic kinds keep what the longest text so far made of them.
        """
        if self.dynamic:
            return None
        base = (
            self.base * (self.factor or 1.0) ** self._exponent
            if self.scaling == "ntk"
            else self.base
        )
        kind = self.scaling if self.scaling in ("linear", "yarn") else "default"
        found: dict[str, Any] = {"rope_type": kind, "rope_theta": base}
        if kind != "default":
            found["factor"] = float(self.factor or 1.0)
        if kind == "yarn":
            found["original_max_position_embeddings"] = self.original_length
            given = {name: getattr(self, name) for name in YARN}
            found |= {name: value for name, value in given.items() if value is not None}
        return found

    def options(self) -> dict[str, Any]:
        """The options as they count, for a checkpoint's metadata; nothing where nothing is scaled."""
        if self.scaling == "none":
            return {}
        found = {name: getattr(self, name) for name in ("scaling", *KINDS[self.scaling])}
        return {**found, "factor": self.factor or 1.0} if "factor" in found else found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
