"""A data set that is a list of sample numbers, with index maps cached by their file name."""

import os

import numpy as np


class GPT2Dataset:
    def __init__(
        self,
        name,
        data_prefix,
        documents,
        indexed_dataset,
        num_samples,
        num_epochs,
        seq_length,
        seed,
        pack_impl="packed",
        allow_chopped=True,
        use_shared_fs=True,
    ):
        self.name, self.seq_length = name, seq_length
        self.doc_idx, self.sample_idx, self.shuffle_idx = _build_index_mappings(
            name,
            data_prefix,
            documents,
            indexed_dataset.sizes,
            None,
            num_samples,
            num_epochs,
            seq_length,
            seed,
            pack_impl,
            use_shared_fs=use_shared_fs,
            allow_chopped=allow_chopped,
        )


def _build_index_mappings(
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
    use_shared_fs=True,
    allow_chopped=True,
):
    base = data_prefix + str.format("_{}_indexmap", name)
    base += f"_{num_samples}ns_{seq_length}sl_{seed}s_{packing_impl}pi"
    base += "_ac" if allow_chopped else ""
    files = [base + end for end in ("_doc_idx.npy", "_sample_idx.npy", "_shuffle_idx.npy")]
    if not all(os.path.exists(file) for file in files):
        lengths = sizes[documents]
        for file, array in zip(files, (documents, lengths.cumsum(), lengths[::-1]), strict=False):
            np.save(file, array)
    return [np.load(file) for file in files]
