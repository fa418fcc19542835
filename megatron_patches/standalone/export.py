"""GPT-NeoX's checkpoints: a `GPT` cut into tensor-parallel shards, with all that NeoX continues from.

"single" is one `mp_rank_RR_model_states.pt` a shard (pipe_parallel_size 0); "layers" is one
`layer_NN-model_RR-model_states.pt` a layer and shard, beside an `mp_rank_RR_model_states.pt` without
weights (pipe_parallel_size 1 and above).

Where DeepSpeed 0.19.8 looks for the optimizer:
    float32 at ZeRO 0: entry `optimizer` of `mp_rank_RR_model_states.pt`, in both layouts. It is written
        here, with Adam's moments or without, and NeoX continues at the stored iteration. Its groups are
        those of one pipeline stage; several stages need `finetune: true`.
    ZeRO 1 to 3: `[bf16_]zero_pp_rank_DD_mp_rank_RR_optim_states.pt`, a flat partition for each
        data-parallel process. Half precision at ZeRO 0: the same entry `optimizer`, around flattened
        float32 copies of the weights. Neither is written: NeoX loads the weights with `finetune: true`.
Learned attention parameters stand in a last group of their own, as this suite's patches make NeoX do.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_patches.config import Config, ConfigError, dump, from_mapping
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.moments import Group, Moments, groups, optimizer_state
from megatron_patches.standalone.neox_entries import entries
from megatron_patches.standalone.provenance import write_bytes, write_text
from megatron_patches.standalone.weights import (
    CheckpointError,
    State,
    cut_dimension,
    is_step,
    position_key,
)

Layout = Literal["single", "layers"]
ASIDE = "writing-"  # before the name of a step that is not whole yet
DTYPES = {"fp32": torch.float32, "bfloat16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Form:
    """How the files are written: layout, number of tensor-parallel shards, NeoX's `precision`."""

    layout: Layout = "single"
    tensor_parallel: int = 1
    dtype: str = "fp32"

    @property
    def stages(self) -> int:
        """`pipe_parallel_size` of the layout."""
        return 0 if self.layout == "single" else 1


def continues(config: Config, form: Form) -> bool:
    """Whether NeoX finds an optimizer under `config`; otherwise it needs `finetune: true`."""
    return form.dtype == "fp32" and config.zero_stage == 0


def neox_config(config: Config, model: GPT, form: Form, folder: Path) -> Config:
    """The configuration under which NeoX loads what `export` writes to `folder`.

    Sizes of parallelism and precision follow `form`, `load` (and `save`) name `folder`. NeoX pads the
    vocabulary itself, so `make_vocab_size_divisible_by` is changed where its padding could give
    other rows than are stored. `finetune` is set where NeoX can load weights only.

    Raises ConfigError when heads, width or rows do not divide by the shards, when the position method
    needs all heads at once, or when the new precision would change the function of the model.
    """
    shards, shape = form.tensor_parallel, model.shape
    sizes = {
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate_size or 4 * shape.hidden_size,
        "the padded vocabulary": shape.vocabulary,
    }
    uneven = [f"{key} {size}" for key, size in sizes.items() if size % shards]
    if uneven:
        fitting = [n for n in range(1, shards) if not any(s % n for s in sizes.values())]
        raise ConfigError(
            f"{', '.join(uneven)}: not divisible by {shards} tensor-parallel shards; "
            f"choose --tensor-parallel {' or '.join(map(str, fitting))}"
        )
    if shards > 1 and model.position_method.mixes_heads:
        raise ConfigError(
            f"{model.position_method.name} mixes the scores of all heads, and each tensor-parallel "
            "shard has some of them; choose --tensor-parallel 1"
        )
    if config.effective_precision != form.dtype and config.position_precision != "exact":
        raise ConfigError(
            f"{config.place('position_precision')} {config.position_precision} computes positions in "
            f"the model's dtype, so another dtype is another model: leave --dtype out"
        )
    changes: dict[str, Any] = {
        "pipe_parallel_size": form.stages,
        "model_parallel_size": shards,
        "make_vocab_size_divisible_by": _divisor(config, shape.vocabulary, shards),
        "load": str(folder),
        "iteration": None,
        "finetune": None if continues(config, form) else True,
    }
    if config.save is not None:
        changes["save"] = str(folder)
    if config.effective_precision != form.dtype:
        changes |= {"precision": form.dtype, "fp16": None, "bf16": None, "data_types": None}
    values = {**config.model_dump(mode="json", exclude_unset=True), **changes}
    set_ones = {key: value for key, value in values.items() if value is not None}
    return from_mapping(set_ones, "the converted configuration")


def _divisor(config: Config, rows: int, shards: int) -> int:
    """NeoX rounds the tokenizer's entries up to a multiple of this times `shards`: to `rows`."""
    stored = config.make_vocab_size_divisible_by
    # The entries lie less than one multiple below the rows, so a larger multiple gives the same rows.
    same = rows % (stored * shards) == 0 and shards >= config.model_parallel_size
    return stored if same else rows // shards


# ---- weights -------------------------------------------------------------------------------------


def whole(model: GPT, dtype: torch.dtype) -> State:
    """NeoX's full key set, derived tensors included; shared tensors appear under every layer.

    Tensors of the position method stay float32, as in the model. Raises CheckpointError listing the
    tensors that are too large for `dtype`.
    """
    state: State = {}
    for key, tensor in model.state_dict().items():
        own = position_key(model, key) is not None
        state[key] = tensor.detach().to("cpu", tensor.dtype if own else dtype)
    broken = [key for key, tensor in state.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise CheckpointError(
            f"too large for {dtype}: {', '.join(broken[:5])}; choose bfloat16 or fp32"
        )
    return state


def cut(state: State, model: GPT, shards: int) -> list[State]:
    """One state a tensor-parallel shard, the inverse of `merge_shards`; tensors are copies."""
    found: list[State] = [{} for _ in range(shards)]
    for key, tensor in state.items():
        dimension = cut_dimension(model, key)
        parts = [tensor] * shards if dimension is None else tensor.chunk(shards, dim=dimension)
        for shard, part in zip(found, parts, strict=True):
            shard[key] = part.clone(memory_format=torch.contiguous_format)
    return found


def by_layer(state: State) -> dict[int, State]:
    """A shard's tensors by the number of their layer, under keys without `sequential.N.`."""
    found: dict[int, State] = {}
    for key, tensor in state.items():
        _, number, rest = key.split(".", 2)
        found.setdefault(int(number), {})[rest] = tensor
    return found


# ---- files ---------------------------------------------------------------------------------------


def files(
    model: GPT, form: Form, config: Config, step: int, moments: Moments | None
) -> Iterator[tuple[str, Any]]:
    """`(name, content)` of every file of a step folder, one shard after the other."""
    decay = config.weight_decay
    order: list[Group] = groups(model, decay, decay if config.position_weight_decay else 0.0)
    shards = cut(whole(model, DTYPES[form.dtype]), model, form.tensor_parallel)
    adam: list[Moments | None] = [None] * form.tensor_parallel
    if moments is not None:
        means = cut(moments.mean, model, form.tensor_parallel)
        squares = cut(moments.square, model, form.tensor_parallel)
        adam = [
            Moments(moments.steps, mean, square)
            for mean, square in zip(means, squares, strict=True)
        ]
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    for rank, state in enumerate(shards):
        module: State | None = state
        if form.layout == "layers":
            for number, tensors in by_layer(state).items():
                yield f"layer_{number:02d}-model_{rank:02d}-model_states.pt", tensors
            module = None
        content = {
            "module": module,
            "buffer_names": [n if module else n.removeprefix("sequential.") for n in buffers],
            "optimizer": optimizer_state(order, config, step, adam[rank]),
            **entries(config, model.shape.vocabulary, step, rank, form.tensor_parallel),
        }
        yield f"mp_rank_{rank:02d}_model_states.pt", content


def export(
    model: GPT,
    folder: Path,
    *,
    step: int,
    config: Config,
    form: Form,
    moments: Moments | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> Path:
    """Write `folder/global_step<step>`, `folder/config.yml` and, last, `folder/latest`.

    Args:
        model: the weights, in any dtype.
        folder: made if missing; may hold other steps of the same conversion.
        step: the iteration at which NeoX continues.
        config: the run's; `neox_config` makes the written one of it.
        form: layout, shards and dtype.
        moments: Adam's, None: it starts fresh.
        beside: other files of the run, name -> content, which it is not whole without.

    Returns the step folder. All files are written aside and renamed when complete.

    Raises:
        CheckpointError: the step exists, `folder` holds another configuration, or a weight does not
            fit the dtype. Nothing is left behind.
        ConfigError: see `neox_config`.
        OSError: a file cannot be written; nothing that looks finished is left behind.
    """
    written = neox_config(config, model, form, folder)
    text, target = dump(written), folder / f"global_step{step}"
    if target.exists():
        raise CheckpointError(f"{target}: exists; choose another destination, or remove it")
    present = folder / "config.yml"
    if present.is_file() and present.read_text(encoding="utf-8") != text:
        raise CheckpointError(f"{present}: of another run or form; choose another destination")
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{ASIDE}{target.name}"
    for left in folder.glob(f"{ASIDE}*"):  # of a conversion that was killed, and nobody else's
        if is_step(Path(left.name.removeprefix(ASIDE))) and left.is_dir():
            shutil.rmtree(left)
    try:
        (aside / "configs").mkdir(parents=True)
        (aside / "configs" / "config.yml").write_text(text, encoding="utf-8")
        for name, content in files(model, form, written, step, moments):
            torch.save(content, aside / name)
        write_text(present, text)
        for name, content in (beside or {}).items():
            write_bytes(folder / name, content)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    write_text(folder / "latest", target.name)
    return target
