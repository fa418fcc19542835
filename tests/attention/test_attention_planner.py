"""The expected peak memory against the measured one, in fresh processes."""

from __future__ import annotations

import pytest
from test_attention_memory import WHOLE_ROWS, linux, peak

from megatron_patches.attention import IMPLEMENTATIONS
from megatron_patches.attention.memory import Size, peak_bytes

CASES = [
    # implementation, length, heads, training
    ("chunked", 4096, 12, False),
    ("chunked", 8192, 12, False),
    ("chunked", 2048, 12, True),
    ("chunked", 4096, 4, True),
    ("reference", 1024, 12, False),
    ("reference", 1024, 12, True),
]


@linux
@pytest.mark.slow
@pytest.mark.parametrize(("impl", "length", "heads", "training"), CASES)
def test_expected_and_measured_peak_agree(impl, length, heads, training):
    expected = peak_bytes(impl, Size(1, heads, length, length, 64, 4, training)) / 2**20
    measured = peak(impl, "kerple_log", length, heads, training)
    assert abs(expected / measured - 1) < 0.25, (
        f"expected {expected:.1f}, measured {measured:.1f} MB"
    )


@linux
@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_expected_and_measured_peak_of_whole_rows(training):
    """One formula for all such methods: that of the one which keeps most."""
    size = Size(1, 12, 2048, 2048, 64, 4, training, whole_rows=True)
    expected = peak_bytes("chunked", size) / 2**20
    measured = {name: peak("chunked", name, 2048, 12, training) for name in WHOLE_ROWS}
    assert 0.8 < expected / max(measured.values()) < 1.6, f"expected {expected:.1f} MB, {measured}"


def test_whole_rows_have_a_bound_of_their_own():
    """Twice the keys: more for tensors like q, k and v alone; also in a large batch."""
    for batch in (1, 8):
        short, long = (
            Size(batch, 12, 64, keys, 64, gradients=True, whole_rows=True) for keys in (8192, 16384)
        )
        more = peak_bytes("chunked", long) - peak_bytes("chunked", short)
        # copies of keys and values in rows, the sums of their gradients, and these
        assert 0 < more <= 6 * (long.k - short.k) + 2**26


@pytest.mark.parametrize("whole_rows", [False, True])
def test_elsewhere_more_is_taken_together(whole_rows):
    """Where kernel launches decide and not a cache: a training batch in one go, within gigabytes."""
    here, there = (
        Size(64, 12, 512, 512, 64, 2, True, whole_rows, device=device) for device in ("cpu", "cuda")
    )
    more = peak_bytes("chunked", there) - peak_bytes("chunked", here)
    assert 1 << 29 < more < 1 << 33


def test_every_implementation_has_a_formula():
    size = Size(2, 4, 100, 300, 16)
    for name in IMPLEMENTATIONS:
        assert (
            0 < peak_bytes(name, size) < peak_bytes(name, Size(2, 4, 100, 300, 16, gradients=True))
        )
    with pytest.raises(ValueError, match="no memory formula"):
        peak_bytes("dense", size)
