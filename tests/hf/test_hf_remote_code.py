"""The file that goes along with the weights: cache, padding, blocks, training, refusals."""

from __future__ import annotations

import pytest
import torch
from hf_cases import CARRIED, LENGTH, VOCABULARY, a_run, tokens

pytest.importorskip("transformers", reason="transformers is not installed")

from megatron_patches.hf import describing, modeling_gpt_positions  # noqa: E402
from megatron_patches.hf.naming import renamed  # noqa: E402
from megatron_patches.standalone import GPT, load_model  # noqa: E402


def pair(tmp_path, method: str, **changes) -> tuple[GPT, torch.nn.Module]:
    """Our model and the carried code's with the same weights."""
    ours = load_model(a_run(tmp_path / "run", method, **changes))
    made = modeling_gpt_positions.GPTPositionsForCausalLM(
        describing.model_config(ours, LENGTH, eod=0)
    )
    made.load_state_dict(renamed(ours, neox=False), strict=True)
    return ours, made.eval()


@torch.no_grad()
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("method", CARRIED)
def test_the_cache_equals_recomputation(tmp_path, method, window):
    _, model = pair(tmp_path, method, sliding_window_width=window)
    text, cache, parts, at = tokens(2, LENGTH), None, [], 0
    for block in (5, 1, 3, 1, LENGTH - 10):
        out = model(text[:, at : at + block], past_key_values=cache, use_cache=True)
        cache = out[modeling_gpt_positions.CACHE]
        parts.append(out.logits)
        at += block
    whole = model(text, use_cache=False)
    assert whole.get(modeling_gpt_positions.CACHE) is None
    torch.testing.assert_close(torch.cat(parts, dim=1), whole.logits, atol=2e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("method", CARRIED)
def test_padded_rows_equal_single_ones(tmp_path, method):
    """Left and right padding, by whatever ids; generation from a padded batch as well."""
    _, model = pair(tmp_path, method)
    long, short = tokens(1, 9), tokens(1, 5, seed=2)
    for left in (True, False):
        batch = torch.full((2, 9), 3)
        mask = torch.zeros(2, 9, dtype=torch.int64)
        where = slice(4, 9) if left else slice(0, 5)
        batch[0], batch[1, where] = long, short
        mask[0], mask[1, where] = 1, 1
        found = model(batch, attention_mask=mask).logits
        assert torch.isfinite(found).all()
        close = {"atol": 2e-5, "rtol": 1e-5}
        torch.testing.assert_close(found[:1], model(long).logits, **close)
        torch.testing.assert_close(found[1:, where], model(short).logits, **close)
        if left:
            both = model.generate(batch, attention_mask=mask, max_new_tokens=6, do_sample=False)
            alone = model.generate(short, max_new_tokens=6, do_sample=False)
            assert torch.equal(both[1, 4:], alone[0])
            recomputed = model.generate(
                batch, attention_mask=mask, max_new_tokens=6, do_sample=False, use_cache=False
            )
            assert torch.equal(recomputed, both)


@pytest.mark.parametrize("method", ["kerple_power_weight", "rpe", "none"])
def test_training_gives_our_gradients(tmp_path, method, monkeypatch):
    """In blocks that are recomputed, with a last one that is not full."""
    monkeypatch.setattr(modeling_gpt_positions, "BLOCK", 5)
    ours, theirs = pair(tmp_path, method)
    text = tokens(2, LENGTH + 1)
    wanted = ours(text[:, :-1], text[:, 1:])
    labels = text.clone()
    found = theirs(text, labels=labels)
    torch.testing.assert_close(found.loss, wanted, atol=1e-5, rtol=1e-5)
    wanted.backward()
    found.loss.backward()
    gradients = {key: p.grad for key, p in theirs.named_parameters()}
    for key, name in names(ours).items():
        ours_grad = ours.get_parameter(key).grad if method != "rpe" else grad_of(ours, key)
        torch.testing.assert_close(gradients[name], ours_grad, atol=2e-5, rtol=1e-4)
    labels[:, 3:] = -100  # are left out
    part = theirs(text, labels=labels).loss
    shown = torch.nn.functional.cross_entropy(
        ours(text)[:, :2].flatten(0, 1), text[:, 1:3].flatten()
    )
    torch.testing.assert_close(part, shown, atol=1e-5, rtol=1e-5)


def names(model: GPT) -> dict[str, str]:
    from megatron_patches.hf.naming import carried_name

    return {key: carried_name(key, model) for key, _ in model.named_parameters()}


def grad_of(model: GPT, key: str) -> torch.Tensor:
    return dict(model.named_parameters())[key].grad


@torch.no_grad()
def test_blocks_change_nothing(tmp_path, monkeypatch):
    _, model = pair(tmp_path, "kerple_log", sliding_window_width=6)
    text = tokens(1, 3 * LENGTH)
    whole = model(text).logits
    for block in (1, 7, LENGTH):
        monkeypatch.setattr(modeling_gpt_positions, "BLOCK", block)
        torch.testing.assert_close(model(text).logits, whole, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_what_is_kept(tmp_path):
    _, model = pair(tmp_path, "alibi")
    text = tokens(2, 8)
    whole = model(text, output_hidden_states=True)
    assert len(whole.hidden_states) == 3
    torch.testing.assert_close(model.lm_head(whole.hidden_states[-1]), whole.logits)
    assert torch.equal(model(text, logits_to_keep=3).logits, whole.logits[:, -3:])
    picked = torch.tensor([0, 5])
    assert torch.equal(model(text, logits_to_keep=picked).logits, whole.logits[:, picked])
    embedded = model(inputs_embeds=model.get_input_embeddings()(text)).logits
    assert torch.equal(embedded, whole.logits)


def test_refusals(tmp_path):
    _, model = pair(tmp_path, "learned")
    with pytest.raises(ValueError, match=f"end at {LENGTH} tokens"):
        model(tokens(1, LENGTH + 1))
    text = tokens(1, 6)
    with pytest.raises(ValueError, match="has a hole"):
        model(text, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]]))
    with pytest.raises(ValueError, match=r"must be \[batch, 6\]"):
        model(text, attention_mask=torch.ones(1, 5))
    with pytest.raises(TypeError, match="does not take position_ids"):
        model(text, position_ids=torch.arange(6)[None])
    with pytest.raises(TypeError, match="output_attentions"):
        model(text, output_attentions=True)
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        model(text, inputs_embeds=model.embed_in(text))
    with pytest.raises(ValueError, match="caches of a fixed size are not supported"):
        model.generate(text, max_new_tokens=3, cache_implementation="static", do_sample=False)
    model.config.output_attentions = True
    with pytest.raises(TypeError, match="output_attentions"):
        model(text)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"position": "kerpel_log"}, "position 'kerpel_log' is none of kerple_log"),
        ({"position_sharing": "head"}, "position_sharing 'head' is none of model, layer"),
        ({"position_dtype": "load"}, "position_dtype 'load' is none of float32"),
        ({"attention_window": 0}, "attention_window 0 lets a query see nothing"),
        ({"rpe_num_buckets": 1}, "rpe_num_buckets 1 must be even"),
        ({"rpe_num_buckets": 5}, "rpe_num_buckets 5 must be even"),
        ({"rpe_max_distance": 16}, "rpe_max_distance 16 more than half"),
    ],
)
def test_configurations_without_a_meaning(values, said):
    with pytest.raises(ValueError, match=said):
        modeling_gpt_positions.GPTPositionsConfig(**values)


@torch.no_grad()
def test_the_configuration_says_what_a_call_leaves_open(tmp_path):
    _, model = pair(tmp_path, "alibi")
    text = tokens(2, 8)
    whole = model(text)
    parts = model(text, use_cache=False, return_dict=False)
    assert type(parts) is tuple and len(parts) == 1
    torch.testing.assert_close(parts[0], whole.logits)
    model.config.return_dict, model.config.output_hidden_states = False, True
    logits, _, states = model(text)
    torch.testing.assert_close(logits, whole.logits)
    assert len(states) == 3
    assert model(text, output_hidden_states=False, return_dict=True).hidden_states is None


@torch.no_grad()
@pytest.mark.parametrize("method", CARRIED)
def test_autocast_leaves_scores_and_tables_exact(tmp_path, method):
    """Linear layers round, as they should; the attention between them gets what they give."""
    _, model = pair(tmp_path, method)
    text, cpu = tokens(2, LENGTH), torch.device("cpu")
    exact, tables = model(text).logits, model.position[0].tables(300, cpu)
    model.position[0].dtype = torch.bfloat16
    rounded = model.position[0].tables(300, cpu)
    with torch.autocast("cpu", torch.bfloat16):
        again = model.position[0].tables(300, cpu)
        model.position[0].dtype = torch.float32
        found, same = model(text).logits, model.position[0].tables(300, cpu)
    for wanted, table in zip((*tables, *rounded), (*same, *again), strict=True):
        assert table is None if wanted is None else torch.equal(table, wanted)
    assert found.dtype == torch.bfloat16
    # 2 layers of products in bfloat16, whose numbers have 8 bits
    assert (found.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_scores_are_float32_under_autocast():
    """Scores of hundreds, which bfloat16 would round to whole numbers; the softmax of them by hand."""
    q = torch.tensor([[[[0.0, 0.0], [16.0, 16.0]]]], dtype=torch.bfloat16)
    k = torch.tensor([[[[16.0, 16.0], [16.0, 16.125]]]], dtype=torch.bfloat16)
    v = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]], dtype=torch.bfloat16)
    seen = modeling_gpt_positions.Seen(2, None, None)
    with torch.autocast("cpu", torch.bfloat16):
        out = seen.block(q, k, v, (None, None), 0)
    share = 1 / (1 + 2.718281828 ** (-(16 * 0.125) / 2**0.5))
    wanted = torch.tensor([1 - share, share])
    torch.testing.assert_close(out[0, 0, 1].float(), wanted, atol=5e-3, rtol=0)


def test_what_training_carried_past_the_limits_can_be_loaded_again(tmp_path):
    """A plain optimizer knows no limits: what is saved are the numbers that the model computed with."""
    _, model = pair(tmp_path, "kerple_power")
    with torch.no_grad():
        model.position[0].bias_p.copy_(torch.tensor([-1.0, 0.5, 7.0]).view(3, 1, 1))
        model.position[0].bias_a.fill_(-2.0)
        wanted = model(tokens(1, 9)).logits
    model.save_pretrained(tmp_path / "saved")
    assert model.position[0].bias_p.flatten().tolist() == [
        -1.0,
        0.5,
        7.0,
    ]  # training goes on from these
    again = modeling_gpt_positions.GPTPositionsForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.position[0].bias_p.flatten().tolist() == pytest.approx([0.01, 0.5, 2.0])
    torch.testing.assert_close(again(tokens(1, 9)).logits, wanted)


@torch.no_grad()
def test_positions_stay_float32_in_a_bfloat16_model(tmp_path):
    """300 distances are 300 values; bfloat16 holds whole numbers up to 256 only."""
    ours, _ = pair(tmp_path, "alibi")
    config = describing.model_config(ours, LENGTH, eod=0)
    model = modeling_gpt_positions.GPTPositionsForCausalLM(config).to(torch.bfloat16)
    bias_HK, _ = model.position[0].tables(600, torch.device("cpu"))
    assert bias_HK.dtype == torch.float32 and len(bias_HK[0].unique()) == 600
    assert model(tokens(1, 600)).logits.dtype == torch.bfloat16


def test_the_trainer_of_a_fresh_model():
    """Without weights: `from_config` starts legal, learns, and stays legal in what it computes."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2}
    config = modeling_gpt_positions.GPTPositionsConfig(
        **sizes, num_attention_heads=3, intermediate_size=48, position="kerple_power"
    )
    model = modeling_gpt_positions.GPTPositionsForCausalLM(config)
    before = model.position[0].bias_p.detach().clone()
    model.position[0].check()
    text = (torch.arange(24) % 7)[None]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model(text, labels=text).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    assert not torch.equal(model.position[0].bias_p, before)
