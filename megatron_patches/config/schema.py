"""`Config`: every key that a configuration may hold, checked and frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from .keys_model import Attention, Shape
from .keys_neox import NeoxOnly
from .keys_own import Own
from .keys_refused import NeoxRefused
from .keys_training import Checkpoints, Data, Hardware, Logs, Optimization, zero_stage

DTYPES = {"fp32": "float32", "bfloat16": "bfloat16", "fp16": "float16"}


UNNAMED = "data"  # the data set of configurations that do not name theirs


class Config(
    NeoxRefused,
    NeoxOnly,
    Own,
    Logs,
    Checkpoints,
    Data,
    Hardware,
    Optimization,
    Attention,
    Shape,
):
    """A run, as flat keys. Made by `compose`, which also checks what no single key shows."""

    _provenance: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def provenance(self) -> dict[str, str]:
        """Where each explicit key was set: file:line, or "--set". Nested keys are dotted."""
        return self._provenance

    def place(self, key: str) -> str:
        """`key` and where it was set, for messages."""
        where = self._provenance.get(key) or self._provenance.get(key.partition(".")[0])
        return f"`{key}` ({where})" if where else f"`{key}` (default)"

    @property
    def dataset_name(self) -> str:
        """The data set as rows and runs name it: `dataset`, or UNNAMED."""
        return self.dataset or UNNAMED

    @property
    def run_id(self) -> str:
        """The run's name: `run_name`, or method-dataset-seed."""
        return self.run_name or f"{self.pos_emb}-{self.dataset_name}-{self.seed}"

    @property
    def save_dir(self) -> Path:
        """The folder that the run writes: `save`, or checkpoints/<run_id>."""
        return Path(self.save) if self.save else Path("checkpoints") / self.run_id

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def scoring_window(self) -> int | str | None:
        """The attention window of evaluations, `eval_window` or `eval_block` as `blockwise:b`."""
        return self.eval_window if self.eval_block is None else f"blockwise:{self.eval_block}"

    @property
    def effective_precision(self) -> str:
        """fp32, bfloat16 or fp16, from `precision` or the older `fp16` and `bf16` mappings."""
        return self.precision or next(iter(self.precision_claims.values()), "fp32")

    @property
    def precision_claims(self) -> dict[str, str]:
        """What the older mappings `fp16` and `bf16` ask for, where they are enabled."""
        claims = {}
        if (self.fp16 or {}).get("enabled"):
            # Older NeoX files, the KERPLE authors' among them, ask for bfloat16 inside `fp16`.
            inside = (self.fp16 or {}).get("type") == "bfloat16"
            claims["fp16"] = "bfloat16" if inside else "fp16"
        if (self.bf16 or {}).get("enabled"):
            claims["bf16"] = "bfloat16"
        return claims

    @property
    def torch_dtype_name(self) -> str:
        """The weights' dtype: float32, bfloat16 or float16."""
        return DTYPES[self.effective_precision]

    @property
    def is_fp16(self) -> bool:
        return self.effective_precision == "fp16"

    @property
    def is_bf16(self) -> bool:
        return self.effective_precision == "bfloat16"

    @property
    def zero_stage(self) -> int:
        return int(zero_stage(self.zero_optimization))

    def __eq__(self, other: Any) -> bool:
        # The same run, wherever its keys were written: provenance does not count.
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]
