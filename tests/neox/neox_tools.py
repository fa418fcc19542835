"""What the tests of the overlay share. `stub/` stands for a checkout of GPT-NeoX."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_patches import positions
from megatron_patches.neox import position
from megatron_patches.positions import PositionMethod, method_class

ROOT = Path(__file__).resolve().parents[2]
STUB = Path(__file__).resolve().parent / "stub"
# The stub's own Literal, as GPT-NeoX has it.
NATIVE = frozenset({"learned", "rotary", "sinusoidal", "rpe", "alibi", "none"})
SLOT = "rpe"
LEFT_OUT = "rpe_cache"  # the fix that tests of the launcher leave out


def overrides(method: type[PositionMethod], *hooks: str) -> bool:
    return any(getattr(method, hook) is not getattr(PositionMethod, hook) for hook in hooks)


# Every method that our patches put into the slot where NeoX has its T5 bias.
INSERTED = [
    name
    for name in positions.names()
    if name not in NATIVE or method_class(name).module_name == SLOT
]
# NeoX's own attention cannot apply these to queries, keys or rows: layers of type `attend` carry them.
ATTEND_ONLY = [
    name
    for name in INSERTED
    if name not in NATIVE and overrides(method_class(name), "transform", "score")
]
# Needs the layer's input, which no attention of NeoX is given: refused.
GATED = [name for name in INSERTED if overrides(method_class(name), "decay")]
# Need the length of the whole text, which NeoX's cache does not know: refused.
FOLLOWING = [name for name in positions.names() if method_class(name).follows_length]
POSSIBLE = [name for name in positions.names() if name not in GATED + FOLLOWING]
ATTEND_ONLY = [name for name in ATTEND_ONLY if name in POSSIBLE]
INSERTED = [name for name in INSERTED if name in POSSIBLE and name not in ATTEND_ONLY]
PRODUCT = [name for name in INSERTED if overrides(method_class(name), "weight")]
ADDED = [name for name in INSERTED if name not in PRODUCT]
# Is shared by all layers unless asked otherwise, and has bounds.
LEARNS_ONCE = next(n for n in ADDED if n not in NATIVE and method_class(n).sharing == "model")


def carrying(name: str) -> dict[str, Any]:
    """What a configuration of this method must say besides its name."""
    return {"attention_config": [[["attend"], "all"]]} if name in ATTEND_ONLY else {}


def parameters_of(name: str) -> dict[str, int | None]:
    """Learned parameter -> its dimension over heads."""
    built = positions.build(name, heads=2, head_dim=4, hidden_size=8, max_length=8)
    return {key: built.head_dim_of[key] for key, _ in built.named_parameters()}


LEARNED = [name for name in INSERTED if parameters_of(name)]
# Tensor-parallel ranks would each learn their own copy of some parameters.
REPLICATED = [n for n in [*INSERTED, *ATTEND_ONLY] if None in parameters_of(n).values()]


def neox_modules() -> dict[str, ModuleType]:
    return {n: m for n, m in list(sys.modules.items()) if n.partition(".")[0] == "megatron"}


def make_args(**changes: Any) -> Any:
    """Arguments of a small model, from whatever `megatron` is imported."""
    from megatron.neox_arguments import NeoXArgs

    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 12,
        "max_position_embeddings": 64,
        "precision": "fp32",
        "train_batch_size": 4,
    }
    return NeoXArgs.from_dict(values | changes)


def make_model(name: str, **changes: Any) -> Any:
    """The stub's model; tensor-parallel place and size are those of its `mpu`."""
    from megatron.model.gpt2_model import GPT2ModelPipe

    return GPT2ModelPipe(make_args(pos_emb=name, **changes))


class Engine:
    """What the loop takes from DeepSpeed's engine."""

    def __init__(self, module: Any) -> None:
        self.module, self.optimizer = module, None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        hidden = ~torch.ones(1, 1, length, length, dtype=torch.bool).tril()
        return self.module((x, hidden)).square().mean()

    def get_global_grad_norm(self) -> float | None:
        return 2.5


def make_method(name: str, **changes: Any) -> PositionMethod:
    """The method as the patches put it into the attention."""
    args = make_args(pos_emb=name, **changes)
    return position.in_attention(position.make(args, name), args)


def gradients(method: PositionMethod) -> dict[str, Tensor]:
    return {name: p.grad.double() for name, p in method.named_parameters() if p.grad is not None}


def random(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_()


def state() -> dict[str, dict[str, Any]]:
    """Every attribute that installing could leave changed: modules, their classes, the process."""
    found = {}
    for name, module in neox_modules().items():
        found[name] = dict(vars(module))
        for key, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == name:
                found[f"{name}.{key}"] = dict(vars(value))
            if isinstance(value, list):
                found[f"{name}.{key}"] = {"items": list(value)}
    for name in ("deepspeed", "deepspeed.ops.adam", "deepspeed.comm.torch"):
        if name in sys.modules:
            found[name] = dict(vars(sys.modules[name]))
    if "deepspeed.runtime.pipe.engine" in sys.modules:
        engine = sys.modules["deepspeed.runtime.pipe.engine"].PipelineEngine
        found["PipelineEngine"] = dict(vars(engine))
    return found | {
        "torch.cuda": dict(vars(torch.cuda)),
        "torch.Tensor": {"cuda": vars(torch.Tensor).get("cuda")},
        "torch.nn.Module": {"cuda": vars(torch.nn.Module).get("cuda")},
        "sys": {"path": list(sys.path), "pkg_resources": sys.modules.get("pkg_resources")},
    }


def changed(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """Where two states differ, by identity or equality."""
    missing = object()
    wrong = []
    for owner in sorted(before.keys() | after.keys()):
        old, new = before.get(owner, {}), after.get(owner, {})
        for key in old.keys() | new.keys():
            a, b = old.get(key, missing), new.get(key, missing)
            if a is not b and not (isinstance(a, list | dict) and a == b):
                wrong.append(f"{owner}.{key}")
    return wrong
