"""Methods without a golden of their authors: the formula once more, written out in float64."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_patches.positions import build
from megatron_patches.positions._slopes import alibi_slopes


@pytest.mark.parametrize("learn_loc", [False, True])
@pytest.mark.parametrize("heads", [4, 12])
def test_ggd_bam(heads, learn_loc):
    generator = torch.Generator().manual_seed(3)
    sizes = {"heads": heads, "head_dim": 8, "hidden_size": 8 * heads}
    method = build("ggd_bam", **sizes, learn_loc=learn_loc)
    draws = {
        "scale": torch.randn(heads, generator=generator),
        "shape": torch.rand(heads, generator=generator) * 2 - 0.5,  # negative ones, too
        "loc": torch.randn(heads, generator=generator) if learn_loc else torch.zeros(heads),
    }
    for key, parameter in method.named_parameters():
        parameter.data.copy_(draws[key].view(-1, 1, 1))
    assert len(list(method.parameters())) == 2 + learn_loc
    distances = [0, 1, 2, 3, 17, 511, 16383]
    for values in (
        method.table(16384)[:, distances],
        method.to_float64_().table(16384)[:, distances],
    ):
        for head in range(heads):
            scale, shape, loc = (float(draws[key][head]) for key in ("scale", "shape", "loc"))
            for value, d in zip(values[head].tolist(), distances, strict=True):
                away = abs(d + math.exp(loc) - math.exp(-loc)) + 1e-5
                expected = -math.exp(scale) * away**shape
                assert value == pytest.approx(
                    expected, rel=2e-4 if values.dtype == torch.float32 else 1e-9
                )


def test_ggd_bam_starts_as_alibi():
    ours = build("ggd_bam", heads=12, head_dim=8, hidden_size=96).table(2000)
    slopes = torch.tensor(alibi_slopes(12))
    torch.testing.assert_close(ours, -slopes[:, None] * (torch.arange(2000) + 1e-5))
    expected = build("alibi", heads=12, head_dim=8, hidden_size=96).table(2000)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "scale_base", "last"),
    [(torch.float32, 512, 32695), (torch.float16, 512, 3269), (torch.float32, 2048, 130782)],
)
def test_xpos_refuses_what_its_dtype_cannot_hold(dtype, scale_base, last):
    """80 (8 for float16) * scale_base / ln(1.4 / 0.4): the factor of a key is e^80 (e^8) there."""
    method = build("xpos", heads=1, head_dim=16, hidden_size=16, scale_base=scale_base)
    q = torch.ones(1, 1, 2, 16, dtype=dtype)
    positions = torch.tensor([last - 2, last - 1])
    turned = method.transform(q, q, positions, total_length=last)
    assert all(t.isfinite().all() for t in turned)
    with pytest.raises(ValueError, match=f"cannot read {last + 1} tokens: beyond {last}"):
        method.transform(q, q, positions + 1, total_length=last + 1)
    if dtype == torch.float32:
        method.can_read(last)
        with pytest.raises(ValueError, match="a larger scale_base reaches farther"):
            method.can_read(last + 1)


def test_fire_is_a_table_up_to_its_threshold_and_squeezed_beyond():
    method = build("fire", heads=3, head_dim=8, hidden_size=24, initial_length=20)
    rows = torch.arange(60)
    distance = (rows[:, None] - rows).clamp(min=0)
    bias, table = method.bias(distance, rows), method.table(60)
    torch.testing.assert_close(bias[:, :21], table[:, distance[:21]])
    assert not torch.allclose(bias[:, 40], table[:, distance[40]], atol=1e-3)
    # A row's share runs from 0 to 1: beyond the threshold the farthest key looks the same to all rows.
    torch.testing.assert_close(bias[:, 59, 0], bias[:, 21, 0], rtol=1e-4, atol=1e-5)
