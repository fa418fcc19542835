"""Corrections of how GPT-NeoX starts, evaluates and saves; `fixes.py` names them."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_patches.neox.patches import Patches

# ---- imports -------------------------------------------------------------------------------------


def pkg_resources(patches: Patches) -> None:
    """NeoX takes `packaging` from pkg_resources, which left setuptools in version 82."""
    if "pkg_resources" in sys.modules or importlib.util.find_spec("pkg_resources") is not None:
        return
    import packaging.version  # NeoX uses this part of it

    stub = types.ModuleType("pkg_resources")
    stub.packaging = packaging  # type: ignore[attr-defined]
    sys.modules["pkg_resources"] = stub
    patches.add(lambda: sys.modules.pop("pkg_resources", None))


def wandb_ids(patches: Patches) -> None:
    """NeoX names wandb groups with a function that wandb has moved."""
    if importlib.util.find_spec("wandb") is None:
        return
    import wandb
    from wandb.sdk.lib import runid

    if not hasattr(wandb.util, "generate_id"):
        patches.set(wandb.util, "generate_id", runid.generate_id)


# ---- evaluation ----------------------------------------------------------------------------------


def pipeline_evaluation(patches: Patches) -> None:
    """`forward_step` gives one value with pipeline stages, `evaluate` unpacks two."""
    from megatron import training

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step(
            data_iterator: Any, model: Any, neox_args: Any, *args: Any, **kwargs: Any
        ) -> Any:
            out = original(data_iterator, model, neox_args, *args, **kwargs)
            logits = kwargs.get("return_logits") or (len(args) > 1 and args[1])
            if neox_args.is_pipe_parallel and not logits and not isinstance(out, tuple):
                return out, {}
            return out

        return forward_step

    patches.wrap(training, "forward_step", make)


def evaluation_only(patches: Patches) -> None:
    """`train_iters: 0` is refused, although it is how a checkpoint is evaluated without training."""
    from megatron.data import data_utils

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def build_train_valid_test_data_loaders(neox_args: Any) -> Any:
            if neox_args.train_iters != 0 or neox_args.train_epochs:
                return original(neox_args)
            neox_args.train_iters = 1  # enough for one evaluation; nothing is trained
            try:
                loaders = original(neox_args)
            finally:
                neox_args.train_iters = 0
            neox_args.do_train = 0
            neox_args.save = None  # the weights are those of the checkpoint that was loaded
            return loaders

        return build_train_valid_test_data_loaders

    patches.wrap(data_utils, "build_train_valid_test_data_loaders", make)


def evaluation_lengths(patches: Patches) -> None:
    """A checkpoint refuses another `max_position_embeddings`, which most methods never read.

    The rotary table's length is the other half of this fix (`attention.py`).
    """
    from megatron import checkpointing

    from megatron_patches.positions import method_class

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def check_checkpoint_args(neox_args: Any, checkpoint_args: Any) -> Any:
            if method_class(neox_args.pos_emb).place == "attention":
                key = "max_position_embeddings"
                checkpoint_args = {k: v for k, v in checkpoint_args.items() if k != key}
            return original(neox_args, checkpoint_args)

        return check_checkpoint_args

    patches.wrap(checkpointing, "check_checkpoint_args", make)


def fixed_validation(patches: Patches) -> None:
    from megatron import training
    from megatron.data import data_utils

    from megatron_patches.neox.data import FixedValidation

    fixed = FixedValidation()
    patches.wrap(data_utils, "shift_and_wrap_data_loaders", fixed.wrap)
    patches.wrap(training, "evaluate", fixed.evaluate)


def stale_index_maps(patches: Patches) -> None:
    from megatron.data import gpt2_dataset

    from megatron_patches.neox.data import fresh_index_maps

    patches.wrap(gpt2_dataset, "_build_index_mappings", fresh_index_maps)


# ---- checkpoints ---------------------------------------------------------------------------------


def whole_weights(patches: Patches) -> None:
    """At ZeRO 3 each rank saves its slices alone, which neither evaluation nor conversion reads."""
    from megatron import checkpointing

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def save_ds_checkpoint(iteration: int, model: Any, neox_args: Any) -> Any:
            out = original(iteration, model, neox_args)
            if model.zero_optimization_partition_weights():
                whole = model._zero3_consolidated_16bit_state_dict()  # every rank takes part
                if torch.distributed.get_rank() == 0:
                    folder = Path(neox_args.save, checkpointing.get_checkpoint_tag(iteration))
                    temporary = folder / ".whole.pt"
                    torch.save({"module": whole, "iteration": iteration}, temporary)
                    temporary.replace(folder / "mp_rank_00_model_states.pt")
            return out

        return save_ds_checkpoint

    patches.wrap(checkpointing, "save_ds_checkpoint", make)
