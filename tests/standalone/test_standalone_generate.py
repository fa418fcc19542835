"""Reading token by token from a cache gives what reading everything anew gives, padded or not."""

from __future__ import annotations

import pytest
import torch

from megatron_patches import positions
from megatron_patches.standalone.cache import Cache, planned
from megatron_patches.standalone.generate import generate, left_padded
from megatron_patches.standalone.model import GPT, ModelShape

LENGTH = 40
FOLLOWING = [name for name in positions.names() if positions.method_class(name).follows_length]


def model(name: str, **changes) -> GPT:
    given = {"layers": 2, "hidden_size": 24, "heads": 2, "vocabulary": 50, "max_length": LENGTH}
    made = GPT(ModelShape(**{**given, **changes}, pos_emb=name, init_method_std=0.3, seed=4))
    return made.eval()


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "changes", [{}, {"window": 9}, {"window": ("blockwise", 6)}, {"parallel_residual": True}]
)
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
            with planned(made.methods, LENGTH):
                parts.append(made.logits(made.hidden(text[:, at : at + block], cache)))
            at += block
            assert cache.length == at
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", positions.names())
def test_beyond_the_table(name, prompt):
    span = {"position_options": {"span": LENGTH}} if "span" in positions.options(name) else {}
    made = model(name, **span)
    limit = made.position_method.max_length
    if limit is None:
        assert generate(made, prompt, LENGTH).shape == (2, LENGTH + 7)
        return
    assert limit == LENGTH
    with pytest.raises(ValueError, match=f"cannot read {LENGTH + 1} tokens"):
        generate(made, prompt, LENGTH - 6)
    cache = Cache.empty(2)
    with planned(made.methods, LENGTH):
        made.hidden(torch.zeros(1, LENGTH, dtype=torch.int64), cache)
        with pytest.raises(ValueError, match="cannot read|a text that was planned with"):
            made.hidden(torch.zeros(1, 1, dtype=torch.int64), cache)


@pytest.mark.parametrize("name", FOLLOWING)
def test_a_cache_needs_the_length_where_places_follow_it(name):
    made = model(name)
    with pytest.raises(ValueError, match=f"with {name} a token's place follows the length"):
        made.hidden(torch.zeros(1, 3, dtype=torch.int64), Cache.empty(2))
    assert made.position_method.planned_length is None


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


def test_extreme_temperatures_and_more_choices_than_tokens(prompt):
    made = model("kerple_log")
    likeliest = generate(made, prompt, 10)
    for cold in (1e-3, 1e-40, 5e-324):  # the last two are 0 or subnormal in float32
        assert torch.equal(generate(made, prompt, 10, temperature=cold), likeliest)
    # Far above every logit: each of the 30 entries as often, and none of the padding.
    many = prompt[:1].expand(3000, -1)
    found = generate(made, many, 1, temperature=1e300, vocabulary=30)[:, -1]
    counts = torch.bincount(found, minlength=50)
    assert (counts[:30] - 100).abs().max() < 50 and counts[30:].sum() == 0
    free = generate(made, prompt, 10, temperature=1.0)
    assert torch.equal(generate(made, prompt, 10, temperature=1.0, top_k=60), free)
    within = generate(made, prompt, 10, temperature=1.0, vocabulary=30)
    assert torch.equal(generate(made, prompt, 10, temperature=1.0, vocabulary=30, top_k=40), within)
    assert torch.equal(generate(made, prompt, 0), prompt)


WRONG = [
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("top_k", 0),
    ("top_k", -3),
    ("vocabulary", -1),
    ("vocabulary", 0),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_settings_without_a_meaning_are_named(prompt, key, value):
    with pytest.raises(ValueError, match=f"^{key}={value}: give"):
        generate(model("none"), prompt, 1, **{"temperature": 1.0, key: value})
    with pytest.raises(ValueError, match="^tokens=-1: give"):
        generate(model("none"), prompt, -1)


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


# ---- several prompts -------------------------------------------------------------------------

PROMPTS = [[3, 14, 15, 9, 2, 6, 5], [35], [8, 9, 7, 9], [3, 2, 3, 8, 4, 6, 2]]


@pytest.mark.parametrize("changes", [{}, {"window": 5}])
@pytest.mark.parametrize("name", [name for name in positions.names() if name not in FOLLOWING])
def test_left_padded_batches_equal_single_runs(name, changes):
    """Logits in blocks of several tokens, and what is generated, whatever lies under the padding."""
    made = model(name, **changes)
    ids, padding = left_padded(PROMPTS, filler=41)
    new = (
        20 if made.position_method.max_length else LENGTH
    )  # past the training length where possible
    texts = generate(made, ids, new, padding_BL=padding)
    total = ids.shape[1] + new
    whole_padding = torch.cat([padding, torch.zeros(4, new, dtype=torch.bool)], dim=1)
    with torch.no_grad():
        cache, parts, at = Cache.empty(2), [], 0
        for block in (4, 3, 1, 5, new - 6):
            seen = whole_padding[:, : at + block]
            with planned(made.methods, total):
                parts.append(made.logits(made.hidden(texts[:, at : at + block], cache, seen)))
            at += block
        blocks = torch.cat(parts, dim=1)
        for row, prompt in enumerate(PROMPTS):
            start = 7 - len(prompt)
            alone = torch.tensor([prompt])
            assert torch.equal(texts[row, start:], generate(made, alone, new)[0])
            with planned(made.methods, total):
                logits = made(texts[row : row + 1, start:])[0]
            assert torch.equal(logits[len(prompt) - 1 : -1].argmax(-1), texts[row, 7:])
            torch.testing.assert_close(blocks[row, start:], logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FOLLOWING)
def test_places_that_follow_the_length_take_no_padding(name):
    """One length is planned for the batch, so that shorter rows would not go on as they do alone."""
    made = model(name)
    ids, padding = left_padded(PROMPTS)
    for call in (
        lambda: generate(made, ids, 3, padding_BL=padding),
        lambda: made.hidden(ids, None, padding),
        lambda: made.hidden(ids, None, padding.flip(1)),
    ):
        with pytest.raises(ValueError, match=f"with {name} .* one by one"):
            call()
    none = torch.zeros_like(padding)
    text = generate(made, ids, 9, padding_BL=none)
    assert torch.equal(text, generate(made, ids, 9))
    for row in (0, 3):  # prompts of one length side by side
        assert torch.equal(text[row], generate(made, ids[row : row + 1], 9)[0])
    with torch.no_grad():
        found = made.logits(made.hidden(ids, None, none))
        torch.testing.assert_close(found, made(ids), atol=1e-5, rtol=1e-5)


def test_blocks_count_from_the_first_key():
    """So prompts under padding would be cut elsewhere than alone, and are refused."""
    made = model("kerple_log", window=("blockwise", 5))
    ids, padding = left_padded(PROMPTS)
    with pytest.raises(ValueError, match="blockwise windows count from the first key"):
        generate(made, ids, 3, padding_BL=padding)
    assert generate(made, ids[:1], 3).shape == (1, 10)


def test_a_finished_row_waits_for_the_others():
    made = model("kerple_log")
    ids, padding = left_padded(PROMPTS)
    free = generate(made, ids, 12, padding_BL=padding)
    stop = int(free[1, 9])
    found = generate(made, ids, 12, padding_BL=padding, stop=stop)
    for row in range(4):
        new = free[row, 7:].tolist()
        wanted = new[: new.index(stop) + 1] if stop in new else new
        assert found[row, 7 : 7 + len(wanted)].tolist() == wanted
        assert set(found[row, 7 + len(wanted) :].tolist()) <= {stop}


def test_padding_that_does_not_stand_left():
    made, ids = model("none"), torch.ones(2, 4, dtype=torch.int64)
    for wrong in ([[0, 0, 1, 0]] * 2, [[0, 0, 0, 1]] * 2, [[1, 1, 1, 1]] * 2, [[1, 0, 0]] * 2):
        with pytest.raises(ValueError, match="at their left only"):
            generate(made, ids, 2, padding_BL=torch.tensor(wrong, dtype=torch.bool))
    for empty in ([], [[1], []]):
        with pytest.raises(ValueError, match="no tokens"):
            left_padded(empty)
