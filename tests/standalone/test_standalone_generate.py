"""Reading token by token from a cache gives what reading everything anew gives."""

from __future__ import annotations

import pytest
import torch

from megatron_patches import positions
from megatron_patches.standalone.generate import generate
from megatron_patches.standalone.model import GPT, Cache, ModelShape

LENGTH = 40


def model(name: str, **changes) -> GPT:
    given = {"layers": 2, "hidden_size": 24, "heads": 2, "vocabulary": 50, "max_length": LENGTH}
    made = GPT(ModelShape(**{**given, **changes}, pos_emb=name, init_method_std=0.3, seed=4))
    return made.eval()


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("changes", [{}, {"window": 9}, {"parallel_residual": True}])
@pytest.mark.parametrize("name", positions.names())
def test_cached_decoding_equals_recomputation(name, prompt, changes):
    made = model(name, **changes)
    text = generate(made, prompt, LENGTH - 7)
    assert text.shape == (2, LENGTH) and (text[:, :7] == prompt).all()
    with torch.no_grad():
        whole = made(text)
        assert (whole[:, 6:-1].argmax(-1) == text[:, 7:]).all()
        cache, parts, at = Cache.empty(2), [], 0
        for block in (7, 1, 5, 1, 1, LENGTH - 15):
            parts.append(made.logits(made.hidden(text[:, at : at + block], cache)))
            at += block
            assert cache.length == at
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", positions.names())
def test_beyond_the_table(name, prompt):
    made = model(name)
    limit = made.position_method.max_length
    if limit is None:
        assert generate(made, prompt, LENGTH).shape == (2, LENGTH + 7)
        return
    assert limit == LENGTH
    with pytest.raises(ValueError, match=f"cannot read {LENGTH + 1} tokens"):
        generate(made, prompt, LENGTH - 6)
    cache = Cache.empty(2)
    made.hidden(torch.zeros(1, LENGTH, dtype=torch.int64), cache)
    with pytest.raises(ValueError, match="cannot read"):
        made.hidden(torch.zeros(1, 1, dtype=torch.int64), cache)


def test_padding_ids_are_never_produced(prompt):
    made = model("kerple_log")
    # Make the padding the likeliest by far.
    made.sequential["6"].final_linear.weight.data[30:] *= 50
    assert (generate(made, prompt, 20)[:, 7:] >= 30).any()
    assert (generate(made, prompt, 20, vocabulary=30)[:, 7:] < 30).all()
    sampled = generate(made, prompt, 60, temperature=2.0, vocabulary=30)
    assert (sampled[:, 7:] < 30).all()


def test_sampling_has_a_seed_of_its_own(prompt):
    made = model("alibi")
    torch.manual_seed(0)
    first = generate(made, prompt, 20, temperature=1.0, seed=3)
    torch.manual_seed(99)
    assert torch.equal(generate(made, prompt, 20, temperature=1.0, seed=3), first)
    assert not torch.equal(generate(made, prompt, 20, temperature=1.0, seed=4), first)
    likeliest = generate(made, prompt, 20)
    assert torch.equal(generate(made, prompt, 20, temperature=1.0, top_k=1, seed=3), likeliest)


def test_sampling_follows_the_distribution(prompt):
    made = model("none")
    many = prompt[:1].expand(4000, -1)
    found = generate(made, many, 1, temperature=0.7, seed=2)[:, -1]
    with torch.no_grad():
        wanted = (made(prompt[:1])[0, -1] / 0.7).softmax(-1)
    shares = torch.bincount(found, minlength=50) / 4000
    assert (shares - wanted).abs().max() < 0.03


def test_it_stops(prompt):
    made = model("rotary")
    text = generate(made, prompt[:1], 20)
    third = int(text[0, 9])
    stopped = generate(made, prompt[:1], 20, stop=third)
    end = 8 + text[0, 7:].tolist().index(third)
    assert torch.equal(stopped, text[:, :end])


def test_a_prompt_is_needed():
    with pytest.raises(ValueError, match="no tokens"):
        generate(model("none"), torch.zeros(1, 0, dtype=torch.int64), 3)
