"""Position methods in models of transformers, against the same models with a dense bias and no rotation.

The other side is transformers' own eager attention: it adds a float mask [B, H, L, L] to the scores, which
here holds causality and the bias, from formulas typed in this file; positions of 0 everywhere switch its
rotation off.
"""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from megatron_patches import positions  # noqa: E402
from megatron_patches.hf import load_with_positions, use_positions  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
COMMON = {
    **SIZES,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def llama(**changes):
    config = transformers.LlamaConfig(**{**COMMON, "num_key_value_heads": 2, **changes})
    return transformers.LlamaForCausalLM(config)


def neox(**changes):
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**{**COMMON, **changes}))


def mistral(**changes):
    config = transformers.MistralConfig(
        **{**COMMON, "num_key_value_heads": 2, "sliding_window": None, **changes}
    )
    return transformers.MistralForCausalLM(config)


BUILDERS = {"llama": llama, "neox": neox, "mistral": mistral}


def made(kind: str, seed: int = 0, **changes):
    torch.manual_seed(seed)
    return BUILDERS[kind](**changes).eval()


def texts(batch: int = 2, length: int = 17) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(4))


# bias(parameters, d), scores stay; of the methods that add alone
FORMULAS = {
    "kerple_log": lambda n, d: -n["bias_p"] * torch.log(1 + n["bias_a"] * d),
    "kerple_power": lambda n, d: -n["bias_a"] * d.clamp(min=1e-30) ** n["bias_p"] * (d > 0),
    "kerple_gauss2": lambda n, d: n["bias_p"] * torch.exp(-n["bias_a"] * d**2),
    "alibi": lambda n, d: -torch.tensor([2**-2, 2**-4, 2**-6, 2**-8])[:, None, None] * d,
    "none": lambda n, d: torch.zeros(4, *d.shape),
}


def dense_mask(name: str, numbers: dict[str, torch.Tensor], length: int) -> torch.Tensor:
    place = torch.arange(length)
    d = (place[:, None] - place[None, :]).float()
    bias = FORMULAS[name](numbers, d.clamp(min=0))
    return bias.masked_fill(d < 0, torch.finfo(torch.float32).min)[None]


def eager(model, name, numbers, text, **more):
    mask = dense_mask(name, numbers, text.shape[1]).expand(len(text), -1, -1, -1)
    return model(text, attention_mask=mask, position_ids=torch.zeros_like(text), **more)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("kind", BUILDERS)
def test_logits_and_gradients_equal_a_dense_bias(kind, name):
    theirs = made(kind, attn_implementation="eager")
    ours = copy.deepcopy(theirs)
    methods = use_positions(ours, name, seed=3)
    numbers = {
        key: tensor.detach().clone().requires_grad_()
        for key, tensor in methods[0].named_parameters()
    }
    text = texts()
    wanted, found = eager(theirs, name, numbers, text, labels=text), ours(text, labels=text)
    torch.testing.assert_close(found.logits, wanted.logits, atol=3e-5, rtol=1e-5)
    wanted.loss.backward()
    found.loss.backward()
    gradients = dict(ours.named_parameters())
    for key, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[key].grad, parameter.grad, atol=2e-6, rtol=1e-4)
    for key, number in numbers.items():
        assert number.grad.abs().max() > 1e-4
        torch.testing.assert_close(
            gradients[f"position_methods.0.{key}"].grad, number.grad, atol=2e-6, rtol=1e-4
        )


def test_the_bias_matters_and_the_rotation_is_gone():
    plain, ours, text = made("llama"), made("llama"), texts()
    use_positions(ours, "none")
    with torch.no_grad():
        assert (ours(text).logits - plain(text).logits).abs().max() > 0.1
        moved = ours(text, position_ids=torch.arange(40, 57)[None]).logits
        torch.testing.assert_close(moved, ours(text).logits)
        kept = made("llama")
        use_positions(kept, "none", replace=False)  # no bias, rotation as it was
        torch.testing.assert_close(kept(text).logits, plain(text).logits, atol=3e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["kerple_log", "kerple_power_weight", "rpe"])
@pytest.mark.parametrize("kind", BUILDERS)
def test_cache_and_padding(kind, name):
    model = made(kind)
    use_positions(model, name)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    text, cache, parts, at = texts(), None, [], 0
    for block in (5, 1, 4, 1, 6):
        out = model(text[:, at : at + block], cache=cache, use_cache=True)
        cache, at = out.cache, at + block
        parts.append(out.logits)
    whole = model(text).logits
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=3e-5, rtol=1e-5)

    short = text[1:, :11]
    batch, mask = text.clone(), torch.ones_like(text)
    batch[1, :6], batch[1, 6:], mask[1, :6] = 7, short, 0
    found = model(batch, attention_mask=mask).logits
    torch.testing.assert_close(found[:1], whole[:1], atol=3e-5, rtol=1e-5)
    torch.testing.assert_close(found[1:, 6:], model(short).logits, atol=3e-5, rtol=1e-5)
    grown = model.generate(batch, attention_mask=mask, max_new_tokens=8, do_sample=False)
    # Without a mask, generate would take ids that happen to be the padding's for padding.
    seen = torch.ones_like(short)
    alone = model.generate(short, attention_mask=seen, max_new_tokens=8, do_sample=False)
    assert torch.equal(grown[1, 6:], alone[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["randomised_alibi", "randomised_kerple_log"])
def test_places_that_follow_the_length_need_a_plan(name):
    model = made("llama")
    methods, text = use_positions(model, name, span=64).eval(), texts()
    cache = model(text[:, :5], use_cache=True).cache
    with pytest.raises(ValueError, match=f"with {name} a token's place.*set `planned_length`"):
        model(text[:, 5:], cache=cache, use_cache=True)
    for method in methods:
        method.planned_length = 30
    whole = model(text).logits
    cache = model(text[:, :5], use_cache=True).cache
    rest = model(text[:, 5:], cache=cache, use_cache=True).logits
    torch.testing.assert_close(rest, whole[:, 5:], atol=3e-5, rtol=1e-5)
    mask = torch.ones_like(text)
    torch.testing.assert_close(model(text, attention_mask=mask).logits, whole, atol=3e-5, rtol=1e-5)
    mask[1, :4] = 0
    with pytest.raises(ValueError, match=f"with {name} .*a batch has no padding"):
        model(text, attention_mask=mask)
    before = methods[0].step
    methods.project_()
    assert methods[0].step == before + 1


def test_it_learns_in_ten_lines():
    model = made("llama")
    methods = use_positions(model, "kerple_log", seed=1).train()
    before = methods[0].bias_p.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = (torch.arange(40) % 9)[None]
    losses = []
    for _ in range(25):
        loss = model(text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        methods.project_()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    assert not torch.equal(methods[0].bias_p, before)


def test_gradient_checkpointing_changes_nothing():
    model, text = made("llama"), texts()
    use_positions(model, "kerple_log")
    model(text, labels=text).loss.backward()
    wanted = model.position_methods[0].bias_a.grad.clone()
    model.zero_grad()
    model.train()
    model.activation_checkpointing_enable()
    model(text, labels=text).loss.backward()
    torch.testing.assert_close(model.position_methods[0].bias_a.grad, wanted)


@torch.no_grad()
@pytest.mark.parametrize("sharing", ["model", "layer"])
def test_saved_and_loaded(tmp_path, sharing):
    model, text = made("llama"), texts()
    methods = use_positions(model, "kerple_power", sharing=sharing, init="alibi")
    assert len(methods) == (1 if sharing == "model" else 2)
    methods[-1].bias_p.mul_(0.5)
    methods[0].bias_a.fill_(-1.0)  # not legal: what is saved is
    wanted = model(text).logits
    model.save_pretrained(tmp_path)
    again = load_with_positions(tmp_path).eval()
    assert torch.equal(again(text).logits, wanted)
    assert (again.position_methods[0].bias_a >= 0.01).all()
    assert again.position_methods[0].init == "alibi"


def test_loading_without_the_method_fails(tmp_path, monkeypatch):
    """transformers alone does not know the attention's name; with ours registered, the call fails."""
    model, text = made("llama"), texts()
    use_positions(model, "kerple_log")
    model.save_pretrained(tmp_path)
    careless = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="has no position method: call use_positions"):
        careless(text)
    monkeypatch.delitem(transformers.AttentionInterface._global_mapping, "position_method")
    with pytest.raises(ValueError, match='attn_implementation="position_method"` is not supported'):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "shape", "surplus"])
def test_damaged_methods_fail(tmp_path, damage):
    from safetensors.torch import load_file, save_file

    model = made("llama")
    use_positions(model, "kerple_log")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    key = "position_methods.0.bias_a"
    if damage == "missing":
        del state[key]
    elif damage == "shape":
        state[key] = torch.ones(5, 1, 1)
    else:
        state["position_methods.1.bias_a"] = state[key].clone()
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError), match="bias_a"):
        load_with_positions(tmp_path)


def test_the_method_stays_float32():
    model = made("llama")
    methods = use_positions(model, "kerple_log")
    model.to(torch.bfloat16)
    assert methods[0].bias_p.dtype == torch.float32
    assert model(texts()).logits.dtype == torch.bfloat16


REFUSED = {
    "learned": ("llama", {}, {}, "learned acts on the token embeddings, not in attention"),
    "rotary": ("llama", {}, {}, "rotary turns queries and keys, .* own rotary embedding"),
    "randomised_rotary": ("llama", {}, {}, "randomised_rotary turns queries and keys"),
    "fox": ("llama", {}, {}, "fox makes gates of a layer's input"),
    "cable": ("llama", {}, {}, "cable makes gates of a layer's input"),
    "kerpel_log": ("llama", {}, {}, "did you mean kerple_log"),
    "kerple_log": ("llama", {"attention_dropout": 0.1}, {}, "attention_dropout is 0.1"),
    "alibi": ("mistral", {"sliding_window": 8}, {}, "sliding_window is 8: windows are not"),
    "none": ("llama", {}, {"sharing": "head"}, "sharing is 'head'"),
    "rpe": ("llama", {}, {"impl": "flash"}, "implementation 'flash' does not exist"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_model_unchanged(name):
    kind, changes, options, said = REFUSED[name]
    model, text = made(kind, **changes), texts()
    with torch.no_grad():
        before, keys = model(text).logits, list(model.state_dict())
        with pytest.raises(ValueError, match=said):
            use_positions(model, name, **options)
        assert torch.equal(model(text).logits, before) and list(model.state_dict()) == keys


@torch.no_grad()
@pytest.mark.parametrize("name", positions.names())
def test_what_is_put_in_runs(name):
    """A method is refused, or the model reads with it."""
    model, text = made("llama"), texts()
    try:
        use_positions(model, name)
    except ValueError as error:
        assert "it cannot be put into a model of transformers" in str(error)
        assert name in LEFT_OUT
        return
    assert name not in LEFT_OUT
    assert torch.isfinite(model(text).logits).all()


# docs/library.md lists them.
LEFT_OUT = {
    *("cable", "fox", "learned", "randomised_learned", "randomised_rotary"),
    *("randomised_sinusoidal", "rotary", "sinusoidal", "xpos"),
}


def test_models_of_another_build_are_refused():
    small = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 50}
    config = transformers.GPT2Config(**small, attn_pdrop=0.0)
    with pytest.raises(ValueError, match="no rotary embedding that could be replaced"):
        use_positions(transformers.GPT2LMHeadModel(config), "alibi")
    bloom = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=50)
    with pytest.raises(ValueError, match="Bloom"):
        use_positions(transformers.BloomForCausalLM(bloom), "kerple_log", replace=False)
    model = made("llama")
    use_positions(model, "alibi")
    with pytest.raises(ValueError, match="has a position method already"):
        use_positions(model, "alibi")


def test_calls_that_would_be_wrong_are_refused():
    model, text = made("llama"), texts()
    use_positions(model, "kerple_log")
    with pytest.raises(ValueError, match="custom masks are not supported"):
        model(text, attention_mask=torch.zeros(2, 1, 17, 17))
    with pytest.raises(ValueError, match="caches of a fixed size"):
        model.generate(text, max_new_tokens=3, cache_implementation="static", do_sample=False)
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    with pytest.raises(ValueError, match="does not take dropout=0.5"):
        model(text)
