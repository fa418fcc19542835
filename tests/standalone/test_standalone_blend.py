"""Several data paths: small shares, weights of nothing, and more of them than one byte counts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import standalone_tools as tools

from data_prep.errors import DataError
from data_prep.indexed import IndexedDataset, write_indexed
from megatron_patches.standalone.data import Blend, SampleOrder, build_samples, micro_batches


@pytest.fixture
def paths(tmp_path):
    """3,000 tokens in `a`, 700 in `b`, 200 in `c`; each token says where it is from."""
    for value, (name, size) in enumerate((("a", 3000), ("b", 700), ("c", 200))):
        write_indexed(tmp_path / name, [np.full(size, value)], vocab_size=64, sidecar={})
    return [str(tmp_path / name) for name in "abc"]


def blended(tmp_path, paths, weights, length, samples):
    config = tools.tiny(tmp_path, tmp_path, train_data_paths=paths, train_data_weights=weights)
    return build_samples(config, "train", length, samples)


@pytest.mark.parametrize("other", [1, 2])
def test_a_source_asked_for_one_sample_has_one(tmp_path, paths, other):
    used = [paths[0], paths[other]]
    samples = blended(tmp_path, used, [0.99, 0.01], 512, 8)
    assert [len(order) >= 1 for order in samples.orders] == [True, True]
    _, rows = next(micro_batches(samples, 8, 0, 1, 0))
    assert rows.shape == (8, 513)
    found = np.concatenate([samples[i] for i in range(len(samples))])
    assert set(found.tolist()) == {0, other}


def test_sources_that_neox_can_read_keep_its_order(tmp_path, paths):
    """Only the order that NeoX would fail on is made for more samples than its share."""
    samples = blended(tmp_path, paths[:2], [0.9, 0.1], 16, 100)
    seed = tools.tiny(tmp_path, tmp_path).seed
    for order, wanted, path in zip(samples.orders, (91, 11), paths[:2], strict=True):
        dataset = IndexedDataset(path)
        alone = SampleOrder(dataset, np.arange(1, dtype=np.int32), 16, wanted, seed)
        assert (order.order == alone.order).all() and order.epochs == alone.epochs


@pytest.mark.parametrize("weights", [[1.0, 0.0], [0.0, 0.0]])
def test_a_weight_of_nothing_is_refused(tmp_path, paths, weights):
    with pytest.raises(DataError, match=r"train_data_weights.*the weight 0\.0: leave the path"):
        blended(tmp_path, [paths[0], paths[2]], weights, 512, 8)


def test_a_blend_of_an_empty_order_is_refused():
    with pytest.raises(DataError, match="data path 1 of 2 has weight 1.0 and 0 samples"):
        Blend([[1, 2], []], [1.0, 1.0])


def test_an_order_without_samples_has_the_length_0(paths):
    order = SampleOrder(IndexedDataset(paths[2]), np.arange(1, dtype=np.int32), 512, 0, 1)
    assert len(order) == 0


@pytest.mark.parametrize("count", [256, 257, 300])
def test_more_paths_than_a_byte_counts(count):
    orders = [[(source, 0)] for source in range(count)]
    blend = Blend(orders, [1.0] * count)
    assert sorted(blend[i] for i in range(count)) == [(source, 0) for source in range(count)]


@pytest.mark.parametrize(
    ("weights", "drawn"),
    [
        # GPT-NeoX ea7aefd8: get_normalized_weights_and_num_samples, then BlendableDataset.
        ([1, 4, 1], "101211011211011211101211"),
        ([0.6, 0.3, 0.1], "012001001001200100100120"),
        ([0.7, 0.2, 0.1], "010200100001020010000102"),
    ],
)
def test_even_sources_are_told_apart_as_neox_rounds_their_weights(tmp_path, paths, weights, drawn):
    """It divides the weights by their sum, and the shares by theirs: another last bit."""
    samples = blended(tmp_path, paths, weights, 4, 400)
    assert "".join(str(samples[i][0]) for i in range(len(drawn))) == drawn


def test_a_source_is_asked_for_as_many_samples_as_neox_asks(tmp_path, paths):
    """8000 * (0.1 / 0.8) * 1.005 is above 1005, 8000 * 0.1 / 0.8 * 1.005 is not: NeoX has the first."""
    write_indexed(tmp_path / "d", [np.full(503, 4)] * 2, vocab_size=64, sidecar={})
    weights = [0.7, 0.1]
    # 1005 samples of one token need 1,006 tokens, which is what `d` has.
    samples = blended(tmp_path, [paths[0], str(tmp_path / "d")], weights, 1, 8000)
    assert math.ceil(8000 * (0.1 / sum(weights)) * 1.005) == 1006
    assert [order.epochs for order in samples.orders] == [3, 2]
