"""A position method in a model of Hugging Face's: Llama, GPT-NeoX, and others of their build."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_patches.attention.selection import implementation
from megatron_patches.hf import attention_function
from megatron_patches.positions import PositionMethod, build

OWNER = "position_methods"  # attribute of the model, prefix of its parameters, entry of its config


class PositionMethods(nn.ModuleList):
    """The methods of a model: one, or one a layer."""

    def methods(self) -> list[PositionMethod]:
        """As a list of their type."""
        return cast("list[PositionMethod]", list(self))

    def project_(self) -> None:
        """All parameters back into their legal range, and the next draw; after each optimizer step."""
        self.make_legal_()
        for method in self.methods():
            method.step += 1

    def make_legal_(self) -> None:
        """All parameters back into their legal range."""
        for method in self.methods():
            method.project_()


class NoRotation(nn.Module):
    """In place of a rotary embedding: cosines of 1, sines of 0, so that nothing is turned."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.replaced = (replaced,)  # a tuple: its buffers are not the model's any more

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor]:
        turned = self.replaced[0].to(x.device)(x, *arguments, **named)
        if not (isinstance(turned, tuple) and len(turned) == 2):
            raise ValueError(
                f"{type(self.replaced[0]).__name__} does not give (cos, sin): its rotation cannot be "
                "switched off"
            )
        return torch.ones_like(turned[0]), torch.zeros_like(turned[1])


def use_positions(
    model: Any,
    name: str,
    *,
    replace: bool = True,
    sharing: str | None = None,
    impl: str = "auto",
    seed: int = 0,
    **options: Any,
) -> PositionMethods:
    """Let a transformers model attend with a position method of this suite, instead of its rotary.

    The method's parameters become the model's own, as `position_methods.*`: they are trained, moved and
    saved with it. They stay float32. `load_with_positions` loads what `save_pretrained` wrote.

    Args:
        model: a causal `PreTrainedModel` whose attention goes through transformers' interface, with
            rotary positions, full sight and no attention dropout.
        name: position method, see `megatron_patches.positions.names`.
        replace: switch the rotary embedding off. False keeps what the model has and adds the method.
        sharing: "model", one method, "layer", one a layer, None: what the method prescribes.
        impl: implementation of `attend`.
        seed: of the method's first values; layer i draws from seed + i.
        options: of the method.

    Returns the methods, in the model's mode, training or evaluation. Call their `project_` after each
    optimizer step.

    Raises ValueError, with the model unchanged: it has a method already, or a setting under which the
    method would be wrong or without effect (named); the name, option or size does not exist; the method
    needs more than the scores of attention (gates, token embeddings, turned queries and keys).

    >>> import torch, transformers
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=50)
    >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    >>> model = transformers.LlamaForCausalLM(config)
    >>> methods = use_positions(model, "kerple_log")
    >>> [name for name, _ in model.named_parameters() if "position" in name]
    ['position_methods.0.bias_p', 'position_methods.0.bias_a']
    >>> tokens = torch.arange(20)[None]
    >>> model(tokens, labels=tokens).loss.backward()
    >>> methods[0].bias_p.grad.shape
    torch.Size([4, 1, 1])
    """
    if impl != "auto":
        implementation(impl)  # says now that there is none of this name, not in the first call
    attentions = _attentions(model)
    rotary = _rotary(model) if replace else []
    if replace and not rotary:
        raise ValueError(
            f"{type(model).__name__} has no rotary embedding that could be replaced; replace=False adds "
            "the method to the positions that it has"
        )
    methods = _build(model, attentions, name, sharing, seed, options)
    _take_over(model)
    for place, attribute, embedding in rotary:
        setattr(place, attribute, NoRotation(embedding).train(model.training))
    made = methods.methods()
    for index, attention in enumerate(attentions):
        attention_function.fill_slot(attention, made[index % len(made)], impl)
    # A model that was loaded is in evaluation mode, and a module is made in training mode.
    model.add_module(OWNER, methods.train(model.training))
    model.register_state_dict_pre_hook(_before_saving)
    model.base_model.register_forward_pre_hook(attention_function.check_call, with_kwargs=True)
    spelt = {key: _spelt(value) for key, value in options.items()}
    plan = {"name": made[0].name, "replace": replace, "seed": seed, "options": spelt}
    setattr(model.config, OWNER, {**plan, "sharing": "model" if len(methods) == 1 else "layer"})
    # transformers stops at this entry where nobody registered the name: no loading without the method.
    model.config.attn_implementation = attention_function.NAME
    return methods


def _spelt(value: Any) -> Any:
    """The value of an option as JSON has it: a dtype by its name, which the option takes as well."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _before_saving(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    """What is saved is legal, whoever trains; of the model that is saved, which may be a copy."""
    getattr(model, OWNER).make_legal_()


def _attentions(model: Any) -> list[nn.Module]:
    """The attention modules in layer order, checked."""
    if hasattr(model, OWNER):
        raise ValueError(f"{type(model).__name__} has a position method already")
    if not hasattr(model.config, "num_attention_heads"):
        raise ValueError(
            f"{type(model.config).__name__} has no num_attention_heads: of a model of several parts give the "
            "language model alone"
        )
    found = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention modules of the known kind")
    for module in found:
        kind = type(module).__name__
        if not module.is_causal or getattr(module, "is_cross_attention", False):
            raise ValueError(f"{kind} does not attend causally to its own text")
        for key in ("attention_dropout", "attn_pdrop"):
            if getattr(model.config, key, 0.0):
                raise ValueError(f"{key} is {getattr(model.config, key)}: set it to 0")
    window = _window(model.config)
    if window is not None:
        raise ValueError(
            f"{window}: windows are not supported; make the model of a configuration with sliding_window "
            "None and, where it has layer_types, full_attention in all of them"
        )
    return sorted(found, key=lambda module: module.layer_idx)


def _window(config: Any) -> str | None:
    """The setting that gives a layer less than full sight; None: there is none."""
    kinds = getattr(config, "layer_types", None) or ()
    limited = sorted({"sliding_attention", "chunked_attention"} & set(kinds))
    if limited:
        return f"layer_types names {', '.join(limited)}"
    width = getattr(config, "sliding_window", None)
    if kinds or width is None or not getattr(config, "use_sliding_window", True):
        return None
    return f"sliding_window is {width}"


def _rotary(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """`(owner, attribute, module)` of each rotary embedding."""
    return [
        (owner, attribute, child)
        for owner in model.modules()
        for attribute, child in owner.named_children()
        if type(child).__name__.endswith("RotaryEmbedding")
    ]


def _build(
    model: Any,
    attentions: list[nn.Module],
    name: str,
    sharing: str | None,
    seed: int,
    options: dict[str, Any],
) -> PositionMethods:
    config, first = model.config, attentions[0]
    heads = config.num_attention_heads
    width = getattr(first, "head_dim", None) or getattr(first, "head_size", None)
    width = width or config.hidden_size // heads

    def make(index: int) -> PositionMethod:
        method = build(
            name,
            heads=heads,
            head_dim=width,
            hidden_size=config.hidden_size,
            max_length=config.max_position_embeddings,
            seed=seed + index,
            **options,
        )
        method.score_scale = getattr(attentions[index], "scaling", None)
        return method.to(next(model.parameters()).device)

    method = make(0)
    reason = _elsewhere(method)
    if reason is not None:
        raise ValueError(f"{method.name} {reason}: it cannot be put into a model of transformers")
    sharing = sharing or method.sharing
    if sharing not in ("model", "layer"):
        raise ValueError(f"sharing is {sharing!r}, not 'model' or 'layer'")
    if sharing == "layer":
        return PositionMethods([method, *(make(index) for index in range(1, len(attentions)))])
    scales = {getattr(attention, "scaling", None) for attention in attentions}
    if len(scales) > 1:
        raise ValueError(f"the layers scale their scores differently ({scales}): sharing='layer'")
    return PositionMethods([method])


def _elsewhere(method: PositionMethod) -> str | None:
    """What the method needs besides the scores of attention, which are all that it is given here."""
    if method.gated:
        return "makes gates of a layer's input, which transformers does not hand to its attention"
    if method.place == "embedding":
        return "acts on the token embeddings, not in attention"
    if method.transforms:
        return "turns queries and keys, which is left to a model's own rotary embedding"
    return None


def _take_over(model: Any) -> None:
    attention_function.register()
    before = model.config._attn_implementation
    model.set_attn_implementation(attention_function.NAME)
    if model.config._attn_implementation != attention_function.NAME:
        raise ValueError(
            f"{type(model).__name__} keeps its attention ({before}): it does not go through transformers' "
            "AttentionInterface"
        )


def load_with_positions(folder: str | Path, **settings: Any) -> Any:
    """A causal model that `save_pretrained` wrote after `use_positions`, method and all.

    Args:
        folder: local folder.
        settings: for `AutoModelForCausalLM.from_pretrained`.

    Raises ValueError where the folder holds no such model, or a parameter is missing, surplus or of another
    shape.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{folder}: no folder with a config.json; save_pretrained writes one")
    attention_function.register()
    plan = getattr(AutoConfig.from_pretrained(folder), OWNER, None)
    if not isinstance(plan, dict):
        raise ValueError(f"{folder}: config.json names no position method")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **settings)
    model, info = loaded
    options = plan.get("options", {})
    given = {key: plan[key] for key in ("name", "replace", "sharing", "seed")}
    methods = use_positions(model, **given, **options)
    wanted = {f"{OWNER}.{key}" for key in methods.state_dict()}
    # transformers knows nothing of the methods: to it, exactly their tensors are surplus.
    problems = [
        *(f"{key}: missing" for key in wanted - set(info["unexpected_keys"])),
        *(f"{key}: not part of this model" for key in set(info["unexpected_keys"]) - wanted),
        *(
            f"{what}: {found}"
            for what, found in info.items()
            if found and what != "unexpected_keys"
        ),
    ]
    if problems:
        raise ValueError(f"{folder} does not fit this model: {'; '.join(sorted(problems)[:20])}")
    stored = _stored(Path(folder), wanted)
    state = {key.removeprefix(f"{OWNER}."): tensor for key, tensor in stored.items()}
    methods.load_state_dict(state, strict=True)
    return model


def _stored(folder: Path, names: set[str]) -> dict[str, Tensor]:
    """The tensors `names` from the folder's safetensors files."""
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= {key: tensors.get_tensor(key) for key in tensors.keys() if key in names}  # noqa: SIM118
    return found
