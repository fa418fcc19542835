"""Position methods in GPT-NeoX's model: handed to its layers, tied over pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_patches.config import ConfigError
from megatron_patches.neox import position
from megatron_patches.neox.arguments import our_method
from megatron_patches.neox.patches import Patches
from megatron_patches.neox.position import SLOT
from megatron_patches.positions import PositionMethod, method_class


def apply(patches: Patches, fixes: frozenset[str]) -> None:
    from megatron.model import gpt2_model

    model = gpt2_model.GPT2ModelPipe
    stages = Stages(tie_native="rpe_pipeline" in fixes)
    patches.wrap(model, "init_specs", _init_specs)
    patches.wrap(model, "__init__", stages.init)
    patches.wrap(model, "get_tied_weights_and_groups", stages.tied)


def own_methods(module: torch.nn.Module) -> list[PositionMethod]:
    """The position methods of this suite among a model's attention, each once, in layer order."""
    return [m for m in module.modules() if isinstance(m, PositionMethod)]


def position_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters of whatever the attention calls `rpe`, ours and NeoX's, each once."""
    found = {
        id(parameter): parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if f".{SLOT}." in name
    }
    return list(found.values())


def _init_specs(original: Callable[..., None]) -> Callable[..., None]:
    def init_specs(self: Any) -> None:
        original(self)
        hand_out(self)

    return init_specs


def hand_out(model: Any) -> None:
    """Give every layer of `model.specs` its position method as `rpe`."""
    from deepspeed.pipe import LayerSpec
    from megatron.model.transformer import ParallelTransformerLayer

    args = model.neox_args
    specs = [
        spec
        for spec in model.specs
        if isinstance(spec, LayerSpec)
        and isinstance(spec.typename, type)
        and issubclass(spec.typename, ParallelTransformerLayer)
    ]
    name = our_method(args)
    if name is None:
        return
    if len(specs) != args.num_layers:
        raise RuntimeError(
            f"{len(specs)} of {args.num_layers} layers can carry {name}: the others would ignore it"
        )
    each = (args.position_sharing or method_class(name).sharing) == "layer"
    with whole_at_first():
        methods = [
            position.in_attention(position.make(args, name, layer), args, layer if each else None)
            for layer in range(args.num_layers if each else 1)
        ]
    for index, spec in enumerate(specs):
        spec.module_kwargs[SLOT] = methods[index % len(methods)]


@contextmanager
def whole_at_first() -> Iterator[None]:
    """Under ZeRO 3 NeoX builds its model in a context that cuts every new parameter at once.

    Inside this one they stay whole until DeepSpeed cuts them with its engine.
    """
    from deepspeed.runtime.zero import partition_parameters

    cutting = partition_parameters.zero_init_context
    if not cutting:
        yield
        return
    partition_parameters.shutdown_init_context()
    try:
        yield
    finally:
        partition_parameters.restore_init_context()


@dataclass(frozen=True)
class Stages:
    """What pipeline stages need: equal copies of shared parameters, counted once in norms."""

    tie_native: bool  # NeoX's own T5 bias as well

    def shared(self, model: Any) -> list[torch.nn.Parameter]:
        """Parameters of an `rpe` that more than one layer of the whole model calls."""
        modules = [
            spec.module_kwargs[SLOT]
            for spec in model.specs
            if getattr(spec, "module_kwargs", {}).get(SLOT) is not None
        ]
        shared = {id(m): m for m in modules if sum(m is other for other in modules) > 1}
        return [
            parameter
            for module in shared.values()
            if self.tie_native or isinstance(module, PositionMethod)
            for parameter in module.parameters()
        ]

    def init(self, original: Callable[..., None]) -> Callable[..., None]:
        def __init__(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            self.prepare(model)

        return __init__

    def prepare(self, model: Any) -> None:
        from megatron import mpu

        if mpu.get_pipe_parallel_world_size() < 2:
            return
        args = model.neox_args
        if args.seq_length_val not in (None, args.seq_length):
            # DeepSpeed announces the shape of activations once; validation has another one.
            model.dynamic_shape = True
        group = mpu.get_pipe_parallel_group()
        shared = self.shared(model)
        here = {id(parameter) for parameter in model.parameters()}
        holds: list[Any] = [None] * torch.distributed.get_world_size(group)
        own = all(id(parameter) in here for parameter in shared)
        torch.distributed.all_gather_object(holds, own, group=group)
        if not all(holds):
            raise ConfigError(
                f"pipeline stage {holds.index(False)} has no attention layer, so that {args.pos_emb} "
                "cannot be tied over the stages: write pipe_partition_method: type:transformer|mlp, "
                "or fewer stages"
            )
        for parameter in shared:
            first = torch.distributed.get_global_rank(group, 0)
            torch.distributed.broadcast(parameter.data, src=first, group=group)
            replicated = mpu.get_pipe_parallel_rank() > 0
            parameter.ds_pipe_replicated = replicated  # type: ignore[attr-defined]

    def tied(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_tied_weights_and_groups(model: Any) -> Any:
            """DeepSpeed sums the gradients of these over their group before it reduces them."""
            from megatron import mpu

            pairs = list(original(model))
            if mpu.get_pipe_parallel_world_size() > 1:
                pairs += [(p, mpu.get_pipe_parallel_group()) for p in self.shared(model)]
            return pairs

        return get_tied_weights_and_groups
