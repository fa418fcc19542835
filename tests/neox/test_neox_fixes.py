"""Each named correction does what its line says, and without it the fault is there."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from neox_tools import INSERTED, NATIVE, POSSIBLE, STUB, carrying, make_args, random

from megatron_patches import positions
from megatron_patches.neox import fixes, install
from megatron_patches.positions import method_class

# No powers of two: products with those are exact, and rounding would not show.
UNEVEN = torch.tensor([0.3, 0.21, 0.043, 0.007])
SLOPES = positions.build("alibi", heads=4, head_dim=8, hidden_size=32).table(2)[:, 1]
T5 = next(name for name in INSERTED if name in NATIVE)


def expected_alibi(queries: int, keys: int, slopes: torch.Tensor = -SLOPES) -> torch.Tensor:
    """-slope * distance, 0 where the key is later: [4, queries, keys]."""
    between = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    return -slopes[:, None, None] * between.clamp(min=0)


def test_every_fix_says_what_it_corrects():
    assert all(fix.what and "\n" not in fix.what for fix in fixes.FIXES.values())


# ---- positions -----------------------------------------------------------------------------------


def test_alibi_at_any_jump_of_length(neox):
    from megatron.model.positional_embeddings import AliBi

    alibi = AliBi(4)
    for queries, keys in [(4, 4), (64, 64), (1, 65), (3, 100), (2, 2), (600, 600)]:
        scores = random(2, 4, queries, keys)
        torch.testing.assert_close(alibi(scores), scores + expected_alibi(queries, keys))
        bias = alibi.bias(queries, keys, scores.device, torch.float32)
        torch.testing.assert_close(bias, expected_alibi(queries, keys))


def test_alibis_bias_is_made_once_for_a_shape(neox):
    from megatron.model.positional_embeddings import AliBi

    alibi = AliBi(4)
    first = alibi.bias(8, 8, "cpu", torch.float32)
    assert alibi.bias(8, 8, "cpu", torch.float32).data_ptr() == first.data_ptr()
    alibi(torch.zeros(1, 4, 1, 9))
    torch.testing.assert_close(alibi.bias(8, 8, "cpu", torch.float32), first)
    assert [key for key in alibi.state_dict() if "latest" in key] == []


def test_alibi_in_bfloat16_counts_in_float32(neox):
    from megatron.model.positional_embeddings import AliBi

    alibi = AliBi(4)
    alibi.slopes = UNEVEN
    out = alibi(torch.zeros(1, 4, 1, 400, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[0], expected_alibi(1, 400, UNEVEN).bfloat16())


def test_alibi_of_the_second_rank_has_its_own_slopes(neox):
    from megatron.model.positional_embeddings import AliBi

    out = AliBi(4, 2, 1)(torch.zeros(1, 2, 5, 5))
    torch.testing.assert_close(out[0], expected_alibi(5, 5)[2:])


def test_without_the_fix_alibi_stops_and_rounds(clean):
    install(home=STUB, fixes_off=["alibi_cache"])
    from megatron.model.positional_embeddings import AliBi

    alibi = AliBi(4)
    alibi(torch.zeros(1, 4, 4, 4))
    with pytest.raises(AssertionError):
        alibi(torch.zeros(1, 4, 64, 64))
    alibi = AliBi(4)
    alibi.slopes = UNEVEN
    rounded = alibi(torch.zeros(1, 4, 1, 400, dtype=torch.bfloat16))
    assert not torch.equal(rounded[0], expected_alibi(1, 400, UNEVEN).bfloat16())


@pytest.mark.parametrize("off", [False, True])
def test_t5s_bias_with_a_cache(clean, off):
    install(home=STUB, fixes_off=["rpe_cache"] if off else [])
    from megatron.mpu.layers import ParallelRelativePositionBias

    bias = ParallelRelativePositionBias(make_args(pos_emb=T5), 2.0, 4)
    whole = bias(12, 12)
    for queries in (1, 5):
        part = bias(queries, 12)
        assert part.shape == (1, 4, queries, 12)
        assert torch.equal(part, whole[:, :, -queries:]) is not off
    bias(1, 12).sum().backward()
    assert torch.count_nonzero(bias.weight.grad)


@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize(
    "kind", ["model.gpt2_model.GPT2ModelPipe", "model.utils.SequentialWrapper"]
)
def test_a_prompt_does_not_see_those_before_it(clean, kind, off):
    install(home=STUB, fixes_off=["cache_between_prompts"] if off else [])
    from megatron.text_generation_utils import stream_tokens

    args = make_args(pos_emb=INSERTED[0])
    module, name = f"megatron.{kind}".rsplit(".", 1)
    made = getattr(importlib.import_module(module), name)
    model = SimpleNamespace(module=made(args) if "Pipe" in name else made())
    assert list(stream_tokens(args, model, "ab")) == [["a"], ["a", "b"]]
    assert list(stream_tokens(args, model, "c")) == [["a", "b", "c"] if off else ["c"]]


# ---- evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("off", [False, True])
def test_validation_with_pipeline_stages(clean, off):
    install(home=STUB, fixes_off=["pipeline_evaluation"] if off else [])
    from megatron import training

    model = SimpleNamespace(
        eval_batch=lambda data, return_logits: (7.0, "logits") if return_logits else 7.0
    )
    args = make_args(is_pipe_parallel=True, eval_iters=2)
    if off:
        with pytest.raises(TypeError):
            training.evaluate(args, training.forward_step, iter([]), model)
        return
    assert training.forward_step([], model, args, None) == (7.0, {})
    assert training.evaluate(args, training.forward_step, iter([]), model) == {"lm_loss": 7.0}
    assert training.forward_step([], model, args, None, True) == (7.0, "logits")
    asked = training.forward_step([], model, args, None, return_logits=True)
    assert asked == (7.0, "logits")
    model.eval_batch = lambda *_, **__: "logits alone"
    assert training.forward_step([], model, args, None, True) == "logits alone"
    model.eval_batch = lambda *_, **__: (7.0, {"from": "a later NeoX"})
    assert training.forward_step([], model, args, None) == (7.0, {"from": "a later NeoX"})


def test_steps_without_pipeline_stages_pass_through(neox):
    from megatron import training

    args = make_args(is_pipe_parallel=False)
    assert training.forward_step(iter([3]), lambda x: 2 * x, args, None) == (6, {})


def test_evaluation_only(neox):
    from megatron import training

    args = make_args(train_iters=0, save="somewhere")
    loaders = training.build_train_valid_test_data_loaders(args)
    assert loaders["train_iters"] == 1  # enough for one evaluation
    assert (args.train_iters, args.do_train, args.save) == (0, 0, None)
    training_too = make_args(train_iters=5, save="somewhere")
    training.build_train_valid_test_data_loaders(training_too)
    assert (training_too.train_iters, training_too.do_train) == (5, 1)
    assert training_too.save == "somewhere"
    by_epochs = make_args(train_iters=0, train_epochs=1)
    training.build_train_valid_test_data_loaders(by_epochs)
    assert by_epochs.do_train == 1


def test_train_iters_returns_to_0_after_a_failure(neox, monkeypatch):
    from megatron.data import data_utils

    args = make_args(train_iters=0)
    # A frozen attribute fails in the middle of the original.
    monkeypatch.setattr(type(args), "do_train", property(lambda self: 1), raising=False)
    with pytest.raises(AttributeError):
        data_utils.build_train_valid_test_data_loaders(args)
    assert args.train_iters == 0


def test_nothing_to_train_is_refused_where_the_fix_is_off(clean):
    install(home=STUB, fixes_off=["evaluation_only"])
    from megatron.data import data_utils

    with pytest.raises(ValueError, match="Must specify"):
        data_utils.build_train_valid_test_data_loaders(make_args(train_iters=0))


@pytest.mark.parametrize("name", POSSIBLE)
def test_a_checkpoint_may_have_another_longest_input_unless_a_table_holds_it(neox, name):
    from megatron import training

    args = make_args(pos_emb=name, max_position_embeddings=64, **carrying(name))
    stored = {"hidden_size": 32, "max_position_embeddings": 16}
    if method_class(name).place == "attention":
        training.check_checkpoint_args(args, stored)
        assert stored["max_position_embeddings"] == 16
    else:
        with pytest.raises(AssertionError, match="max_position_embeddings"):
            training.check_checkpoint_args(args, stored)
    with pytest.raises(AssertionError, match="hidden_size"):
        training.check_checkpoint_args(args, stored | {"hidden_size": 64})


@pytest.mark.parametrize("off", [False, True])
def test_rotary_reads_the_validation_length(clean, off):
    install(home=STUB, fixes_off=["evaluation_lengths"] if off else [])
    from megatron.model.gpt2_model import GPT2ModelPipe

    made = GPT2ModelPipe(make_args(pos_emb="rotary", seq_length_val=40))
    x, full = random(1, 40, 32), torch.zeros(1, 1, 40, 40, dtype=torch.bool)
    if off:
        with pytest.raises(AssertionError, match="longer than the table"):
            made((x, full))
        return
    assert made((x, full)).shape == x.shape
    assert made.sequential[0].attention.rotary_emb.max_seq_len == 40
    shorter = GPT2ModelPipe(make_args(pos_emb="rotary", seq_length_val=4))
    assert shorter.sequential[0].attention.rotary_emb.max_seq_len == 12


@pytest.mark.parametrize("off", [False, True])
def test_the_window_reaches_the_mask_without_pipeline_stages(clean, off):
    install(home=STUB, fixes_off=["sliding_window"] if off else [])
    from megatron import training

    tokens = torch.zeros(1, 6, dtype=torch.int64)
    args = make_args(sliding_window_width=2)
    found = training.get_batch_sequential((tokens, tokens, None), args)
    distance = torch.arange(6)[:, None] - torch.arange(6)
    hidden = distance < 0 if off else (distance < 0) | (distance > 2)
    assert torch.equal(found[2][0, 0], hidden)
    assert found[0] is tokens and found[1] is tokens
