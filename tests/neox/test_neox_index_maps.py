"""Index maps that plain GPT-NeoX built: adopted where they fit the documents, else built again."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from megatron_patches.config import ConfigError
from megatron_patches.neox.data import ARRAYS, drop_stale, stamp

SIZES = np.array([5, 7, 11, 13, 17, 19, 23, 29], dtype=np.int32)


def documents(first: int, last: int) -> np.ndarray:
    return np.arange(first, last, dtype=np.int32)


@pytest.fixture
def plain(tmp_path):
    """plain(order) -> the base of maps as NeoX builds them: one sample of 4 tokens after another."""

    def build(order: list[int], epochs: int = 2) -> Any:
        doc_idx = np.array(order * epochs, dtype=np.int32)
        ends = SIZES[doc_idx].cumsum()
        samples = [[0, 0]]
        for end in range(4, int(ends[-1]), 4):
            document = int(np.searchsorted(ends, end, side="right"))
            samples.append([document, end - int(ends[document] - SIZES[doc_idx[document]])])
        base = tmp_path / "plain_train_indexmap"
        arrays = (doc_idx, np.array(samples, dtype=np.int32), np.arange(len(samples) - 1))
        for name, array in zip(ARRAYS, arrays, strict=True):
            np.save(base.with_name(f"{base.name}_{name}.npy"), array)
        return base

    return build


def kept(base: Any) -> bool:
    return all(base.with_name(f"{base.name}_{name}.npy").exists() for name in ARRAYS)


def test_maps_that_plain_neox_built_are_adopted(plain):
    base = plain([3, 1, 2])
    drop_stale(base, documents(1, 4), SIZES, 4)
    assert kept(base)
    assert json.loads(base.with_name(base.name + "_stamp.json").read_text())["documents"] == stamp(
        documents(1, 4), SIZES
    )


@pytest.mark.parametrize(
    ("chosen", "grown", "length"), [((0, 4), 0, 4), ((1, 4), 1, 4), ((1, 4), 0, 5)]
)
def test_maps_that_do_not_fit_are_not_adopted(plain, chosen, grown, length):
    base = plain([3, 1, 2])
    drop_stale(base, documents(*chosen), SIZES + grown, length)
    assert not kept(base)


def test_a_folder_that_cannot_be_written(plain, monkeypatch):
    base = plain([3, 1, 2])
    denied = PermissionError(13, "Permission denied", "the folder")
    monkeypatch.setattr("pathlib.Path.write_text", lambda *_, **__: (_ for _ in ()).throw(denied))
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: (_ for _ in ()).throw(denied))
    drop_stale(base, documents(1, 4), SIZES, 4)  # they fit: nothing needs to be written
    with pytest.raises(ConfigError, match="the folder belongs to other documents"):
        drop_stale(base, documents(0, 4), SIZES, 4)
    assert kept(base)
