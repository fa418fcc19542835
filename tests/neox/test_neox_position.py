"""A position method as GPT-NeoX's `rpe`: against its own formula in float64, gradients included."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from neox_tools import (
    ADDED,
    INSERTED,
    LEARNED,
    POSSIBLE,
    PRODUCT,
    gradients,
    leaf,
    make_args,
    make_method,
    overrides,
    random,
)
from safetensors.torch import load_file
from torch import Tensor

from megatron_patches import positions
from megatron_patches.attention.spread import spread
from megatron_patches.neox import position
from megatron_patches.positions import PositionMethod, method_class

GOLDENS = Path(__file__).resolve().parents[1] / "goldens" / "kernels" / "kernels.safetensors"
SHAPES = [(12, 12), (5, 12), (1, 12), (1, 1)]

pytestmark = pytest.mark.usefixtures("shared")


def exact(method: PositionMethod) -> PositionMethod:
    """The same method in float64, with parameters of its own."""
    return copy.deepcopy(method).to_float64_()


def distances(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """[queries, keys], 0 where the key is later, and where it is not; the queries are the last."""
    between = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return between.clamp(min=0), between >= 0


def assert_gradients(method: PositionMethod, reference: PositionMethod) -> None:
    ours, theirs = gradients(method), gradients(reference)
    assert ours.keys() == theirs.keys() == {name for name, _ in method.named_parameters()}
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(("queries", "keys"), SHAPES)
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_the_scores(name, queries, keys):
    method = make_method(name)
    reference = exact(method)
    distance, visible = distances(queries, keys)
    out = method(queries, keys)
    expected = reference.bias(distance)
    assert out.shape == (1, 4, queries, keys) and out.dtype == torch.float32
    torch.testing.assert_close(out[0, :, visible].double(), expected[:, visible], rtol=0, atol=1e-6)
    assert not out[0, :, ~visible].any()
    upstream = random(queries, keys, dtype=torch.float64) * visible
    if name in LEARNED:
        (out[0] * upstream).sum().backward()
        (expected * upstream).sum().backward()
    assert_gradients(method, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys"), SHAPES)
@pytest.mark.parametrize("name", PRODUCT)
def test_what_becomes_of_the_scores(name, queries, keys, dtype):
    method = make_method(name)
    reference = exact(method)
    distance, visible = distances(queries, keys)
    scores = leaf(random(2, 4, queries, keys, dtype=dtype))
    wide = leaf(scores.detach().double())
    out = position.ScoreHook(method)(scores)
    expected = wide * reference.weight(distance)
    if overrides(method_class(name), "bias"):
        expected = expected + reference.bias(distance)
    assert out.dtype == dtype
    # Half a step of bfloat16 at the size of these scores; nothing else is rounded.
    step = {"rtol": 2**-8, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(out[..., visible].double(), expected[..., visible], **step)
    assert torch.count_nonzero(out[..., ~visible]) == 0
    upstream = random(2, 4, queries, keys, seed=1, dtype=dtype).double() * visible
    (out * upstream.to(dtype)).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(scores.grad.double() * visible, wide.grad * visible, **step)
    assert_gradients(method, reference)
    assert torch.count_nonzero(method(queries, keys)) == 0  # nothing is added as well


@pytest.mark.parametrize("name", INSERTED)
def test_scores_in_bfloat16_are_rounded_once(name):
    """bfloat16 holds 257 as 256: the distance, and what is made of it, must not be rounded first."""
    method, length = make_method(name), 512
    distance, _ = distances(1, length)
    reference = exact(method)
    if name in PRODUCT:
        expected = reference.weight(distance)
        if overrides(method_class(name), "bias"):
            expected = expected + reference.bias(distance)
        found = position.ScoreHook(method)(torch.ones(1, 4, 1, length, dtype=torch.bfloat16))[0]
    else:
        expected = reference.bias(distance)
        scores = torch.zeros(1, 4, 1, length, dtype=torch.bfloat16)
        scores += method(1, length)  # as NeoX does it
        found = scores[0]
    assert found.dtype == torch.bfloat16
    # Where float32 and float64 fall on two sides of a tie, one step apart.
    assert (found == expected.bfloat16()).double().mean() > 0.99
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("name", POSSIBLE)
def test_which_hooks_make_a_method_act_on_scores(name):
    acts = overrides(method_class(name), "bias", "weight", "score", "decay")
    assert position.acts_on_scores(method_class(name)) == acts


def test_a_method_of_tier_positional_is_asked_with_its_query_positions():
    class Positional(PositionMethod):
        tier, name = "positional", "positional"

        def bias(self, distance, query_position=None):
            assert query_position is not None
            value = -0.5 * distance * (1 + query_position[:, None])
            return value.float().expand(self.owned_heads, *distance.shape)

    geometry = positions.Geometry(heads=2, head_dim=4, hidden_size=8)
    out = position.dense_bias(Positional(geometry), 2, 4)
    assert torch.equal(out[1], torch.tensor([[-3.0, -1.5, 0, 0], [-6.0, -4.0, -2.0, 0]]))


@pytest.mark.parametrize("name", sorted(set(POSSIBLE) - set(INSERTED)))
def test_nothing_to_add(name):
    method = positions.build(name, heads=2, head_dim=4, hidden_size=8, max_length=8)
    if method.table(4) is None:
        with pytest.raises(ValueError, match=f"{name} has no bias"):
            position.dense_bias(method, 2, 4)


# ---- options and construction --------------------------------------------------------------------


@pytest.mark.parametrize("name", INSERTED)
def test_as_published_takes_the_models_dtype(name):
    if "as_published" not in method_class(name).precisions:
        with pytest.raises(ValueError, match=f"{name} has no precision"):
            make_method(name, position_precision="as_published", precision="bfloat16")
        return
    method = make_method(name, position_precision="as_published", precision="bfloat16")
    assert method.published_dtype == torch.bfloat16
    assert make_method(name, precision="bfloat16").published_dtype is None


def test_options_from_the_arguments():
    name = next(n for n in INSERTED if "init" in positions.options(n))
    written = make_method(name, position_init="alibi")
    same = make_method(name, position_options={"init": "alibi"})
    published = make_method(name)
    for key, value in published.state_dict().items():
        assert torch.equal(written.state_dict()[key], same.state_dict()[key])
        assert not torch.equal(written.state_dict()[key], value)
    with pytest.raises(ValueError, match=f"{name} has no option 'initt'; it has .*init"):
        make_method(name, position_options={"initt": "alibi"})


def test_neoxs_own_keys_reach_the_method():
    name = next(n for n in INSERTED if "rpe_num_buckets" in positions.options(n))
    args = make_args(pos_emb=name, rpe_num_buckets=8, rpe_max_distance=20)
    method = position.make(args, name)
    assert method.settings()["options"]["rpe_num_buckets"] == 8
    assert {parameter.shape[0] for parameter in method.parameters()} == {8}


def test_each_layers_seed_is_its_own():
    name = PRODUCT[0]
    args = make_args(pos_emb=name)
    first, again, second = (position.make(args, name, layer) for layer in (0, 0, 1))
    for key in first.state_dict():
        assert torch.equal(first.state_dict()[key], again.state_dict()[key])
        assert not torch.equal(first.state_dict()[key], second.state_dict()[key])


# ---- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INSERTED)
def test_float32_is_restored_after_a_cast_past_the_module(name):
    method = make_method(name, precision="bfloat16")
    before = {key: p.detach().clone() for key, p in method.named_parameters()}
    for parameter in method.parameters():
        parameter.data = parameter.data.bfloat16()  # as DeepSpeed does it
    method.set_deepspeed_parallelism(None)
    for key, parameter in method.named_parameters():
        assert torch.equal(parameter, before[key]) and parameter.dtype == torch.float32
    for parameter in method.parameters():
        parameter.data = parameter.data + 1  # a later call must not undo training
    method.set_deepspeed_parallelism()
    assert all(torch.equal(p, before[key] + 1) for key, p in method.named_parameters())


# ---- other people's numbers ----------------------------------------------------------------------

SPELLINGS = ["kerple_log", *sorted(positions.aliases())]


@pytest.mark.parametrize("heads", [12, 5])
@pytest.mark.parametrize("name", SPELLINGS)
def test_the_authors_classes(name, heads):
    golden = load_file(GOLDENS)
    prefix = f"{name}.h{heads}.float32."
    method = make_method(name, num_attention_heads=heads, hidden_size=8 * heads)
    for key, parameter in method.named_parameters():
        parameter.data.copy_(golden[f"{prefix}param.{key}"])
    rows = golden["rows"]
    visible = rows[:, None] >= torch.arange(48)
    scores = torch.zeros(1, heads, 48, 48)
    scores[0, :, rows] = golden[prefix + "x"]
    for x, y, seen in (
        (scores, golden[prefix + "y"], visible),
        (golden[prefix + "x_decode"][None, :, None], golden[prefix + "y_decode"][:, None], ...),
    ):
        if positions.resolve(name) in PRODUCT:
            found = position.ScoreHook(method)(x)[0]
        else:
            found = (x + method(*x.shape[-2:]))[0]
        found = found[:, rows] if seen is visible else found
        torch.testing.assert_close(found[:, seen], y[:, seen], rtol=1e-5, atol=1e-6)


# ---- spread --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "length"), [(1, 1), (1, 5), (3, 5), (5, 5)])
def test_spread(queries, length):
    table = leaf(random(2, length, dtype=torch.float64))
    out = spread(table, queries)
    assert out.shape == (2, queries, length)
    for i in range(queries):
        for j in range(length):
            d = length - queries + i - j
            expected = table[:, d] if d >= 0 else torch.zeros(2, dtype=torch.float64)
            assert torch.equal(out[:, i, j], expected)
    assert torch.autograd.gradcheck(lambda t: spread(t, queries), (table,))


@pytest.mark.parametrize("queries", [0, -1, 6])
def test_spread_refuses(queries):
    with pytest.raises(ValueError, match=f"{queries} queries but a table of 5 distances"):
        spread(torch.zeros(2, 5), queries)
