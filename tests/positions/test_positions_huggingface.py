"""Against the implementations in Hugging Face transformers."""

from __future__ import annotations

import pytest
import torch

from megatron_patches.positions import build

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (64, 256), (20, 100)])
def test_t5_buckets(buckets, farthest):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    method = build(
        "rpe",
        heads=2,
        head_dim=8,
        hidden_size=16,
        rpe_num_buckets=buckets,
        rpe_max_distance=farthest,
    )
    distance = torch.arange(16384)
    expected = t5.T5Attention._relative_position_bucket(
        -distance, bidirectional=False, num_buckets=buckets, max_distance=farthest
    )
    assert torch.equal(method.bucket(distance), expected)
    assert torch.equal(method.bucket(distance.float()), expected)
    assert expected.unique().numel() == buckets


@pytest.mark.parametrize(
    ("buckets", "farthest", "distance", "wanted"), [(128, 100, 80, 96), (256, 200, 160, 192)]
)
def test_t5_buckets_where_the_logarithm_is_a_whole_number(buckets, farthest, distance, wanted):
    """64 log(80 / 64) / log(100 / 64) = 32, for 1.25^2 = 100 / 64: GPT-NeoX has bucket 64 + 32."""
    modeling = pytest.importorskip("megatron_patches.hf.modeling_gpt_positions")
    shape = {"rpe_num_buckets": buckets, "rpe_max_distance": farthest}
    method = build("rpe", heads=2, head_dim=8, hidden_size=16, **shape)
    config = modeling.GPTPositionsConfig(
        position="rpe", num_attention_heads=2, hidden_size=16, **shape
    )
    theirs = modeling.Position(config)
    assert method.bucket(torch.tensor([distance])).tolist() == [wanted]
    assert torch.equal(theirs._bucket(torch.arange(999)), method.bucket(torch.arange(999)))


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 16, 25, 40])
def test_alibi_slopes_of_bloom_and_mpt(heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    slopes = build("alibi", heads=heads, head_dim=8, hidden_size=8 * heads).slopes
    bloom_bias = bloom.build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)
    torch.testing.assert_close(slopes, bloom_bias[:, 0, 1])
    mpt_bias = mpt.build_mpt_alibi_tensor(heads, 5)
    torch.testing.assert_close(-slopes, mpt_bias[:, 0, -2])
