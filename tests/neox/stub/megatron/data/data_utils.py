"""Data sets and loaders of the three splits."""

import numpy as np

from .gpt2_dataset import GPT2Dataset


def build_the_dataset(
    name, data_prefix, indexed_dataset, num_samples, num_epochs, seq_length, seed
):
    documents = np.arange(len(indexed_dataset.sizes), dtype=np.int32)
    return GPT2Dataset(
        name, data_prefix, documents, indexed_dataset, num_samples, num_epochs, seq_length, seed
    )


def build_train_valid_test_datasets(
    data_prefix, indexed_dataset, splits, num_samples, num_epochs, seq_length, seed
):
    made = []
    for name, first, last in zip(("train", "valid", "test"), splits, splits[1:], strict=False):
        documents = np.arange(first, last, dtype=np.int32)
        made.append(
            GPT2Dataset(
                name,
                data_prefix,
                documents,
                indexed_dataset,
                num_samples,
                num_epochs,
                seq_length,
                seed,
            )
        )
    return made


def build_train_valid_test_data_loaders(neox_args):
    if not neox_args.train_epochs and not neox_args.train_iters:
        raise ValueError("Must specify either train_epochs or train_iters")
    neox_args.do_train = 1
    return {"train_iters": neox_args.train_iters, "train": None, "valid": None, "test": None}


def shift_and_wrap_data_loaders(neox_args, data_loaders, loop=True):
    valid = data_loaders["valid"]
    if valid is not None:
        valid.batch_sampler.start_iter = neox_args.iteration % len(valid)
    return tuple(
        None if loader is None else iter(loader)
        for loader in (data_loaders[name] for name in ("train", "valid", "test"))
    )
