"""A model's dtype must not reach the positions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_patches.positions import PositionMethod, build, names


def make(name: str, heads: int = 12, **options: object) -> PositionMethod:
    return build(name, heads=heads, head_dim=8, hidden_size=8 * heads, max_length=64, **options)


def casts(model: nn.Module) -> list[nn.Module]:
    return [
        model.bfloat16(),
        model.half(),
        model.to(torch.bfloat16),
        model.to("cpu", torch.float16),
        model.double(),
        model.float(),
    ]


@pytest.mark.parametrize("name", names())
def test_casts_of_the_whole_model_change_nothing(name):
    method = make(name)
    model = nn.ModuleDict({"position": method, "linear": nn.Linear(2, 2)})
    before = {key: value.clone() for key, value in method.state_dict().items()}
    pointers = [p.data_ptr() for p in method.parameters()]
    for _ in casts(model):
        pass
    model.bfloat16()
    assert model["linear"].weight.dtype == torch.bfloat16
    for key, value in method.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, before[key])
    assert [p.data_ptr() for p in method.parameters()] == pointers
    for table in (method.table(300), method.weight_table(300)):
        assert table is None or table.dtype == torch.float32


@pytest.mark.parametrize("name", names())
def test_moves_still_work(name):
    method = make(name).to("meta", torch.bfloat16)
    for value in method.state_dict().values():
        assert value.device.type == "meta" and value.dtype == torch.float32
    table = method.table(5)
    assert table is None or list(method.state_dict()) == [] or table.device.type == "meta"


@pytest.mark.parametrize("name", names())
def test_float64_on_request(name):
    method = make(name)
    single = [method.table(50), method.weight_table(50)]
    method.to_float64_()
    assert all(value.dtype == torch.float64 for value in method.state_dict().values())
    for exact, rough in zip((method.table(50), method.weight_table(50)), single, strict=True):
        if exact is not None:
            assert exact.dtype == torch.float64
            torch.testing.assert_close(exact.float(), rough, rtol=1e-5, atol=1e-6)
    x = torch.randn(1, 4, 96, dtype=torch.float64)
    assert method.embed(x, torch.arange(4)).dtype == torch.float64


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_embeddings_follow_the_input(name):
    method, x = make(name), torch.randn(1, 4, 96)
    expected = method.embed(x, torch.arange(4))
    rounded = method.embed(x.bfloat16(), torch.arange(4))
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), expected, rtol=2e-2, atol=2e-2)


def test_rotary_angles_are_fp32_for_bf16_queries():
    method = make("rotary")
    q = torch.randn(1, 12, 3, 8).bfloat16()
    positions = torch.tensor([257, 511, 16383])
    ours, _ = method.transform(q, q, positions)
    expected, _ = method.transform(q.double(), q.double(), positions)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=4e-3)


def test_every_distance_of_16384_is_its_own():
    method = make("kerple_power", 1).bfloat16()
    published = make("kerple_power", 1, precision="as_published", model_dtype="bfloat16")
    half = make("kerple_power", 1, precision="as_published", model_dtype="float16")
    for one in (method, published, half):
        one.bias_a.data.fill_(1.0)
        one.bias_p.data.fill_(1.0)
    assert torch.equal(method.table(16384)[0], -torch.arange(16384.0))
    assert published.table(16384).unique().numel() == 1025
    assert half.table(16384).unique().numel() == 5121


def test_alibi_is_exact_at_16384():
    method = make("alibi", 8).bfloat16()
    assert torch.equal(method.table(16384)[0], -0.5 * torch.arange(16384.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_weight", "rpe", "alibi"])
def test_checkpoints_in_low_precision_are_read_into_fp32(name, dtype):
    method = make(name)
    state = {key: value.to(dtype) for key, value in make(name, seed=9).state_dict().items()}
    method.load_state_dict(state, strict=True)
    for key, value in method.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, state[key].float())
    method.load_state_dict(state, strict=True, assign=True)  # takes the file's dtype along
    assert method.table(300).dtype == torch.float32
    assert method.table(300)[0].unique().numel() > 30


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power", "kerple_power_weight", "rpe"])
def test_parameters_cast_behind_our_back(name):
    """DeepSpeed's bf16 replaces the data of each parameter; the maths must stay in fp32."""
    method, expected = make(name), make(name)
    for parameter in method.parameters():
        parameter.data = parameter.data.bfloat16()
    for key, parameter in expected.named_parameters():
        parameter.data.copy_(method.state_dict()[key])
    for ours, right in (
        (method.table(16384), expected.table(16384)),
        (method.weight_table(16384), expected.weight_table(16384)),
    ):
        if right is not None:
            assert ours.dtype == torch.float32 and torch.equal(ours, right)
    method.table(9).sum().backward()
    method.project_()
    method.float()
    assert all(value.dtype == torch.float32 for value in method.state_dict().values())
