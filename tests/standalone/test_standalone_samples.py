"""Which tokens a step reads: GPT-NeoX's index maps and samples, and arithmetic beyond 2**31."""

from __future__ import annotations

import json

import numpy as np
import pytest
import standalone_tools as tools
from safetensors.numpy import load_file

from data_prep.errors import DataError
from data_prep.indexed import IndexedDataset, write_indexed
from megatron_patches.config import ConfigError
from megatron_patches.standalone.data import (
    Blend,
    SampleOrder,
    build_samples,
    epochs_needed,
    micro_batches,
    split_documents,
    token_stream,
)

INDEX = tools.GOLDENS / "neox" / "index"
SUMMARY = json.loads((INDEX / "summary.json").read_text())
PARTS = ("train", "valid", "test")


def cases() -> list[tuple[str, str]]:
    return [(run, part) for run in SUMMARY["runs"] for part in PARTS if SUMMARY["runs"][run][part]]


@pytest.mark.parametrize(("name", "part"), cases())
def test_index_maps_and_samples_of_neox(name, part):
    run = SUMMARY["runs"][name]
    dataset = IndexedDataset(tools.GOLDENS / "neox_data" / run["data"])
    documents = split_documents(dataset, run["split"], part)
    requested = run["requested_samples"][PARTS.index(part)]
    order = SampleOrder(dataset, documents, run["seq_length"], requested, run["seed"])

    for found, kind in (
        (order.documents, "doc"),
        (order.starts(), "sample"),
        (order.order, "shuffle"),
    ):
        wanted = np.load(INDEX / f"{name}-{part}-{kind}_idx.npy")
        assert found.shape == wanted.shape and (found == wanted).all(), kind
    assert len(order) == run[part]["len_of_dataset"]
    samples = load_file(INDEX / f"{name}-samples.safetensors")[f"{part}_text"]
    assert (np.stack([order[i] for i in range(len(samples))]) == samples).all()
    with pytest.raises(IndexError):
        order[len(order)]


def test_a_split_without_documents():
    dataset = IndexedDataset(tools.GOLDENS / "neox_data" / "c_eod_text_document")
    assert len(split_documents(dataset, "949,50,1", "test")) == 0
    with pytest.raises(DataError, match="0 documents with 0 tokens"):
        SampleOrder(dataset, np.arange(0), 16, 4, 1)


class Stub:
    """A data set of which only the sizes exist."""

    prefix = "stub"

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = np.asarray(sizes, dtype=np.int32)
        self.read: list[tuple[int, int, int]] = []

    def get(self, document: int, offset: int, length: int) -> np.ndarray:
        assert offset >= 0 and offset + length <= self.sizes[document]
        self.read.append((document, offset, length))
        return np.full(length, document)


def slow_epochs(tokens: int, length: int, samples: int) -> int:
    epochs = 0
    while True:
        epochs += 1
        if (epochs * tokens - 1) // length >= samples:
            return epochs


@pytest.mark.parametrize("length", [1, 2, 16, 64])
@pytest.mark.parametrize("tokens", [2, 3, 16, 17, 64, 65, 1000])
def test_epochs_needed_equals_neox_loop(tokens, length):
    for samples in [0, 1, 2, 3, 15, 16, 17, 63, 64, 65, 500]:
        assert epochs_needed(tokens, length, samples) == slow_epochs(tokens, length, samples)


def test_epochs_needed_with_large_numbers():
    """A quotient of floats is off by one here; whole numbers decide."""
    for tokens in (2**31 + 1, 10**12 + 1, 3 * 10**12):
        for epochs in (1, 2, 7):
            most = (epochs * tokens - 1) // 512
            assert epochs_needed(tokens, 512, most) == epochs
            assert epochs_needed(tokens, 512, most + 1) == epochs + 1


def test_token_counts_beyond_two_to_the_31():
    big = 2**31 - 1
    stub = Stub([big, 10, big, 7, big])
    length = 2**20 - 3
    order = SampleOrder(stub, np.arange(5), length, 6000, 1)
    total = 3 * big + 17
    assert order.epochs == 1 and len(order.order) == (total - 1) // length
    starts = order.starts()
    documents = [int(d) for d in order.documents]
    edges = [0]
    for document in documents:
        edges.append(edges[-1] + int(stub.sizes[document]))
    for sample in (0, 1, 2047, 2048, 2049, 4097, len(order.order) - 1, len(order.order)):
        place, offset = map(int, starts[sample])
        assert edges[place] + offset == sample * length
        assert 0 <= offset < stub.sizes[documents[place]]
    last = len(order.order) - 1
    assert len(order.tokens_at(last)) == length + 1
    assert sum(taken for _, _, taken in stub.read) == length + 1


def test_samples_share_one_token_and_skip_empty_documents(tmp_path):
    documents = [np.arange(5), np.arange(0), np.arange(10, 13), np.arange(0), np.arange(20, 40)]
    write_indexed(tmp_path / "x", documents, vocab_size=64, sidecar={})
    dataset = IndexedDataset(tmp_path / "x")
    order = SampleOrder(dataset, np.arange(5), 4, 6, 9)
    text = np.concatenate([dataset.get(int(d)) for d in order.documents])
    for sample in range(len(order.order)):
        assert (order.tokens_at(sample) == text[sample * 4 : sample * 4 + 5]).all()


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.7, 0.2, 0.1], [3.0, 1.0, 5.0, 2.5]])
def test_blend_equals_a_slow_loop(weights):
    sizes = [40 + 7 * i for i in range(len(weights))]
    orders = [[(source, i) for i in range(size)] for source, size in enumerate(sizes)]
    blend = Blend(orders, weights)
    taken, total = [0] * len(weights), sum(weights)
    for i in range(sum(sizes)):
        # Megatron's build_blending_indices, word for word
        behind = [w / total * max(i, 1) - n for w, n in zip(weights, taken, strict=True)]
        source = behind.index(max(behind))
        assert blend[i] == (source, taken[source] % sizes[source])
        taken[source] += 1
    assert len(blend) == sum(sizes)


def test_weights_decide_the_shares(tmp_path):
    for name, value in (("a", 1), ("b", 2)):
        texts = [np.full(4000, value)]
        write_indexed(tmp_path / name, texts, vocab_size=64, sidecar={})
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    config = tools.tiny(tmp_path, tmp_path, train_data_paths=paths, train_data_weights=[3.0, 1.0])
    samples = build_samples(config, "train", 16, 80)
    first = [int(samples[i][0]) for i in range(80)]
    assert first.count(1) == 60 and first.count(2) == 20
    with pytest.raises(ConfigError, match="train_data_weights"):
        tools.tiny(tmp_path, tmp_path, train_data_paths=paths, train_data_weights=[1.0])


def order_of(count: int) -> SampleOrder:
    return SampleOrder(Stub([count * 4 + 5]), np.arange(1), 4, count, 1)


def test_ranks_share_each_batch_and_passes_repeat():
    samples = [np.full(5, i) for i in range(22)]
    together = micro_batches(samples, 6, 0, 1, 0)
    shares = [micro_batches(samples, 2, rank, 3, 0) for rank in range(3)]
    for step in range(8):
        _, whole = next(together)
        parts = [next(share) for share in shares]
        assert (np.concatenate([rows for _, rows in parts]) == whole).all()
        # 22 samples hold three batches of six; then the order begins again.
        assert whole[0, 0] == 6 * (step % 3)
        assert [first for first, _ in parts] == [6 * (step % 3) + 2 * rank for rank in range(3)]


def test_a_resumed_order_continues():
    samples = [np.full(5, i) for i in range(22)]
    straight = micro_batches(samples, 4, 0, 1, 0)
    wanted = [next(straight)[0] for _ in range(9)]
    resumed = micro_batches(samples, 4, 0, 1, 6)
    assert [next(resumed)[0] for _ in range(3)] == wanted[6:]


def test_less_than_one_batch():
    assert len(order_of(3)) == 3
    with pytest.raises(DataError, match="gives 3 samples, a batch over all processes needs 4"):
        next(micro_batches(order_of(3), 2, 0, 2, 0))


def test_token_stream_is_the_file(text, tmp_path):
    tokens, (dataset,) = token_stream(tools.tiny(text, tmp_path), "valid")
    assert (tokens == dataset.tokens).all() and len(tokens) == 700
    split = tools.tiny(
        text,
        tmp_path,
        train_data_paths=None,
        valid_data_paths=None,
        test_data_paths=None,
        data_path=str(text / "train"),
        split="6,4,2",
    )
    parts = [token_stream(split, part)[0] for part in PARTS]
    assert (np.concatenate(parts) == IndexedDataset(text / "train").tokens).all()
    assert len(parts[2]) == IndexedDataset(text / "train").sizes[10:].sum()
