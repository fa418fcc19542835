"""Rotary scalings on trained models: decoding past the training length, raw keys, prompts side by side."""

from __future__ import annotations

import pytest
import standalone_tools as tools
import torch

from megatron_patches.analysis.rows import read_rows
from megatron_patches.attention import attend
from megatron_patches.config import ConfigError
from megatron_patches.standalone import GPT, ModelShape, cli, load_model
from megatron_patches.standalone.cache import Cache
from megatron_patches.standalone.evaluate import Evaluation, Request
from megatron_patches.standalone.generate import generate, left_padded
from megatron_patches.standalone.train import train

TRAINED = 8  # tokens
LENGTHS = (6, 8, 9, 24)  # across the training length
DYNAMIC = {"dynamic_linear": {}, "dynamic_ntk": {"factor": 2}, "dynamic_yarn": {}}
STATIC = {"linear": {"factor": 4}, "ntk": {"factor": 4}, "yarn": {"factor": 4}}


def model(scaling, layers=1, **options):
    options = options or (DYNAMIC | STATIC)[scaling]
    given = {"layers": layers, "hidden_size": 32, "heads": 4, "vocabulary": 50, "seed": 4}
    shape = ModelShape(
        **given,
        max_length=TRAINED,
        pos_emb="rotary",
        init_method_std=0.4,
        position_options={"scaling": scaling, **options},
    )
    return GPT(shape).double().eval()


def ids_of(length, batch=2, seed=1):
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(seed))


def last_rows(made, ids, *, first=1):
    """Logits of the last token at every length: one pass over the prefix each, and with a cache."""
    whole, steps, cache = [], [], Cache.empty(made.shape.layers)
    for end in range(first, ids.shape[1] + 1):
        whole.append(made(ids[:, :end])[:, -1])
        new = ids[:, cache.length : end]
        steps.append(made.logits(made.hidden(new, cache))[:, -1])
    return torch.stack(whole, 1), torch.stack(steps, 1)


@torch.no_grad()
@pytest.mark.parametrize("first", [1, 5, 12])
@pytest.mark.parametrize("scaling", DYNAMIC)
def test_step_by_step_equals_the_whole_pass_at_every_length(scaling, first):
    made, ids = model(scaling), ids_of(max(LENGTHS))
    whole, steps = last_rows(made, ids, first=first)
    for length in (n for n in LENGTHS if n >= first):
        torch.testing.assert_close(
            steps[:, length - first], whole[:, length - first], rtol=1e-9, atol=1e-11
        )
    torch.testing.assert_close(steps, whole, rtol=1e-9, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("scaling", DYNAMIC)
def test_keys_that_were_transformed_at_another_length_would_be_stale(scaling):
    made, ids = model(scaling), ids_of(max(LENGTHS))
    made.position_method.cache = "transformed"
    whole, steps = last_rows(made, ids)
    torch.testing.assert_close(steps[:, :TRAINED], whole[:, :TRAINED])
    assert (steps - whole)[:, TRAINED:].abs().amax((0, 2)).min() > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("scaling", [*DYNAMIC, *STATIC])
def test_deeper_layers(scaling):
    """Their cached keys come from what the layers below computed at a shorter length (see `Rotary`)."""
    made, ids = model(scaling, layers=3), ids_of(max(LENGTHS))
    whole, steps = last_rows(made, ids)
    torch.testing.assert_close(steps[:, :TRAINED], whole[:, :TRAINED], rtol=1e-9, atol=1e-10)
    if scaling in STATIC:
        torch.testing.assert_close(steps, whole, rtol=1e-9, atol=1e-10)
        return
    assert (steps - whole)[:, TRAINED + 1 :].abs().max() > 1e-4
    torch.testing.assert_close(steps, by_hand(made, ids), rtol=1e-9, atol=1e-10)


def by_hand(made, ids):
    """Token by token, with lists of raw keys: what decoding of several layers means here."""
    shape, out = made.shape, []
    layers = [made.sequential[str(n + 2)] for n in range(shape.layers)]
    kept = [([], []) for _ in layers]
    for end in range(1, ids.shape[1] + 1):
        x = made.sequential["0"].word_embeddings(ids[:, end - 1 : end])
        for layer, (keys, values) in zip(layers, kept, strict=True):
            mixed = layer.attention.query_key_value(layer.input_layernorm(x))
            q, k, v = mixed.view(len(x), 1, shape.heads, 3, -1).permute(3, 0, 2, 1, 4)
            keys.append(k)
            values.append(v)
            given = (q, torch.cat(keys, 2), torch.cat(values, 2))
            mixed = attend(*given, made.position_method, impl="reference")
            x = x + layer.attention.dense(mixed.transpose(1, 2).reshape(x.shape))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        out.append(made.logits(made.sequential[str(shape.layers + 3)](x))[:, 0])
    return torch.stack(out, 1)


@torch.no_grad()
@pytest.mark.parametrize("scaling", [*DYNAMIC, *STATIC])
def test_what_is_generated_is_the_likeliest_of_the_whole_text(scaling):
    made = model(scaling)
    for start in (3, TRAINED, 11):
        found = generate(made, ids_of(start), 15)
        for end in range(start, start + 15):
            assert torch.equal(made(found[:, :end])[:, -1].argmax(-1), found[:, end])
    # Nothing of one text is left for the next, longer or shorter.
    assert torch.equal(generate(made, ids_of(3), 15), generate(model(scaling), ids_of(3), 15))


@torch.no_grad()
@pytest.mark.parametrize("scaling", DYNAMIC)
def test_sampling_and_prompts_side_by_side(scaling):
    made = model(scaling)
    prompts = [[3, 14, 15, 9, 2, 6, 5], [35], [8, 9, 7, 9, 1, 2, 3, 4, 5, 6, 7]]
    ids, padding = left_padded(prompts, filler=41)
    found = generate(made, ids, 14, padding_BL=padding)
    for row, prompt in enumerate(prompts):
        alone = generate(made, torch.tensor([prompt]), 14)
        assert torch.equal(found[row, ids.shape[1] - len(prompt) :], alone[0])
    sampled = generate(made, ids_of(5), 14, temperature=0.7, top_k=5, seed=3)
    assert torch.equal(sampled, generate(made, ids_of(5), 14, temperature=0.7, top_k=5, seed=3))
    assert not torch.equal(sampled, generate(made, ids_of(5), 14))
    for end in range(5, 19):  # each among the five likeliest of its own length
        best = made(sampled[:, :end])[:, -1].topk(5).indices
        assert (best == sampled[:, end : end + 1]).any(1).all()


@pytest.fixture(scope="module")
def trained_rotary(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rotary") / "run"
    return train(tools.tiny(request.getfixturevalue("text"), folder, pos_emb="rotary"))


def test_a_plain_checkpoint_is_read_with_every_scaling(trained_rotary, tmp_path):
    output = tmp_path / "rows.jsonl"
    command = ["--checkpoint", str(trained_rotary), "--lengths", "16", "96", "--output"]
    settings = [{}, *({"scaling": name, **more} for name, more in (DYNAMIC | STATIC).items())]
    for options in settings:
        words = [f"--position-option={key}={value}" for key, value in options.items()]
        assert cli.eval_main([*command, str(output), *words]) == 0
    rows = read_rows(output)
    assert [row.options.get("eval_position_options", {}) for row in rows[::2]] == settings
    short = {row.loss for row in rows[:2:2]} | {
        row.loss for row in rows[2 : 2 + 2 * len(DYNAMIC) : 2]
    }
    assert len(short) == 1  # the dynamic ones leave alone what is no longer than the training
    assert len({row.loss for row in rows[1::2]}) == len(settings)
    assert all(row.status == "ok" for row in rows)


def test_the_order_of_evaluations_does_not_matter(trained_rotary):
    """Public code keeps the longest length seen (zoo: 4096 then 1024)."""

    def losses(*lengths):
        request = Request(lengths, position_options={"scaling": "dynamic_ntk"}, max_tokens=257)
        evaluation = Evaluation(trained_rotary, request)
        return {row.eval_length: row.window_losses for row in evaluation.run(None, lambda _: None)}

    assert losses(256, 64, 16) == losses(16, 64, 256)
    assert losses(256, 64)[64] == losses(256, 16, 64)[64]


def test_values_that_rotary_refuses(trained_rotary, capsys):
    for words, told in (
        (["scaling=yarn"], "`eval_position_options`: rotary: scaling=yarn needs factor"),
        (
            ["rotary_emb_base=500000"],
            "not read with another rotary_emb_base; what may be set: scaling",
        ),
    ):
        given = [f"--position-option={word}" for word in words]
        assert cli.eval_main(["--checkpoint", str(trained_rotary), *given]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(ConfigError, match="factor=0.5 must be a number of at least 1"):
        load_model(trained_rotary, position_options={"scaling": "linear", "factor": 0.5})


def test_a_model_trained_with_a_scaling_can_be_read_without(config):
    made = config(
        pos_emb="rotary", position_options={"scaling": "yarn", "factor": 2}, train_iters=2
    )
    folder = train(made)
    assert load_model(folder).position_method.settings()["options"]["scaling"] == "yarn"
    with pytest.raises(ConfigError, match="factor=2 means nothing to scaling=none"):
        load_model(folder, position_options={"scaling": "none"})
    plain = load_model(folder, position_options={"scaling": "none", "factor": None})
    assert "scaling" not in plain.position_method.settings()["options"]
