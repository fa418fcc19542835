"""What a Hugging Face folder says about the model in it: configuration, generation, model card."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import yaml

from megatron_patches.config import Config, ConfigError
from megatron_patches.config.store import NAMED_BY_DATASET, NOT_HASHED
from megatron_patches.standalone.model import GPT

CODE = "modeling_gpt_positions"  # the file that goes along, of this package
TRAINING = "training.yml"  # how the model was trained, without this machine's paths
RECORD = "provenance.json"
ORIGIN = ("config_sha", "git_sha", "data", "tokenizer", "engine", "step")  # its entries


def carried_code() -> ModuleType:
    """The module that goes along with the weights; ConfigError without transformers."""
    try:
        return importlib.import_module(f"megatron_patches.hf.{CODE}")
    except ImportError as error:
        raise ConfigError(
            f"this needs transformers and safetensors: pip install '.[hf]' ({error})"
        ) from error


def is_neox(model: GPT) -> bool:
    """Whether Hugging Face's own GPT-NeoX computes this model: it turns queries and keys like ours."""
    return model.position_method.rope_parameters() is not None


def refused(model: GPT) -> str | None:
    """Why no Hugging Face model computes this one; None: there is one."""
    shape, method = model.shape, model.position_method
    if is_neox(model):
        if shape.window is not None:
            return "transformers' GPT-NeoX has no sliding window: export without one"
        return None
    options = method.settings()["options"]
    if method.transforms:
        told = ", ".join(f"{key}={value}" for key, value in options.items() if value is not None)
        return f"no Hugging Face model turns queries and keys as it does with {told}"
    if method.name not in carried_code().METHODS:
        return f"{CODE}.py does not know {method.name}: add its formula there, and to METHODS"
    return None


def model_config(model: GPT, training_length: int, eod: int | None) -> Any:
    """The configuration object of the folder's model class; `refused(model)` must be None."""
    import transformers

    shape = model.shape
    weight = model.get_parameter("sequential.0.word_embeddings.weight")
    common: dict[str, Any] = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate_size or 4 * shape.hidden_size,
        "layer_norm_eps": shape.layernorm_epsilon,
        "use_parallel_residual": shape.parallel_residual,
        "initializer_range": shape.init_method_std,
        "tie_word_embeddings": shape.tied_output,
        # A table's rows where there is one; elsewhere what the model was trained on, no limit.
        "max_position_embeddings": model.position_method.max_length or training_length,
        "bos_token_id": eod,
        "eos_token_id": eod,
        "pad_token_id": eod,
    }
    options = model.position_method.settings()["options"]
    rope = model.position_method.rope_parameters()
    if rope is not None:
        share, base = rope["partial_rotary_factor"], rope["rope_theta"]
        # Both spellings: transformers 4 reads the first two, 5 the third.
        spelt = {"rotary_pct": share, "rotary_emb_base": base, "rope_parameters": rope}
        made = transformers.GPTNeoXConfig(**common, **spelt, hidden_act="gelu")
        made.architectures = ["GPTNeoXForCausalLM"]
    else:
        made = carried_code().GPTPositionsConfig(
            **common,
            position=model.position_method.name,
            position_sharing="model" if len(model.own_methods()) == 1 else "layer",
            position_dtype=options["model_dtype"] or "float32",
            attention_window=shape.window,
            **{key: value for key, value in options.items() if key.startswith("rpe_")},
        )
        made.architectures = ["GPTPositionsForCausalLM"]
        made.auto_map = {
            "AutoConfig": f"{CODE}.GPTPositionsConfig",
            "AutoModelForCausalLM": f"{CODE}.GPTPositionsForCausalLM",
        }
    made.dtype = str(weight.dtype).removeprefix("torch.")
    return made


def generation_config(model: GPT, entries: int | None, eod: int | None) -> Any:
    """Greedy; never a padding row of the embedding; within a learned table."""
    import transformers

    given: dict[str, Any] = {"eos_token_id": eod, "pad_token_id": eod, "bos_token_id": eod}
    if entries is not None and entries < model.shape.vocabulary:
        given["suppress_tokens"] = list(range(entries, model.shape.vocabulary))
    if model.position_method.max_length is not None:
        given["max_length"] = model.position_method.max_length
    return transformers.GenerationConfig(**given)


def training_record(config: Config) -> str:
    """YAML of the keys that decide what is trained; it composes to a configuration again."""
    left_out = {*NOT_HASHED, *NAMED_BY_DATASET, "seq_length_val", "padded_vocab_size"}
    values = config.model_dump(mode="json", exclude_unset=True)
    kept = {key: value for key, value in values.items() if key not in left_out}
    return yaml.safe_dump(kept, sort_keys=True, allow_unicode=True, default_flow_style=None)


@dataclass(frozen=True)
class Provenance:
    """Where the weights come from, as far as the run says: its `run.json` and its folder."""

    config_sha: str
    git_sha: str
    data: str
    tokenizer: str
    engine: str
    step: int
    checks: tuple[str, ...]  # lines of the comparison with our model

    def record(self) -> str:
        """JSON for `RECORD`."""
        return json.dumps({key: getattr(self, key) for key in ORIGIN}, indent=1)


def model_card(model: GPT, config: Config, origin: Provenance, tokenizer: str) -> str:
    """`README.md`: what the model is, how to load it, where it comes from, what was checked."""
    import transformers

    name, remote = model.position_method.name, not is_neox(model)
    trust = ", trust_remote_code=True" if remote else ""
    limit = model.position_method.max_length
    reads = f"{limit} tokens at most" if limit else "inputs of any length"
    code = (
        f"Its code is `{CODE}.py` beside the weights, which needs torch and transformers. Loading fails "
        "when a parameter is missing, surplus, of another shape or outside its range."
        if remote
        else "It is transformers' own GPT-NeoX; no code of this folder is run."
    )
    rows = {
        "position method": name,
        "parameters": f"{model.parameter_count():,}",
        "layers, width, heads": f"{model.shape.layers}, {model.shape.hidden_size}, {model.shape.heads}",
        "trained on": f"{config.seq_length} tokens a sequence, seed {config.seed}, step {origin.step}",
        "reads": reads,
        "text": config.dataset or "not named",
        "fingerprint of the data": origin.data,
        "fingerprint of the tokenizer": origin.tokenizer,
        "tokenizer": tokenizer,
        "configuration": f"{origin.config_sha} (`{TRAINING}`)",
        "engine, commit": f"{origin.engine}, {origin.git_sha}",
        "written with": f"transformers {transformers.__version__}",
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    checks = "\n".join(f"- {line}" for line in origin.checks)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [position-encoding, {name}]
---

# {name}, a GPT trained on {config.seq_length} tokens

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER"{trust})
tokenizer = AutoTokenizer.from_pretrained("FOLDER"{trust})
```

{code} Padding stands left or right of the text; positions count from the first real token.

| | |
|---|---|
{table}

Compared with the model that it was written from, in float32, before this folder got its name:

{checks}
"""
