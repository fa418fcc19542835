"""Against numbers computed by the authors' own classes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_patches.positions import PositionMethod, aliases, build

SPELLINGS = ["kerple_log", *sorted(aliases())]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# One step of the mantissa: another processor may round a power or a logarithm the other way.
ONE_STEP = {"float32": 1e-6, "bfloat16": 2**-7}


def make(name: str, heads: int, **options: object) -> PositionMethod:
    return build(name, heads=heads, head_dim=64, hidden_size=64 * heads, **options)


def fill(method: PositionMethod, golden: dict[str, Tensor], prefix: str) -> None:
    for key, parameter in method.named_parameters():
        parameter.data.copy_(golden[f"{prefix}{key}"])


def apply(method: PositionMethod, x: Tensor, distance: Tensor) -> Tensor:
    weight, bias = method.weight(distance), method.bias(distance)
    y = x if weight is None else x * weight.to(x.dtype)
    return y if bias is None else y + bias.to(x.dtype)


def assert_rounded_alike(ours: Tensor, theirs: Tensor, dtype: str) -> None:
    assert (ours == theirs).double().mean() > 0.99
    torch.testing.assert_close(ours, theirs, rtol=ONE_STEP[dtype], atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [12, 5])
@pytest.mark.parametrize("name", [*SPELLINGS, "alibi"])
def test_as_published_equals_the_authors_classes(kernels, name, heads, dtype):
    method = make(name, heads, precision="as_published", model_dtype=dtype)
    prefix = f"{name}.h{heads}.{dtype}."
    fill(method, kernels, prefix + "param.")
    rows = kernels["rows"]
    distance = rows[:, None] - torch.arange(48)
    visible = distance >= 0
    y = apply(method, kernels[prefix + "x"], distance.clamp(min=0))
    assert_rounded_alike(y[:, visible], kernels[prefix + "y"][:, visible], dtype)


@pytest.mark.parametrize("heads", [12, 5])
@pytest.mark.parametrize("name", [*SPELLINGS, "alibi"])
def test_exact_equals_float32_and_not_bfloat16(kernels, name, heads):
    method = make(name, heads)
    distance = kernels["rows"][:, None] - torch.arange(48)
    visible = distance >= 0
    for dtype in DTYPES:
        prefix = f"{name}.h{heads}.{dtype}."
        fill(method, kernels, prefix + "param.")
        y = apply(method, kernels[prefix + "x"].float(), distance.clamp(min=0))
        error = (y - kernels[prefix + "y"].float())[:, visible].abs().max()
        assert error < 1e-5 if dtype == "float32" else error > 5e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [12, 5])
@pytest.mark.parametrize("name", SPELLINGS)
def test_decoding_row(kernels, name, heads, dtype):
    method = make(name, heads, precision="as_published", model_dtype=dtype)
    prefix = f"{name}.h{heads}.{dtype}."
    fill(method, kernels, prefix + "param.")
    y = apply(method, kernels[prefix + "x_decode"], 47 - torch.arange(48))
    assert_rounded_alike(y, kernels[prefix + "y_decode"], dtype)


@pytest.mark.parametrize("heads", [12, 5])
@pytest.mark.parametrize("name", SPELLINGS)
def test_project_equals_the_authors_clamp(kernels, name, heads):
    method = make(name, heads)
    prefix = f"{name}.h{heads}.float32."
    fill(method, kernels, prefix + "param.")
    method.project_()
    for key, parameter in method.named_parameters():
        assert torch.equal(parameter, kernels[f"{prefix}clamped.{key}"])
        assert not torch.equal(parameter, kernels[f"{prefix}param.{key}"])  # the golden bites


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_ap_", "kerple_power_ap_ap"])
def test_gradients(kernels, name):
    prefix = f"grad.{name}."
    method = make(name, 4).to_float64_()
    fill(method, kernels, prefix + "param.")
    x = kernels[prefix + "x"].clone().requires_grad_()
    distance = torch.arange(32)[:, None] - torch.arange(32)
    y = apply(method, x, distance.clamp(min=0)).masked_fill(distance < 0, -torch.inf)
    probs = y.softmax(-1)
    (probs * kernels[prefix + "w"]).sum().backward()
    torch.testing.assert_close(probs, kernels[prefix + "probs"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(x.grad, kernels[prefix + "dx"], rtol=1e-9, atol=1e-12)
    for key, parameter in method.named_parameters():
        expected = kernels[f"{prefix}dparam.{key}"]
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_ap_ap"])
def test_parameters_out_of_range(clamping, name):
    method = make(name, 12)
    for key, parameter in method.named_parameters():
        parameter.data.copy_(clamping[f"{name}.{key}.before"])
    distance = torch.arange(8)[:, None] - torch.arange(8)
    y = apply(method, clamping[f"{name}.scores_in"], distance.clamp(min=0))
    expected = clamping[f"{name}.scores_out"]
    visible = distance >= 0
    torch.testing.assert_close(y[..., visible], expected[..., visible], rtol=1e-6, atol=1e-6)
    for key, parameter in method.named_parameters():
        assert torch.equal(parameter, clamping[f"{name}.{key}.before"])  # reading changes nothing
    method.project_()
    for key, parameter in method.named_parameters():
        assert torch.equal(parameter, clamping[f"{name}.{key}.after"])


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_ap_", "kerple_power_ap_ap", "rpe"])
def test_saved_state_of_the_authors_models(fork_rows, name):
    method = build(name, heads=12, head_dim=8, hidden_size=96)
    start = f"{name}.attention.rpe."
    saved = {k.removeprefix(start): v for k, v in fork_rows.items() if k.startswith(start)}
    method.load_state_dict(saved, strict=True)
    for length in (64, 256, 600):
        key = f"{name}.bias_last_row_{length}"
        if key not in fork_rows:
            continue
        torch.testing.assert_close(method.table(length).flip(-1), fork_rows[key])
        if method.weight_table(1) is not None:
            ones = (method.weight_table(length) + method.table(length)).flip(-1)
            torch.testing.assert_close(ones, fork_rows[f"{name}.ones_last_row_{length}"])


def test_published_rounding_of_distances(fork_rows):
    geometry = {"heads": 12, "head_dim": 8, "hidden_size": 96}
    rounded = build("kerple_log", **geometry, precision="as_published", model_dtype=torch.bfloat16)
    exact = build("kerple_log", **geometry)
    start = "kerple_log-bf16.attention.rpe."
    saved = {k.removeprefix(start): v for k, v in fork_rows.items() if k.startswith(start)}
    for method in (rounded, exact):
        method.load_state_dict(saved, strict=True)
        assert all(p.dtype == torch.float32 for p in method.parameters())
    for length in (64, 256, 600):
        expected = fork_rows[f"kerple_log-bf16.bias_last_row_{length}"].float()
        assert_rounded_alike(rounded.table(length).flip(-1), expected, "bfloat16")
    assert rounded.table(600)[5].unique().numel() == 132
    assert exact.table(600)[5].unique().numel() == 600


def test_alibi_slopes(kernels, fork_rows):
    counted = 0
    for key, expected in kernels.items():
        if key.startswith("alibi.slopes."):
            heads = int(key.rpartition(".")[2])
            assert torch.equal(make("alibi", heads).slopes, expected), heads
            counted += 1
    assert counted >= 20
    assert torch.equal(make("alibi", 12).slopes, fork_rows["alibi.attention.alibi_embed.slopes"])


def test_alibi_slopes_typed_by_hand():
    eight = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
    four = [0.70710678, 0.35355339, 0.17677670, 0.08838835]
    assert make("alibi", 8).slopes.tolist() == eight
    torch.testing.assert_close(make("alibi", 12).slopes, torch.tensor(eight + four))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [12, 5])
def test_t5_bias(kernels, heads, dtype):
    method = make("rpe", heads, precision="as_published", model_dtype=dtype)
    prefix = f"rpe.h{heads}.{dtype}."
    fill(method, kernels, prefix)
    expected = kernels[prefix + "bias256_row255"].float()
    assert_rounded_alike(method.table(256).flip(-1), expected, dtype)
    assert torch.equal(method.bucket(torch.arange(512)), kernels[prefix + "buckets512"][0])


def test_rotary(kernels):
    method = build("rotary", heads=2, head_dim=64, hidden_size=128)
    q, k, rq, rk = (kernels[f"rotary.{key}"].permute(1, 2, 0, 3) for key in ("q", "k", "rq", "rk"))
    positions = kernels["rotary.positions"]
    for given in (positions, positions[None]):
        turned_q, turned_k = method.transform(q, k, given)
        torch.testing.assert_close(turned_q, rq, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(turned_k, rk, rtol=1e-5, atol=2e-5)


def test_sinusoidal(kernels, fork_rows):
    method = build("sinusoidal", heads=12, head_dim=8, hidden_size=96)
    embedded = method.embed(torch.zeros(1, 128, 96), torch.arange(128))
    torch.testing.assert_close(embedded[0], kernels["sinusoidal.128x96"], rtol=0, atol=2e-5)
    saved = fork_rows["sinusoidal.position_embeddings.inv_freq"]
    torch.testing.assert_close(method.inv_freq, saved, rtol=1e-6, atol=0)
    method.load_state_dict({"inv_freq": saved}, strict=True)
