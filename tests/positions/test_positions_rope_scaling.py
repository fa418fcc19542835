"""Scalings of rotary frequencies: others' numbers, formulas by hand, and what must not depend on history."""

from __future__ import annotations

import json
import math

import pytest
import torch
from test_positions_rivals import read

from megatron_patches.attention import attend
from megatron_patches.positions import build

STATIC = {"linear": {"factor": 8}, "ntk": {"factor": 8}, "yarn": {"factor": 8}}
DYNAMIC = {"dynamic_linear": {}, "dynamic_ntk": {"factor": 2}, "dynamic_yarn": {}}
LENGTHS = (256, 512, 513, 1000, 16384)


def make(scaling="none", head_dim=16, max_length=512, **options):
    sizes = {"heads": 2, "head_dim": head_dim, "hidden_size": 2 * head_dim}
    return build("rotary", **sizes, max_length=max_length, scaling=scaling, **options)


def frequencies(method, length=None, dtype=torch.float64):
    """Radians a position, and the factor on cosines and sines."""
    like = torch.zeros(1, dtype=dtype)
    given = None if length is None else torch.tensor(float(length), dtype=dtype)
    spacing, amplitude = method.scaling.spacing(given, like)
    return 1 / spacing, float(amplitude)


def close(ours, theirs, tolerance):
    error = ((ours.double() - theirs.double()).abs() / theirs.double().abs()).max()
    assert ours.shape == theirs.shape and error <= tolerance, float(error)


# ---- others' numbers ----------------------------------------------------------------------------


METADATA, TENSORS = read("rotary")
CASES = {name: case for name, case in json.loads(METADATA["cases"]).items() if "amplitude" in case}


@pytest.mark.parametrize("name", CASES)
def test_frequencies_of_the_goldens(name):
    case, theirs = CASES[name], TENSORS[f"{name}/inv_freq"]
    method = make(head_dim=case["head_dim"], max_length=None, **case["options"])
    for dtype in (torch.float64, torch.float32):
        ours, amplitude = frequencies(method, case.get("total_length"), dtype)
        close(ours, theirs, 2e-6)
        assert amplitude == pytest.approx(case["amplitude"], abs=1e-6)


THEIRS = {
    "linear": ("linear", {}),
    "yarn": ("yarn", {"original_max_position_embeddings": 512}),
    "dynamic_ntk": ("dynamic", {}),
}


@pytest.mark.parametrize("head_dim", [8, 16, 64, 80, 128])
@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 8.0, 32.0])
@pytest.mark.parametrize("scaling", THEIRS)
@pytest.mark.parametrize(("base", "share"), [(10000, 1.0), (500, 0.5)])
def test_frequencies_of_transformers(scaling, factor, head_dim, base, share):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, more = THEIRS[scaling]
    rope = {"rope_type": kind, "factor": factor, "rope_theta": float(base), **more}
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters={**rope, "partial_rotary_factor": share},
    )
    method = make(scaling, head_dim, factor=factor, rotary_pct=share, rotary_emb_base=base)
    for length in LENGTHS if scaling == "dynamic_ntk" else (512,):
        theirs, amplitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
        ours, ours_amplitude = frequencies(method, length)
        close(ours, theirs, 2e-6)
        assert ours_amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"truncate": False}, {"truncate": False}),
        ({"beta_fast": 20.5, "beta_slow": 2}, {"beta_fast": 20.5, "beta_slow": 2}),
        ({"attention_factor": 1.3}, {"attention_factor": 1.3}),
        ({"original_length": 2048}, {"original_max_position_embeddings": 2048}),
    ],
    ids=str,
)
def test_yarns_further_options(ours, theirs):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **theirs}
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters={**rope, "rope_theta": 10000.0},
    )
    wanted, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    found, own = frequencies(make("yarn", 64, factor=4, **ours))
    close(found, wanted, 2e-6)
    assert own == pytest.approx(amplitude)
    plain, plain_amplitude = frequencies(make("yarn", 64, factor=4))
    assert not torch.equal(found, plain) or own != plain_amplitude


def test_frequencies_by_hand():
    """R = 4, base 100: pairs of 1 and 1/10 radians a position; trained on 512, read at 2048: t = 4."""
    sizes = {"head_dim": 4, "rotary_emb_base": 100}
    for scaling, options, wanted in (
        ("linear", {"factor": 5}, [1 / 5, 1 / 50]),
        ("dynamic_linear", {}, [1 / 4, 1 / 40]),
        ("ntk", {"factor": 5}, [1, 1 / (10 * 5)]),  # the exponent 4 / 2 of the base, of which 2 / 4
        ("dynamic_ntk", {}, [1, 1 / (10 * 4)]),
        ("dynamic_ntk", {"factor": 3}, [1, 1 / (10 * (3 * 4 - 2))]),
        # 512 / 64 pi turns = 2.5, 512 / 2 pi = 81: pairs 4 ln(2.5) / 2 ln 100 = 0.4 to 1.9: a step at 1.
        ("dynamic_yarn", {"truncate": False}, None),
    ):
        found, amplitude = frequencies(make(scaling, **sizes, **options), 2048)
        if wanted is None:
            low, high = (
                4 * math.log(512 / (2 * math.pi * b)) / (2 * math.log(100)) for b in (32, 1)
            )
            assert 0 < low < 1 < high < 2
            share = (1 - low) / (high - low)
            wanted = [1, (1 - share) / 10 + share / 40]
            assert amplitude == pytest.approx(0.1 * math.log(4) + 1)
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))


def test_dynamic_yarn_is_yarn_of_its_stretch():
    for length in (513, 1024, 5000):
        dynamic = frequencies(make("dynamic_yarn", 64), length)
        static = frequencies(make("yarn", 64, factor=length / 512))
        torch.testing.assert_close(dynamic[0], static[0], rtol=1e-12, atol=0)
        assert dynamic[1] == pytest.approx(static[1])
    given = make("dynamic_yarn", attention_factor=1.7)
    assert [frequencies(given, n)[1] for n in (100, 512, 513)] == [1.0, 1.0, 1.7]


# ---- nothing where nothing is scaled ------------------------------------------------------------


def inputs(length, dtype=torch.float32, head_dim=16, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, batch, 2, length, head_dim)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).unbind(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("scaling", "options"),
    [
        *((name, {"factor": 1}) for name in STATIC),
        *DYNAMIC.items(),
        ("dynamic_ntk", {"factor": 1.3}),
    ],
    ids=str,
)
def test_without_a_stretch_every_bit_is_that_of_plain_rotary(scaling, options, dtype):
    q, k, _ = inputs(512, dtype)
    at = torch.arange(512)
    wanted = make().transform(q, k, at)
    for told in (512, torch.tensor([512])):
        found = make(scaling, **options).transform(q, k, at, total_length=told)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    if dtype == torch.float32:  # and plain rotary is what it was before there were scalings
        angle = at.float()[:, None] / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
        first, second = q.chunk(2, -1)
        turned = (
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        )
        assert torch.equal(wanted[0], torch.cat(turned, -1))


def test_old_checkpoints_say_what_new_ones_say():
    assert make().settings()["options"] == {
        "rotary_pct": 1.0,
        "rotary_emb_base": 10000.0,
        "precision": "exact",
        "model_dtype": None,
    }
    options = make("dynamic_ntk").settings()["options"]
    assert options["scaling"] == "dynamic_ntk" and options["factor"] == 1.0
    assert options["original_length"] == 512 and "beta_fast" not in options
    assert set(make("yarn", factor=2).settings()["options"]) >= {"beta_slow", "attention_factor"}
    assert json.loads(json.dumps(options)) == options


def test_only_the_dynamic_kinds_keep_raw_keys():
    assert {name: make(name, **more).cache for name, more in (STATIC | DYNAMIC).items()} == {
        **dict.fromkeys(STATIC, "transformed"),
        **dict.fromkeys(DYNAMIC, "raw"),
    }
    assert make().cache == "transformed"


# ---- the length, and nothing else ---------------------------------------------------------------


@pytest.mark.parametrize("scaling", DYNAMIC)
def test_the_order_of_lengths_does_not_matter(scaling):
    used, options = make(scaling, **DYNAMIC[scaling]), DYNAMIC[scaling]
    for length in (4096, 256, 511, 1024, 4096, 513):
        q, k, _ = inputs(64)
        at = torch.arange(length - 64, length)
        for ours, fresh in zip(
            used.transform(q, k, at, total_length=length),
            make(scaling, **options).transform(q, k, at, total_length=length),
            strict=True,
        ):
            assert torch.equal(ours, fresh)
    assert not list(used.buffers()) and not list(used.parameters())


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize("scaling", DYNAMIC)
def test_every_row_of_a_batch_has_its_own_length(scaling, impl):
    """Padding left or right: a row gives what its text gives alone."""
    method = make(scaling, max_length=8, **DYNAMIC[scaling])
    q, k, v = inputs(40, torch.float64, batch=3)
    mask = torch.zeros(3, 40, dtype=torch.bool)
    mask[1, :13] = True
    mask[2, 6:] = True
    both = attend(q, k, v, method, impl=impl, key_padding_mask=mask)
    for row, part in ((0, slice(0, 40)), (1, slice(13, 40)), (2, slice(0, 6))):
        own = (t[row : row + 1, :, part] for t in (q, k, v))
        alone = attend(*own, method, impl=impl)[0]
        torch.testing.assert_close(both[row, :, part], alone, rtol=1e-10, atol=1e-12)
    plain = attend(q, k, v, make(), impl=impl, key_padding_mask=mask)
    assert (both - plain)[1, :, 39].abs().max() > 1e-3
    torch.testing.assert_close(both[2, :, :6], plain[2, :, :6])


@pytest.mark.parametrize("scaling", DYNAMIC)
def test_a_length_is_needed(scaling):
    method = make(scaling, **DYNAMIC[scaling])
    q, k, _ = inputs(4)
    with pytest.raises(ValueError, match=f"scaling={scaling} needs the total length"):
        method.transform(q, k, torch.arange(4))


@pytest.mark.parametrize("scaling", [*STATIC, *DYNAMIC])
def test_positions_of_each_row(scaling):
    method = make(scaling, **(STATIC | DYNAMIC)[scaling])
    q, k, _ = inputs(6, batch=2)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [4, 5, 6, 7, 8, 900]])
    told = torch.tensor([6, 901])
    both, _ = method.transform(q, k, positions, total_length=told)
    for row in (0, 1):
        one, _ = method.transform(
            q[row : row + 1], k[row : row + 1], positions[row], total_length=int(told[row])
        )
        torch.testing.assert_close(both[row : row + 1], one, rtol=1e-6, atol=1e-6)


def test_yarns_factor_leaves_unrotated_dimensions_alone():
    q, k, _ = inputs(5)
    turned, _ = make("yarn", factor=8, rotary_pct=0.5).transform(q, k, torch.arange(5))
    assert torch.equal(turned[..., 8:], q[..., 8:])
    size = 0.1 * math.log(8) + 1
    torch.testing.assert_close(turned[..., :8].norm(dim=-1), size * q[..., :8].norm(dim=-1))


# ---- what cannot be -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scaling": "yern"}, "scaling='yern' is none of none, linear, ntk, yarn"),
        ({"scaling": "linear"}, "scaling=linear needs factor"),
        ({"scaling": "yarn"}, "scaling=yarn needs factor"),
        ({"scaling": "ntk", "factor": 0.5}, "factor=0.5 must be a number of at least 1"),
        ({"scaling": "ntk", "factor": True}, "factor=True must be"),
        ({"scaling": "ntk", "factor": "8"}, "factor='8' must be"),
        ({"scaling": "linear", "factor": math.inf}, "factor=inf must be"),
        ({"factor": 2}, "factor=2 means nothing to scaling=none"),
        (
            {"scaling": "dynamic_yarn", "factor": 2},
            "factor=2 means nothing to scaling=dynamic_yarn",
        ),
        ({"scaling": "linear", "factor": 2, "beta_fast": 9}, "beta_fast=9 means nothing .* factor"),
        (
            {"scaling": "linear", "factor": 2, "original_length": 9},
            "original_length=9 means nothing",
        ),
        ({"scaling": "yarn", "factor": 2, "truncate": "no"}, "truncate='no' must be true or false"),
        (
            {"scaling": "yarn", "factor": 2, "beta_slow": 40},
            "beta_fast=32.0 must be above beta_slow",
        ),
        ({"scaling": "yarn", "factor": 2, "beta_slow": 0}, "beta_slow=0 must be a number above 0"),
        ({"scaling": "yarn", "factor": 2, "attention_factor": -1}, "attention_factor=-1 must be"),
        ({"scaling": "yarn", "factor": 2, "rotary_emb_base": 1}, "needs rotary_emb_base above 1"),
        ({"scaling": "dynamic_ntk", "original_length": 0}, "original_length=0 must be"),
        ({"scaling": "dynamic_ntk", "original_length": 9.5}, "original_length=9.5 must be"),
        ({"scaling": "dynamic_ntk", "max_length": None}, "needs original_length, the tokens"),
        ({"scaling": "ntk", "factor": 2, "head_dim": 2}, "needs at least 4 rotated dimensions"),
    ],
    ids=str,
)
def test_options_that_cannot_be(options, told):
    with pytest.raises(ValueError, match=f"rotary: .*{told}"):
        make(**options)
