"""The same tensors under Hugging Face's names: GPT-NeoX's, and those of `modeling_gpt_positions`."""

from __future__ import annotations

from torch import Tensor

from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.weights import CheckpointError, State

_MLP = {"mlp.linear1.": "mlp.dense_h_to_4h.", "mlp.linear2.": "mlp.dense_4h_to_h."}
# Derived tensors that transformers 4 stored with GPT-NeoX: masks and rotary frequencies.
DERIVED = ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq")


def carried_name(key: str, model: GPT) -> str:
    """The name in `modeling_gpt_positions` of the model's tensor `key`."""
    _, number, rest = key.split(".", 2)
    layers, method = model.shape.layers, model.position_method
    fixed = {
        "0": ("word_embeddings.", "embed_in."),
        str(layers + 3): ("norm.", "final_layer_norm."),
        str(layers + 4): ("final_linear.", "lm_head."),
    }
    own = f"{method.module_name}."
    if number in fixed:
        ours, theirs = fixed[number]
        return (
            f"position.0.{rest[len(own) :]}" if rest.startswith(own) else rest.replace(ours, theirs)
        )
    index, own = int(number) - 2, f"attention.{own}"
    if rest.startswith(own):
        shared = len(model.own_methods()) == 1
        return f"position.{0 if shared else index}.{rest[len(own) :]}"
    for ours, theirs in _MLP.items():
        rest = rest.replace(ours, theirs)
    return f"layers.{index}.{rest}"


def neox_name(key: str, model: GPT) -> str:
    """The name in Hugging Face's `GPTNeoXForCausalLM`, as its files spell it in every version."""
    name = carried_name(key, model)
    return name.replace("lm_head.", "embed_out.") if "lm_head." in name else f"gpt_neox.{name}"


def _names(model: GPT, neox: bool) -> dict[str, str]:
    """Key -> name of every stored tensor; what the model derives from its shape is left out."""
    derived = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    naming = neox_name if neox else carried_name
    return {key: naming(key, model) for key in model.state_dict() if key not in derived}


def renamed(model: GPT, *, neox: bool) -> State:
    """The weights under Hugging Face's names, each once; a shared position method is stored once."""
    state = model.state_dict()
    return {
        name: state[key].detach().cpu().contiguous() for key, name in _names(model, neox).items()
    }


def restored(found: dict[str, Tensor], model: GPT, *, neox: bool, source: str) -> State:
    """The state dict of `model` from tensors under Hugging Face's names, derived ones included.

    Raises CheckpointError that lists missing and surplus names.
    """
    names = _names(model, neox)
    tied = {"lm_head.weight", "embed_out.weight"} if model.shape.tied_output else set()
    surplus = sorted(
        name
        for name in set(found) - set(names.values()) - tied
        if not (neox and name.endswith(DERIVED))
    )
    problems = [f"{name}: missing" for name in sorted(set(names.values()) - set(found))]
    problems += [f"{name}: not part of this model" for name in surplus]
    if problems:
        raise CheckpointError(
            f"{source} does not fit this {model.shape.pos_emb} model:\n  "
            + "\n  ".join(problems[:20])
        )
    own = model.state_dict()
    return {key: found[names[key]] if key in names else own[key] for key in own}
