"""How transformers' models are called once they have a position method: autocast, places, packed texts."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from megatron_patches.hf import load_with_positions, use_positions  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
COMMON = {**SIZES, "num_attention_heads": 4, "max_position_embeddings": 64}
TEXT = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(4))
PACKED = torch.cat([torch.arange(9), torch.arange(8)])[None].expand(2, -1)


def made(kind: str = "Llama", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**COMMON, initializer_range=0.3, **changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def eager(model, bias_HQK: torch.Tensor, text: torch.Tensor):
    """transformers' own attention with a dense bias; places of 0 everywhere switch its rotation off."""
    place = torch.arange(text.shape[1])
    mask = bias_HQK.masked_fill(place[:, None] < place, torch.finfo(torch.float32).min)
    zeros = torch.zeros_like(text)
    return model(text, attention_mask=mask.expand(len(text), -1, -1, -1), position_ids=zeros)


@pytest.mark.parametrize("kind", ["Llama", "GPTNeoX"])
def test_autocast_computes_as_transformers_attention_does(kind):
    """What the Trainer does with bf16=True: float32 weights, and queries that rotation leaves float32."""
    theirs = made(kind, attn_implementation="eager")
    ours = copy.deepcopy(theirs)
    slope = use_positions(ours, "alibi")[0].slopes.view(-1, 1, 1)
    place = torch.arange(TEXT.shape[1])
    bias = -slope * (place[:, None] - place).clamp(min=0)
    exact = eager(theirs, bias, TEXT).logits
    with torch.autocast("cpu", torch.bfloat16):
        wanted = eager(theirs, bias, TEXT).logits
        found = ours(TEXT, labels=TEXT)
    found.loss.backward()
    rounding = (wanted.float() - exact).abs().max()
    assert 0 < (found.logits.float() - exact).abs().max() < 2 * rounding
    grown = {key: p.grad for key, p in ours.named_parameters()}
    assert all(torch.isfinite(grad).all() and grad.abs().max() > 0 for grad in grown.values())


def test_learned_numbers_have_their_gradient_under_autocast():
    model = made(num_key_value_heads=2)
    number = use_positions(model, "kerple_log")[0].bias_p
    model(TEXT, labels=TEXT).loss.backward()
    wanted, number.grad = number.grad.clone(), None
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(TEXT, labels=TEXT).loss
    loss.backward()
    torch.testing.assert_close(number.grad, wanted, rtol=0.2, atol=2e-3)


@torch.no_grad()
@pytest.mark.parametrize("more", [{}, {"use_cache": False}, {"attention_mask": torch.ones(2, 17)}])
def test_places_that_do_not_count_the_tokens_are_refused(more):
    """With a cache, or a mask of ones, transformers itself does not take a text for a packed one."""
    model = made()
    use_positions(model, "kerple_log")
    wanted = model(TEXT).logits
    for places in (PACKED, torch.arange(17)[None] * 3, torch.zeros_like(TEXT)):
        with pytest.raises(ValueError, match="position_ids do not count one by one"):
            model(TEXT, position_ids=places, **more)
        with pytest.raises(ValueError, match="position_ids do not count one by one"):
            model.model(TEXT, None, places)
    counted = torch.arange(5, 22)[None]
    assert torch.equal(model(TEXT, position_ids=counted, **more).logits, wanted)


@torch.no_grad()
def test_places_under_the_padding_are_free():
    model = made()
    use_positions(model, "kerple_log")
    mask = torch.ones_like(TEXT)
    mask[0, :5], mask[1, 12:] = 0, 0
    places = (mask.cumsum(1) - 1).clamp(min=0)  # as transformers' generation has them
    wanted = model(TEXT, attention_mask=mask).logits
    assert torch.equal(model(TEXT, attention_mask=mask, position_ids=places).logits, wanted)


def test_packed_texts_of_a_collator_are_refused():
    model = made()
    use_positions(model, "kerple_log")
    ends = torch.tensor([0, 9, 17], dtype=torch.int32)
    with pytest.raises(ValueError, match="kerple_log does not take cu_seq_lens_q$"):
        model(TEXT[:1], cu_seq_lens_q=ends, cu_seq_lens_k=ends)


@torch.no_grad()
def test_another_attention_is_no_way_around_the_method(tmp_path):
    model = made()
    use_positions(model, "kerple_log")
    wanted = model(TEXT).logits
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="switched to the attention 'sdpa'.*set_attn_impl"):
        model(TEXT)
    model.set_attn_implementation("position_method")
    assert torch.equal(model(TEXT).logits, wanted)
    again = load_with_positions(tmp_path, attn_implementation="eager").eval()
    assert torch.equal(again(TEXT).logits, wanted)


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
def test_methods_are_in_the_mode_of_their_model(tmp_path, training):
    """A draw for training in a model that only reads would be another model."""
    model = made().train(training)
    methods = use_positions(model, "randomised_kerple_log", span=256)
    assert methods.training is methods[0].training is training
    wanted = model.eval()(TEXT).logits
    model.save_pretrained(tmp_path)
    again = load_with_positions(tmp_path)
    assert not any(module.training for module in again.modules())
    assert torch.equal(again(TEXT).logits, wanted)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, "bfloat16"])
def test_a_dtype_among_the_options_is_saved(tmp_path, dtype):
    model = made()
    use_positions(model, "kerple_log", precision="as_published", model_dtype=dtype)
    wanted = model(TEXT).logits
    model.save_pretrained(tmp_path)
    again = load_with_positions(tmp_path)
    assert again.position_methods[0].published_dtype == torch.bfloat16
    assert torch.equal(again(TEXT).logits, wanted)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="nowhere: no folder with a config.json"):
        load_with_positions(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("Gemma2", {"attention_dropout": 0.0}, "layer_types names sliding_attention"),
        ("Gemma2", {"sliding_window": 8}, "layer_types names sliding_attention"),
        ("Mistral", {"sliding_window": 8, "num_key_value_heads": 2}, "sliding_window is 8"),
        (
            "Qwen2",
            {"use_sliding_window": True, "max_window_layers": 1, "num_key_value_heads": 2},
            "layer_types names sliding_attention",
        ),
    ],
)
def test_windows_are_refused_before_the_model_is_touched(kind, changes, said):
    model = made(kind, **changes)
    with pytest.raises(ValueError, match=f"{said}.*: windows are not supported; make the model"):
        use_positions(model, "alibi")
    assert torch.isfinite(model(TEXT).logits).all()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
def test_full_sight_in_all_layers_is_taken(kind):
    theirs = made(kind, num_key_value_heads=2, attn_implementation="eager")
    ours = copy.deepcopy(theirs)
    slope = use_positions(ours, "alibi")[0].slopes.view(-1, 1, 1)
    place = torch.arange(TEXT.shape[1])
    bias = -slope * (place[:, None] - place).clamp(min=0)
    torch.testing.assert_close(
        ours(TEXT).logits, eager(theirs, bias, TEXT).logits, atol=3e-5, rtol=1e-5
    )
