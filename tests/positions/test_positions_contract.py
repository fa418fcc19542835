"""What every method keeps, whichever it is; a new file in `positions/` is picked up by itself."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from torch import Tensor

from megatron_patches.positions import PositionMethod, build, names

EVERY_KEY = {
    "alibi": {"slopes": [12]},
    "kerple_gauss2": {"bias_p": [12, 1, 1], "bias_a": [12, 1, 1]},
    "kerple_gauss3": {"bias_p": [12, 1, 1], "bias_a": [12, 1, 1], "bias_e": [12, 1, 1]},
    "kerple_log": {"bias_p": [12, 1, 1], "bias_a": [12, 1, 1]},
    "kerple_log3": {"bias_p": [12, 1, 1], "bias_a": [12, 1, 1], "bias_e": [12, 1, 1]},
    "kerple_power": {"bias_p": [12, 1, 1], "bias_a": [12, 1, 1]},
    "kerple_power_weight": {key: [12, 1, 1] for key in ("bias_p", "bias_a", "wei_p", "wei_a")},
    "kerple_weight": {"wei_p": [12, 1, 1], "wei_a": [12, 1, 1]},
    "kerple_weight1": {"wei_a": [12, 1, 1]},
    "learned": {"weight": [64, 96]},
    "none": {},
    "rotary": {},
    "rpe": {"weight": [32, 12]},
    "sinusoidal": {"inv_freq": [48]},
}
KERPLE = [name for name in EVERY_KEY if name.startswith("kerple_")]
DRAWN = [*KERPLE, "rpe", "learned"]  # all of their start values are random


def make(name: str, heads: int = 12, **options: object) -> PositionMethod:
    return build(name, heads=heads, head_dim=8, hidden_size=8 * heads, max_length=64, **options)


def outputs(method: PositionMethod, distance: Tensor) -> list[Tensor]:
    return [t for t in (method.bias(distance), method.weight(distance)) if t is not None]


@pytest.mark.parametrize("name", EVERY_KEY)
def test_saved_keys_are_frozen(name):
    state = make(name).state_dict()
    assert {key: list(value.shape) for key, value in state.items()} == EVERY_KEY[name]
    assert all(value.dtype == torch.float32 for value in state.values())


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("heads", range(1, 18))
def test_any_number_of_heads(name, heads):
    method = make(name, heads)
    for distance in (torch.tensor(3), torch.arange(20), torch.arange(20.0).view(4, 5)):
        for values in outputs(method, distance):
            assert values.shape == (heads, *distance.shape)
            assert values.dtype == torch.float32
            assert values.isfinite().all()
    x = torch.randn(2, 5, 8 * heads)
    assert method.embed(x, torch.arange(5)).shape == x.shape
    q = torch.randn(2, heads, 5, 8)
    turned = method.transform(q, q, torch.arange(5), total_length=5)
    assert all(t.shape == q.shape for t in turned)


@pytest.mark.parametrize("name", names())
def test_head_ranges_concatenate_to_the_whole(name):
    whole = make(name, seed=5)
    if whole.mixes_heads:
        with pytest.raises(ValueError, match=f"{name} mixes the scores of all 12 heads.*5 of them"):
            make(name, head_range=(0, 5))
        make(name, head_range=(0, 12))
        return
    parts = [make(name, seed=5, head_range=r) for r in ((0, 5), (5, 4), (9, 3))]
    assert set(whole.head_dim_of) == set(whole.state_dict())
    for key, value in whole.state_dict().items():
        shards = [part.state_dict()[key] for part in parts]
        dim = whole.head_dim_of[key]
        if dim is None:
            assert all(torch.equal(shard, value) for shard in shards)
        else:
            assert torch.equal(torch.cat(shards, dim), value)
    distance = torch.arange(30)
    pieces = zip(*(outputs(part, distance) for part in parts), strict=True)
    for values, shards in zip(outputs(whole, distance), pieces, strict=True):
        torch.testing.assert_close(torch.cat(shards), values)
    assert all(part.settings() == whole.settings() for part in parts)


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in names()), ("none", {"temperature": "heads"})],
)
def test_start_values_come_from_the_seed_alone(name, options):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = make(name, seed=3, **options)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = make(name, seed=3, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    other = make(name, seed=4, **options)
    for key, value in first.state_dict().items():
        assert value.dtype == again.state_dict()[key].dtype == torch.float32
        assert torch.equal(value, again.state_dict()[key])
    if name in DRAWN:
        for (_, a), (_, b) in zip(first.named_parameters(), other.named_parameters(), strict=True):
            assert not torch.equal(a, b)


@pytest.mark.parametrize("name", names())
def test_lengths_in_any_order(name):
    method = make(name)
    keys = {key: value.shape for key, value in method.state_dict().items()}
    for length in (512, 16384, 512, 1000, 1):
        for ours, fresh in (
            (method.table(length), make(name).table(length)),
            (method.weight_table(length), make(name).weight_table(length)),
        ):
            assert (ours is None) == (fresh is None)
            if ours is not None:
                assert ours.shape == (12, length) and ours.is_contiguous()
                assert ours.isfinite().all() and torch.equal(ours, fresh)
    assert {key: value.shape for key, value in method.state_dict().items()} == keys


@pytest.mark.parametrize("name", names())
def test_matrix_equals_gathered_table(name):
    method = make(name)
    distance = (torch.arange(9)[:, None] - torch.arange(9)).clamp(min=0)
    for values, table in zip(
        outputs(method, distance), outputs(method, torch.arange(9)), strict=True
    ):
        torch.testing.assert_close(values, table[:, distance])


CONTENT = [name for name in names() if make(name).rewrites_scores]


@pytest.mark.parametrize("name", CONTENT)
def test_gradients_of_rewritten_scores(name):
    """Of scores, queries and every number, filled where they start at zero."""
    method, rows = make(name, 3).to_float64_(), torch.arange(5)
    generator = torch.Generator().manual_seed(0)
    scores, query, *filled = (
        torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 3, 5, 5), (2, 3, 5, 8), *(p.shape for p in method.parameters()))
    )
    for parameter, values in zip(method.parameters(), filled, strict=True):
        parameter.data = values.detach().abs() * 0.5 + 0.1
    distance = rows[:, None] - rows

    def rewritten(scores: Tensor, query: Tensor, *_: Tensor) -> Tensor:
        new = method.score(
            scores, distance.clamp(min=0), rows, query_BHQD=query, visible_QK=distance >= 0
        )
        assert new.dtype == torch.float64 and new.shape == scores.shape
        return new.masked_fill(distance < 0, 0.0)

    assert torch.autograd.gradcheck(rewritten, (scores, query, *method.parameters()))


@pytest.mark.parametrize("name", sorted(set(names()) - set(CONTENT)))
def test_gradients_are_right_and_finite(name):
    method = make(name, 3).to_float64_()
    parameters = [p for key, p in method.named_parameters() if method.head_dim_of[key] is not None]
    distance = torch.tensor([0, 1, 2, 7, 40])
    if not parameters:
        assert all(not values.requires_grad for values in outputs(method, distance))
        return

    def everything(method, distance, dtype):
        hidden = torch.arange(2 * 5 * method.geometry.hidden_size, dtype=dtype).sin()
        gates = method.decay(hidden.view(2, 5, -1)) or ()
        return [*outputs(method, distance), *(values for values in gates if values is not None)]

    for values in everything(method, distance, torch.float64):
        assert values.dtype == torch.float64
    assert torch.autograd.gradcheck(
        lambda *_: tuple(everything(method, distance, torch.float64)), parameters
    )
    single = make(name, 3)
    far = everything(single, torch.tensor([0, 16383]), torch.float32)
    sum(values.sum() for values in far).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in single.parameters())


@pytest.mark.parametrize("name", names())
def test_no_parameter_is_a_scalar(name):
    """DeepSpeed cannot send a tensor without dimensions to the other ranks."""
    assert all(parameter.dim() > 0 for parameter in make(name).parameters())


@pytest.mark.parametrize("name", names())
def test_settings_are_plain_data(name):
    settings = make(name).settings()
    assert json.loads(json.dumps(settings)) == settings
    assert settings["name"] == name
    assert (settings["heads"], settings["head_dim"]) == (12, 8)
    assert settings["options"]["precision"] == "exact"


def test_settings_tell_what_changes_the_function():
    assert make("alibi").settings()["options"]["slopes"] == "authors"
    rounded = make("kerple_log", precision="as_published", model_dtype=torch.bfloat16)
    assert rounded.settings()["options"]["model_dtype"] == "bfloat16"
    assert rounded.settings() != make("kerple_log").settings()
    assert make("rotary", rotary_pct=0.5).settings()["options"]["rotary_pct"] == 0.5
    assert make("rpe", rpe_num_buckets=16).settings() != make("rpe").settings()


def test_statistics():
    method = make("kerple_log")
    method.bias_p.data.copy_(torch.linspace(-1, 10, 12).view(12, 1, 1))
    found = method.statistics()
    kinds = ("mean", "std", "min", "max")
    assert set(found) == {f"{key}_{kind}" for key in ("bias_p", "bias_a") for kind in kinds}
    legal = torch.linspace(-1, 10, 12).double().clamp(min=0.01)
    for kind, value in zip(
        kinds, (legal.mean(), legal.std(), legal.min(), legal.max()), strict=True
    ):
        assert found[f"bias_p_{kind}"] == pytest.approx(value.item())
    assert make("kerple_log", 1).statistics()["bias_p_std"] == 0.0
    for silent in ("alibi", "none", "rotary", "sinusoidal", "learned"):
        assert make(silent).statistics() == {}
    assert "weight_mean" in make("rpe").statistics()


@pytest.mark.parametrize("name", names())
def test_only_tables_of_positions_have_an_end(name):
    method = make(name)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"{name} cannot read {wrong} tokens"):
            method.can_read(wrong)
    method.can_read(64)
    end = method.max_length
    if end is None:
        method.can_read(16384)
        x = torch.zeros(1, 256, 96)
        assert method.embed(x, torch.arange(256)).isfinite().all()
    else:
        method.can_read(end)
        told = f"{name} cannot read {end + 1} tokens: .*(max_length|span)={end}"
        with pytest.raises(ValueError, match=told):
            method.can_read(end + 1)


def test_learned_refuses_positions_beyond_its_table():
    method = make("learned")
    assert method.max_length == 64
    x = torch.zeros(1, 1, 96)
    torch.testing.assert_close(
        method(x, torch.tensor([63]))[0], method.get_parameter("weight")[63:]
    )
    with pytest.raises(ValueError, match="learned cannot read 65 tokens"):
        method.embed(x, torch.tensor([64]))
    with pytest.raises(ValueError, match="learned cannot read 100 tokens"):
        method.embed(torch.zeros(1, 100, 96), torch.arange(100))
    with pytest.raises(ValueError, match="learned cannot read 100 tokens"):  # nothing to read back
        method.to("meta").embed(
            torch.zeros(1, 100, 96, device="meta"), torch.arange(100, device="meta")
        )


@pytest.mark.parametrize("name", names())
def test_forward_is_embed(name):
    method, x, seen = make(name), torch.randn(2, 6, 96), []
    method.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(method(x, torch.arange(6)), method.embed(x, torch.arange(6)))
    assert seen == [1]
    method.planned_length = 20
    moved = method.embed(x, torch.arange(6) + 9)
    assert torch.equal(moved, method.embed(x, torch.arange(6))) == (method.place == "attention")


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_positions_of_each_sequence(name):
    method, x = make(name), torch.randn(2, 3, 96)
    positions = torch.tensor([[0, 1, 2], [7, 8, 9]])
    both = method.embed(x, positions)
    for row in range(2):
        assert torch.equal(both[row], method.embed(x[row : row + 1], positions[row])[0])


@pytest.mark.parametrize("pct", [1.0, 0.5, 0.25])
def test_rotary_scores_see_differences_only(pct):
    method = make("rotary", rotary_pct=pct).to_float64_()
    q, k = torch.randn(2, 12, 6, 8).double(), torch.randn(2, 12, 6, 8).double()
    scores = []
    for offset in (0, 1000):
        turned_q, turned_k = method.transform(q, k, torch.arange(6) + offset)
        scores.append(turned_q @ turned_k.mT)
        rotated = int(8 * pct)
        assert torch.equal(turned_q[..., rotated:], q[..., rotated:])
        assert not torch.allclose(turned_q[:, :, 1:, :rotated], q[:, :, 1:, :rotated])
    torch.testing.assert_close(scores[0], scores[1])
    assert not torch.allclose(scores[0], q @ k.mT)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 9]])
    both, _ = method.transform(q, k, positions)
    one, _ = method.transform(q[1:], k[1:], positions[1])
    assert torch.equal(both[1:], one)


@pytest.mark.parametrize("name", names())
def test_copies_and_reloads(name):
    method, other = make(name, seed=1), make(name, seed=2)
    other.load_state_dict(method.state_dict(), strict=True)
    for twin in (other, copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        assert twin.state_dict().keys() == method.state_dict().keys()
        for key, value in method.state_dict().items():
            assert torch.equal(twin.state_dict()[key], value)
        for a, b in zip(
            outputs(twin, torch.arange(9)), outputs(method, torch.arange(9)), strict=True
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", names())
def test_metadata(name):
    method = make(name)
    assert method.tier in ("table", "positional", "content")
    assert method.place in ("attention", "embedding")
    assert method.cache in ("transformed", "raw") and method.sharing in ("model", "layer")
    if method.tier != "content":
        scores, one = torch.zeros(1, 12, 2, 2), torch.zeros(2, 2)
        with pytest.raises(NotImplementedError, match=name):
            method.score(scores, one, one[0], query_BHQD=scores, visible_QK=one == 0)
    homes = {
        "alibi": "alibi_embed",
        "learned": "position_embeddings",
        "none": "position",
        "rotary": "rotary_emb",
        "sinusoidal": "position_embeddings",
    } | dict.fromkeys(["rpe", *KERPLE], "rpe")
    assert method.module_name == homes.get(name, method.module_name)


@pytest.mark.parametrize("name", EVERY_KEY)
def test_built_without_memory_and_loaded(name):
    """What the state dict leaves out does not depend on memory that `to_empty` leaves as it was."""
    built = make(name)
    with torch.device("meta"):
        empty = make(name)
    empty.to_empty(device="cpu")
    for tensor in [*empty.parameters(), *empty.buffers()]:
        tensor.data.fill_(float("nan"))
    empty.load_state_dict(built.state_dict(), strict=True)
    mine, theirs = outputs(empty, torch.arange(9)), outputs(built, torch.arange(9))
    assert len(mine) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    q, k = torch.randn(2, 1, 12, 9, 8).unbind(0)
    for a, b in zip(
        empty.transform(q, k, torch.arange(9), total_length=9),
        built.transform(q, k, torch.arange(9), total_length=9),
        strict=True,
    ):
        assert torch.equal(a, b)
    x = torch.randn(1, 9, 96)
    assert torch.equal(empty.embed(x, torch.arange(9)), built.embed(x, torch.arange(9)))
