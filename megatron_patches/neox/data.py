"""GPT-NeoX's data: windows of another length for validation, and index maps that are not stale."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_patches.config import ConfigError
from megatron_patches.neox.patches import Patches

ARRAYS = ("doc_idx", "sample_idx", "shuffle_idx")


def apply(patches: Patches) -> None:
    """`seq_length_val` for the splits valid and test."""
    from megatron.data import data_utils

    lengths = Lengths()
    patches.wrap(data_utils, "build_train_valid_test_data_loaders", lengths.loaders)
    patches.set(data_utils, "GPT2Dataset", lengths.dataset(data_utils.GPT2Dataset))


class Lengths:
    """Swaps the length with which NeoX builds the datasets of held-out splits."""

    def __init__(self) -> None:
        self.validation: int | None = None

    def loaders(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def build_train_valid_test_data_loaders(neox_args: Any) -> Any:
            self.validation = neox_args.seq_length_val
            return original(neox_args)

        return build_train_valid_test_data_loaders

    def dataset(self, original: type) -> Callable[..., Any]:
        def GPT2Dataset(name: str, *args: Any, **kwargs: Any) -> Any:
            # Called as (name, prefix, documents, indexed, samples, epochs, seq_length, seed, ...).
            held_out = name.split("_")[0] in ("valid", "test")
            if self.validation is not None and held_out:
                if "seq_length" in kwargs:
                    kwargs["seq_length"] = self.validation
                else:
                    args = (*args[:5], self.validation, *args[6:])
            return original(name, *args, **kwargs)

        return GPT2Dataset


class FixedValidation:
    """Makes every validation read the same batches, whatever the iteration of the checkpoint."""

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def shift_and_wrap_data_loaders(
            neox_args: Any, data_loaders: Any, *args: Any, **kwargs: Any
        ) -> Any:
            train, valid, test = original(neox_args, data_loaders, *args, **kwargs)
            if valid is not None:
                valid = FromTheStart(data_loaders["valid"])
            return train, valid, test

        return shift_and_wrap_data_loaders

    def evaluate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def evaluate(
            neox_args: Any, forward_step_fn: Any, data_iterator: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if isinstance(data_iterator, FromTheStart):
                data_iterator.rewind()
            return original(neox_args, forward_step_fn, data_iterator, *args, **kwargs)

        return evaluate


class FromTheStart:
    """Endless batches of a loader, from its first one after each `rewind`."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.rewind()

    def rewind(self) -> None:
        self.loader.batch_sampler.start_iter = 0
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def __iter__(self) -> FromTheStart:
        return self

    def __next__(self) -> Any:
        return next(self._batches)


# ---- index maps ----------------------------------------------------------------------------------


def fresh_index_maps(original: Callable[..., Any]) -> Callable[..., Any]:
    """NeoX caches index maps by file name, which says nothing of the text or of the split.

    Beside them goes a stamp of what they were made from; without it, or with another one, the maps are
    built again.
    """

    def _build_index_mappings(
        name: str,
        data_prefix: str,
        documents: Any,
        sizes: Any,
        label_dataset: Any,
        num_samples: Any,
        num_epochs: Any,
        seq_length: int,
        seed: int,
        packing_impl: str,
        use_shared_fs: bool = True,
        allow_chopped: bool = True,
    ) -> Any:
        import torch

        base = (
            f"{data_prefix}_{name}_indexmap_{num_samples}ns_{seq_length}sl_{seed}s_{packing_impl}pi"
        )
        base += "_ac" if allow_chopped else ""
        local = int(os.environ.get("LOCAL_RANK", "0")) == 0
        if local if not use_shared_fs else torch.distributed.get_rank() == 0:
            drop_stale(Path(base), documents, sizes, seq_length)
        return original(
            name,
            data_prefix,
            documents,
            sizes,
            label_dataset,
            num_samples,
            num_epochs,
            seq_length,
            seed,
            packing_impl,
            use_shared_fs=use_shared_fs,
            allow_chopped=allow_chopped,
        )

    return _build_index_mappings


def stamp(documents: Any, sizes: Any) -> str:
    """16 hex digits for which documents are read and how long each one is."""
    digest = hashlib.sha256(documents.tobytes())
    digest.update(sizes.tobytes())
    return digest.hexdigest()[:16]


def drop_stale(base: Path, documents: Any, sizes: Any, seq_length: int) -> None:
    """Remove the maps `<base>_*.npy` unless they fit these documents, and stamp what is kept or made.

    The stamp is written first: maps that an interrupted run leaves half written are told by their
    absence, since NeoX builds all three again when one is missing.
    """
    mark = base.with_name(base.name + "_stamp.json")
    maps = [base.with_name(f"{base.name}_{array}.npy") for array in ARRAYS]
    try:
        found = json.loads(mark.read_text(encoding="utf-8")).get("documents")
    except (OSError, ValueError, AttributeError):
        found = None
    wanted, existing = stamp(documents, sizes), [path for path in maps if path.exists()]
    whole = len(existing) == len(maps)
    if whole and found == wanted:
        return
    try:
        if not (whole and found is None and fits(maps, documents, sizes, seq_length)):
            if existing:
                whose = "other" if found else "unknown"
                print(
                    f" > {base.name}: index maps of {whose} documents, building them again",
                    flush=True,
                )
            for path in existing:
                path.unlink()
        mark.write_text(json.dumps({"documents": wanted}) + "\n", encoding="utf-8")
    except PermissionError as error:
        if any(path.exists() for path in maps) and not fits(maps, documents, sizes, seq_length):
            raise ConfigError(
                f"{error.filename} belongs to other documents and cannot be replaced: make the "
                "folder writable, or put the data elsewhere"
            ) from error


def fits(maps: list[Path], documents: Any, sizes: Any, seq_length: int) -> bool:
    """Whether maps without a stamp, which plain NeoX built, list these documents and their lengths."""
    import numpy as np

    try:
        order, samples = (np.load(path, mmap_mode="r") for path in maps[:2])
        counts = np.unique(order, return_counts=True)
    except (OSError, ValueError):
        return False
    if not np.array_equal(counts[0], np.sort(documents)) or counts[1].min() != counts[1].max():
        return False
    if samples.ndim != 2 or samples.shape[1] != 2 or not len(samples):
        return False
    # NeoX's last entry says where the last sample ends: all tokens before it, one sample after another.
    last, offset = (int(number) for number in samples[-1])
    tokens = int(sizes[order[:last]].sum(dtype=np.int64)) + offset
    return tokens == (len(samples) - 1) * seq_length
