"""Randomised positions: the authors' numbers at their draws, and draws that follow seed and step alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_patches.attention import attend
from megatron_patches.positions import PositionMethod, build, names
from megatron_patches.positions._randomised import Randomised

GOLDENS = Path(__file__).parents[1] / "goldens"
NAMES = [name for name in names() if name.startswith("randomised_")]


def make(name: str, heads: int = 4, head_dim: int = 16, **options: Any) -> Randomised:
    sizes = {"heads": heads, "head_dim": head_dim, "hidden_size": heads * head_dim}
    method = build(name, **sizes, **{"span": 2048, **options})
    assert isinstance(method, Randomised)
    return method


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    inputs = load_file(GOLDENS / "rivals" / "inputs.safetensors")
    return {**load_file(GOLDENS / "randomised.safetensors"), **inputs}


def drawing(method: Randomised, numbers: torch.Tensor) -> PositionMethod:
    """The method with a draw of the golden's."""
    method.take = lambda among, count: numbers[:count]
    return method.to_float64_()


# ---- the authors' code -----------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("heads", [4, 12])
def test_rotary(golden, heads, impl):
    method = drawing(make("randomised_rotary", heads), golden["positions"])
    q, k, v = (golden[f"h{heads}.{key}"].double() for key in "qkv")
    # They turn neighbouring channels, we turn halves.
    halves = [*range(0, 16, 2), *range(1, 16, 2)]
    out = attend(q[..., halves], k[..., halves], v, method, impl=impl)
    expected = golden[f"h{heads}.rotary.out"].double()
    assert (out - expected).abs().max() < 2e-5 * expected.abs().max()
    if heads == 4:
        turned = method.transform(q[..., halves], k[..., halves], torch.arange(48), total_length=48)
        for found, key in zip(turned, "qk", strict=True):
            expected = golden[f"h4.rotary.{key}"][..., halves].double()
            assert (found - expected).abs().max() < 3e-5 * expected.abs().max()


def test_sinusoidal(golden):
    method = drawing(make("randomised_sinusoidal"), golden["positions"])
    rows = method.embed(torch.zeros(2, 48, 64, dtype=torch.float64), torch.arange(48))
    expected = golden["sinusoidal_rows_hidden64"].double()
    assert (rows - expected).abs().max() < 3e-5  # their angles are float32 products up to 2035


@pytest.mark.parametrize("heads", [4, 12])
def test_alibi(golden, heads):
    distances = golden["alibi_sampled_distances"]
    method = drawing(make("randomised_alibi", heads), distances[1:] - 1)
    slopes = method.slopes[:, None]
    expected = golden[f"alibi_table_h{heads}"].double() - 0.5 * slopes * (distances > 0)
    assert (method.table(48) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_kerple_log_is_the_kernel_at_the_drawn_distances():
    plain, method = (
        build("kerple_log", heads=4, head_dim=16, hidden_size=64, seed=3),
        make("randomised_kerple_log", seed=3),
    )
    distances = method.stretch(50)
    assert torch.equal(method.table(50), plain.table(2048)[:, distances])


def test_learned_has_a_row_for_every_place():
    method = make("randomised_learned", max_length=32)
    assert method.get_parameter("weight").shape == (2048, 64)
    method.eval()
    rows = method.embed(torch.zeros(1, 300, 64), torch.arange(300))
    assert torch.equal(rows[0], method.get_parameter("weight")[method.take(2048, 300)])


# ---- the draws -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_draws_rise_and_stay_in_their_range(name):
    method = make(name)
    for among, count in ((2048, 300), (300, 300), (2048, 1), (2048, 0)):
        drawn = method.take(among, count)
        assert drawn.shape == (count,) and drawn.dtype == torch.int64
        assert bool((drawn.diff() > 0).all()) and (count == 0 or 0 <= drawn[0] <= drawn[-1] < among)
    assert method.take(300, 300).tolist() == list(range(300))


def test_every_place_is_as_likely():
    method, counts = make("randomised_rotary", span=20), torch.zeros(20)
    for _ in range(2000):
        method.step += 1
        counts[method.take(20, 5)] += 1
    assert counts.sum() == 10000
    # 500 each, with a standard deviation of 19.4.
    assert (counts - 500).abs().max() < 80 and (counts - 500).square().mean() < 2 * 375


@pytest.mark.parametrize("name", NAMES)
def test_draws_follow_seed_and_step_alone(name):
    state = torch.get_rng_state()
    method, again, other = make(name, seed=1), make(name, seed=1), make(name, seed=2)
    seen = []
    for _ in range(3):
        drawn = method.take(2048, 40)
        assert torch.equal(drawn, method.take(2048, 40))  # also in a layer that is computed twice
        assert torch.equal(drawn, again.take(2048, 40))
        assert not torch.equal(drawn, other.take(2048, 40))
        seen.append(drawn)
        for each in (method, again, other):
            each.step += 1
    assert len({tuple(drawn.tolist()) for drawn in seen}) == 3
    resumed = make(name, seed=1)
    resumed.step = 2
    assert torch.equal(resumed.take(2048, 40), seen[2])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", NAMES)
def test_reading_has_a_draw_of_its_own(name):
    method, other = make(name).eval(), make(name, draw=1).eval()
    first = method.take(2048, 40)
    method.step += 1
    assert torch.equal(method.take(2048, 40), first)
    assert not torch.equal(other.take(2048, 40), first)
    assert not torch.equal(method.train().take(2048, 40), first)
    assert other.settings()["options"]["draw"] == 1 and "draw" in method.evaluation_options


# ---- a text in pieces ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_planned_length_fixes_all_places(name):
    method = make(name, head_dim=4).eval()
    method.planned_length = 30
    q, k, v = torch.randn(3, 1, 4, 30, 4).unbind(0)
    x = torch.randn(1, 30, 16)
    whole, embedded = attend(q, k, v, method), method.embed(x, torch.arange(30))
    for start, end in ((0, 7), (7, 8), (8, 30)):
        part = attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end], method)
        torch.testing.assert_close(part, whole[:, :, start:end], rtol=1e-5, atol=1e-6)
        piece = method.embed(x[:, start:end], torch.arange(start, end))
        assert torch.equal(piece, embedded[:, start:end])
    with pytest.raises(ValueError, match=f"{name}: 31 tokens of a text that was planned with 30"):
        method.of_text(31)


@pytest.mark.parametrize("name", ["randomised_learned", "randomised_sinusoidal"])
def test_a_piece_without_a_plan_is_refused(name):
    method = make(name)
    with pytest.raises(ValueError, match=f"{name}: a text that is read piece by piece needs"):
        method.embed(torch.zeros(1, 1, 64), torch.tensor([5]))


def test_rotary_needs_the_length():
    q = torch.zeros(1, 4, 3, 16)
    with pytest.raises(ValueError, match="randomised_rotary needs the length of the whole text"):
        make("randomised_rotary").transform(q, q, torch.arange(3))


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("name", ["randomised_rotary", "randomised_alibi", "randomised_kerple_log"])
def test_padding_on_the_left_changes_nothing_in_a_planned_text(name, impl):
    method = make(name, head_dim=4).eval()
    method.planned_length = 40
    q, k, v = torch.randn(3, 2, 4, 30, 4).unbind(0)
    padding = torch.zeros(2, 30, dtype=torch.bool)
    padding[1, :11] = True
    both = attend(q, k, v, method, impl=impl, key_padding_mask=padding)
    alone = attend(q[1:, :, 11:], k[1:, :, 11:], v[1:, :, 11:], method, impl=impl)
    torch.testing.assert_close(both[1:, :, 11:], alone, rtol=1e-5, atol=1e-6)


def test_rows_of_their_own_lengths_have_their_own_places():
    method = make("randomised_sinusoidal").eval()
    x = torch.zeros(3, 6, 64)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 2, 3], [0, 0, 0, 0, 0, 0]])
    rows = method.embed(x, positions)
    for row, length in zip(rows, (6, 4, 1), strict=True):
        alone = method.embed(x[:1, :length], torch.arange(length))[0]
        assert torch.equal(row[-length:], alone)


@pytest.mark.parametrize(("key", "value"), [("span", 0), ("span", 2.5), ("draw", -1)])
def test_options_are_checked(key, value):
    with pytest.raises(ValueError, match=f"randomised_rotary: {key}={value} must be an integer"):
        make("randomised_rotary", **{key: value})
    with pytest.raises(ValueError, match="cannot read 2049 tokens"):
        make("randomised_alibi").table(2049)
