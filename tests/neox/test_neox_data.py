"""Validation at another length, from the same place each time, and index maps of the right text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from neox_tools import STUB, make_args

from megatron_patches.neox import install
from megatron_patches.neox.data import ARRAYS, FixedValidation, FromTheStart, Lengths, stamp

SIZES = np.array([5, 7, 11, 13, 17, 19, 23, 29], dtype=np.int32)


def documents(first: int, last: int) -> np.ndarray:
    return np.arange(first, last, dtype=np.int32)


class Loader:
    """Batches 0, 1, ..., from `batch_sampler.start_iter`, as GPT-NeoX's loaders."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.batch_sampler = SimpleNamespace(start_iter=0)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[int]:
        yield from range(self.batch_sampler.start_iter, self.batches)


# ---- the length of the held-out splits -----------------------------------------------------------


@pytest.fixture
def corpus(neox, alone, tmp_path) -> dict[str, Any]:
    """Arguments for the stub's two functions that build data sets."""
    return {
        "data_prefix": str(tmp_path / "text"),
        "indexed_dataset": SimpleNamespace(sizes=SIZES),
        "num_epochs": None,
        "seq_length": 12,
        "seed": 1,
    }


@pytest.mark.parametrize(("wanted", "expected"), [(None, [12] * 3), (48, [12, 48, 48])])
def test_both_ways_of_building_data_sets(corpus, wanted, expected):
    from megatron.data import data_utils

    data_utils.build_train_valid_test_data_loaders(make_args(train_iters=1, seq_length_val=wanted))
    split = data_utils.build_train_valid_test_datasets(splits=[0, 4, 6, 8], num_samples=9, **corpus)
    assert [dataset.seq_length for dataset in split] == expected
    own = [
        data_utils.build_the_dataset(name=name, num_samples=9, **corpus)
        for name in ("train_0", "valid_0", "test_0")
    ]
    assert [dataset.seq_length for dataset in own] == expected
    assert [dataset.name for dataset in own] == ["train_0", "valid_0", "test_0"]


def test_the_length_may_be_passed_by_name_or_in_seventh_place():
    seen = []
    lengths = Lengths()
    build = lengths.dataset(lambda *args, **kwargs: seen.append((args, kwargs)))
    lengths.validation = 48
    build("valid", "prefix", "docs", "indexed", 1, 2, 12, 1234, pack_impl="packed")
    build("test", "prefix", "docs", "indexed", 1, 2, seq_length=12, seed=1234)
    build("train", "prefix", "docs", "indexed", 1, 2, 12, 1234)
    build("validity", "prefix", "docs", "indexed", 1, 2, 12, 1234)
    assert seen == [
        (("valid", "prefix", "docs", "indexed", 1, 2, 48, 1234), {"pack_impl": "packed"}),
        (("test", "prefix", "docs", "indexed", 1, 2), {"seq_length": 48, "seed": 1234}),
        (("train", "prefix", "docs", "indexed", 1, 2, 12, 1234), {}),
        (("validity", "prefix", "docs", "indexed", 1, 2, 12, 1234), {}),
    ]


# ---- the same validation batches -----------------------------------------------------------------


def test_from_the_start():
    batches = FromTheStart(Loader(3))
    assert iter(batches) is batches
    assert [next(batches) for _ in range(5)] == [0, 1, 2, 0, 1]
    batches.rewind()
    assert [next(batches) for _ in range(2)] == [0, 1]


def test_a_start_set_by_others_is_forgotten():
    loader = Loader(4)
    batches = FromTheStart(loader)
    loader.batch_sampler.start_iter = 2
    batches.rewind()
    assert next(batches) == 0


@pytest.mark.parametrize("off", [False, True])
def test_every_validation_reads_the_same_batches(clean, alone, off):
    install(home=STUB, fixes_off=["fixed_validation"] if off else [])
    from megatron import training
    from megatron.data import data_utils

    args = make_args(eval_iters=2, iteration=3)
    loaders = {"train": Loader(9), "valid": Loader(9), "test": None}
    train, valid, test = data_utils.shift_and_wrap_data_loaders(args, loaders)
    assert next(train) == 0 and test is None
    read: list[int] = []

    def forward_step(**arguments: Any) -> Any:
        read.append(next(arguments["data_iterator"]))
        return 0.0, {}

    for _ in range(2):
        training.evaluate(args, forward_step, valid, None)
    assert read == ([3, 4, 5, 6] if off else [0, 1, 0, 1])


def test_without_validation_data_there_is_nothing_to_fix():
    wrapped = FixedValidation().wrap(lambda *_: ("train", None, "test"))
    assert wrapped(None, {"valid": None}) == ("train", None, "test")


# ---- index maps ----------------------------------------------------------------------------------


@pytest.fixture
def maps(neox, alone, tmp_path, capsys):
    """build(documents, sizes): which of the three files were written anew, and what was printed."""
    from megatron.data import gpt2_dataset

    base = tmp_path / "text_train_indexmap_9ns_12sl_1s_packedpi_ac"

    def build(chosen: np.ndarray, sizes: np.ndarray = SIZES, **changes: Any) -> tuple[str, str]:
        before = {path: path.stat().st_ino for path in files() if path.exists()}
        stamps = {path: path.stat().st_mtime_ns for path in before}
        capsys.readouterr()
        arrays = gpt2_dataset._build_index_mappings(
            "train",
            str(tmp_path / "text"),
            chosen,
            sizes,
            None,
            9,
            None,
            12,
            1,
            "packed",
            **changes,
        )
        assert np.array_equal(arrays[0], chosen)
        assert np.array_equal(arrays[1], sizes[chosen].cumsum())
        kept = [
            path
            for path in files()
            if path in before
            and (before[path], stamps[path]) == (path.stat().st_ino, path.stat().st_mtime_ns)
        ]
        return {0: "built", len(ARRAYS): "kept"}[len(kept)], capsys.readouterr().out

    def files() -> list[Any]:
        return [base.with_name(f"{base.name}_{array}.npy") for array in ARRAYS]

    build.files, build.mark = files(), base.with_name(base.name + "_stamp.json")  # type: ignore
    return build


def test_the_same_documents_keep_their_maps(maps):
    assert maps(documents(0, 5)) == ("built", "")
    assert maps(documents(0, 5)) == ("kept", "")
    wanted = stamp(documents(0, 5), SIZES)
    assert json.loads(maps.mark.read_text()) == {"documents": wanted} and len(wanted) == 16


def test_another_split_is_built_again(maps):
    maps(documents(0, 5))
    done, told = maps(documents(0, 6))
    assert done == "built" and "index maps of other documents, building them again" in told
    assert maps(documents(0, 6)) == ("kept", "")


def test_another_text_is_built_again(maps):
    maps(documents(0, 5))
    other = SIZES.copy()
    other[2] += 1
    assert maps(documents(0, 5), other)[0] == "built"
    assert maps(documents(0, 5), other) == ("kept", "")


@pytest.mark.parametrize("array", ARRAYS)
def test_a_missing_map(maps, array):
    maps(documents(0, 5))
    next(file for file in maps.files if file.name.endswith(f"{array}.npy")).unlink()
    done, _ = maps(documents(0, 5))
    assert done == "built"
    assert maps(documents(0, 5)) == ("kept", "")


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"documents": null}'])
def test_maps_without_a_readable_stamp_are_of_unknown_documents(maps, text):
    maps(documents(0, 5))
    if text is None:
        maps.mark.unlink()
    else:
        maps.mark.write_text(text)
    done, told = maps(documents(0, 5))
    assert done == "built" and "index maps of unknown documents, building them again" in told
    assert maps(documents(0, 5)) == ("kept", "")


def test_the_stamp_is_written_before_the_maps(maps, monkeypatch):
    """An interrupted run leaves a stamp without all maps, which is no reason to trust them."""
    maps(documents(0, 5))
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            maps(documents(1, 5))
    assert json.loads(maps.mark.read_text())["documents"] == stamp(documents(1, 5), SIZES)
    assert not any(file.exists() for file in maps.files)
    assert maps(documents(1, 5))[0] == "built"


@pytest.mark.parametrize(("shared", "rank", "local"), [(True, 1, "0"), (False, 0, "1")])
def test_only_one_process_of_those_that_share_the_folder_removes_maps(
    maps, monkeypatch, shared, rank, local
):
    maps(documents(0, 5))
    monkeypatch.setattr("torch.distributed.get_rank", lambda *_, **__: rank)
    monkeypatch.setenv("LOCAL_RANK", local)
    with pytest.raises(AssertionError):  # the old maps are still there: the first process's task
        maps(documents(0, 6), use_shared_fs=shared)
    assert all(file.exists() for file in maps.files)
