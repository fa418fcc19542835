"""Settings under which a method would be lost are refused, with what to do; all others pass."""

from __future__ import annotations

from typing import Any

import pytest
from neox_tools import (
    ADDED,
    ATTEND_ONLY,
    FOLLOWING,
    GATED,
    INSERTED,
    LEARNS_ONCE,
    NATIVE,
    POSSIBLE,
    PRODUCT,
    REPLICATED,
    carrying,
    make_args,
    overrides,
    parameters_of,
)

from megatron_patches import positions
from megatron_patches.neox import refusals
from megatron_patches.positions import method_class

ATTEND = [[["attend"], "all"]]
MIXED = [[["attend", "global"], 1]]
NEXT_STEP = "attention_config: [[[attend], all]]"
OURS = [name for name in POSSIBLE if name not in NATIVE]
ON_SCORES = [
    name
    for name in POSSIBLE
    if name in OURS or overrides(method_class(name), "bias", "weight", "score", "decay")
]
BLIND = ("local", "sparse_fixed", "sparse_variable", "bigbird", "bslongformer")
FLASH_CARRIES = {"alibi"}  # its kernel takes slopes
NO_ATTENTION = ("gmlp", "amlp", "rwkv", "mamba")


def layers(kind: str) -> list[Any]:
    return [[[kind], "all"]]


pytestmark = pytest.mark.usefixtures("parsing")


def refused(**changes: Any) -> str:
    with pytest.raises(ValueError, match="would lose its position method") as caught:
        make_args(**changes)
    return str(caught.value)


@pytest.mark.parametrize("kind", [*BLIND, *NO_ATTENTION])
@pytest.mark.parametrize("name", ON_SCORES)
def test_layers_that_ignore_the_method(name, kind):
    message = refused(pos_emb=name, attention_config=layers(kind))
    assert f"attention_config {kind}: its layers ignore {name}" in message and NEXT_STEP in message
    other = [[["global", kind], 1]]
    assert f"attention_config {kind}:" in refused(pos_emb=name, attention_config=other)


@pytest.mark.parametrize("name", ON_SCORES)
def test_flash_carries_slopes_alone(name):
    if name in FLASH_CARRIES:
        assert make_args(pos_emb=name, attention_config=layers("flash")).pos_emb == name
        return
    message = refused(pos_emb=name, attention_config=layers("flash"))
    assert f"attention_config flash: its layers ignore {name}" in message and NEXT_STEP in message


@pytest.mark.parametrize("key", ["te_mha", "te_fp8_mha"])
@pytest.mark.parametrize("name", ON_SCORES)
def test_transformer_engine(name, key):
    message = refused(pos_emb=name, **{key: True})
    assert f"{key}: Transformer Engine's attention ignores {name}" in message
    assert NEXT_STEP in message


@pytest.mark.parametrize("name", ON_SCORES)
def test_score_scaling(name):
    message = refused(pos_emb=name, apply_query_key_layer_scaling=True)
    assert "apply_query_key_layer_scaling" in message and "set it to false" in message
    assert NEXT_STEP in message
    mixed = {"attention_config": MIXED, "apply_query_key_layer_scaling": True}
    assert "apply_query_key_layer_scaling" in refused(pos_emb=name, **mixed)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout 0.1: |set it to 0"),
        ({"use_mup": True}, "use_mup: |use attention_config global"),
        ({"te_mha": True}, "te_mha: Transformer Engine replaces |set it to false"),
        ({"te_fp8_mha": True}, "te_fp8_mha: Transformer Engine replaces |set it to false"),
    ],
)
@pytest.mark.parametrize("config", [ATTEND, MIXED])
@pytest.mark.parametrize("name", [OURS[0], *sorted(NATIVE)])
def test_what_layers_of_type_attend_cannot_do(name, config, changes, expected):
    message = refused(pos_emb=name, attention_config=config, **changes)
    assert all(part in message for part in expected.split("|"))


@pytest.mark.parametrize("name", [OURS[0], *sorted(NATIVE)])
def test_an_implementation_that_nobody_reads(name):
    message = refused(pos_emb=name, attention_impl="chunked")
    assert "attention_impl chunked: only layers of type `attend` read it" in message
    assert NEXT_STEP in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"position_init": "alibi"}, "position_init alibi: GPT-NeoX's own {} has no such choice"),
        ({"position_precision": "as_published"}, "position_precision as_published: GPT-NeoX's own"),
        ({"position_options": {"a": 1}}, "position_options: GPT-NeoX's own {} takes none"),
    ],
)
@pytest.mark.parametrize("name", sorted(NATIVE - set(INSERTED)))
def test_choices_that_neoxs_own_methods_do_not_have(name, changes, expected):
    assert expected.format(name) in refused(pos_emb=name, **changes)


LIMITED = [
    name
    for name in POSSIBLE
    if positions.build(name, heads=1, head_dim=2, hidden_size=2, max_length=8).max_length
]


@pytest.mark.parametrize("name", LIMITED)
def test_a_table_that_ends_before_the_validation_length(name):
    message = refused(pos_emb=name, seq_length_val=65)
    assert f"seq_length_val 65: {name} cannot read 65 tokens" in message and "64" in message
    assert make_args(pos_emb=name, seq_length_val=64).seq_length_val == 64


@pytest.mark.parametrize("name", sorted(set(POSSIBLE) - set(LIMITED)))
def test_any_validation_length_without_a_table(name):
    assert make_args(pos_emb=name, seq_length_val=4096, **carrying(name)).seq_length_val == 4096


@pytest.mark.parametrize("name", [n for n in REPLICATED if not method_class(n).mixes_heads])
def test_what_tensor_parallel_ranks_would_learn_apart(name):
    message = refused(pos_emb=name, model_parallel_size=2, **carrying(name))
    alike = [key for key, dimension in parameters_of(name).items() if dimension is None]
    assert f"model_parallel_size 2: each rank would learn {', '.join(alike)} of {name}" in message
    assert make_args(pos_emb=name, model_parallel_size=1, **carrying(name)).pos_emb == name


@pytest.mark.parametrize("name", GATED)
def test_what_needs_the_input_of_the_layer(name):
    for changes in ({}, {"attention_config": ATTEND}):
        message = refused(pos_emb=name, **changes)
        assert f"{name} has gates from the layer's input" in message and message.count("\n") == 1


@pytest.mark.parametrize("name", FOLLOWING)
def test_what_needs_the_length_of_the_text(name):
    for changes in ({}, {"attention_config": ATTEND}):
        message = refused(pos_emb=name, **changes)
        assert f"{name} places tokens by the length of the whole text" in message
        assert message.count("\n") == 1


MIXING = [name for name in POSSIBLE if method_class(name).mixes_heads]


@pytest.mark.parametrize("name", MIXING)
def test_what_needs_the_scores_of_all_heads(name):
    message = refused(pos_emb=name, model_parallel_size=2, attention_config=ATTEND)
    assert f"model_parallel_size 2: {name} mixes the scores of all heads" in message
    assert "set it to 1" in message and "would learn" not in message
    assert make_args(pos_emb=name, model_parallel_size=1, attention_config=ATTEND).pos_emb == name


def test_all_problems_are_named_at_once():
    message = refused(
        pos_emb=LEARNS_ONCE, attention_config=[[["flash", "global"], 1]], te_mha=True, use_mup=False,
        apply_query_key_layer_scaling=True, attention_impl="flex",
    )  # fmt: skip
    keys = ("attention_config flash", "te_mha", "apply_query_key_layer_scaling", "attention_impl")
    assert all(f"\n  {key}" in message for key in keys) and message.count("\n") == len(keys)


@pytest.mark.parametrize("name", POSSIBLE)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_config": ATTEND},
        {"attention_config": ATTEND, "attention_impl": "chunked"},
        {"attention_config": MIXED},
        {"attention_config": ATTEND, "apply_query_key_layer_scaling": True},
        {"num_kv_heads": 2},
        {"num_kv_heads": 2, "attention_config": ATTEND},
        {"sliding_window_width": 4, "attention_config": ATTEND},
        {"attention_dropout": 0.1},
        {"use_mup": True},
    ],
)
def test_what_carries_the_method_passes(name, changes):
    changes = {**changes, **carrying(name)}
    if name in ATTEND_ONLY and not {"attention_dropout", "use_mup"}.isdisjoint(changes):
        assert "layers of type `attend`" in refused(pos_emb=name, **changes)
        return
    made = make_args(pos_emb=name, **changes)
    assert made.pos_emb == name


@pytest.mark.parametrize("name", sorted(NATIVE - set(ON_SCORES)))
@pytest.mark.parametrize("kind", [*BLIND, *NO_ATTENTION, "flash"])
def test_methods_that_do_not_touch_the_scores_go_with_any_layer(name, kind):
    assert make_args(pos_emb=name, attention_config=layers(kind), te_mha=True).pos_emb == name


# ---- methods that do not exist yet ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, None),
        ({"tier": "content"}, "rewrites whole rows of scores"),
        ({"transform": lambda self, q, k, positions, **_: (q, k)}, "NeoX would not apply"),
        ({"place": "embedding"}, "NeoX would not apply"),
    ],
)
def test_methods_that_need_more_than_a_bias_need_attend(monkeypatch, attributes, expected):
    name = ADDED[0]
    args = make_args(pos_emb=name)
    attend = make_args(pos_emb=name, attention_config=ATTEND)
    kind = type("New", (method_class(name),), {"name": name, **attributes})
    monkeypatch.setattr(positions, "method_class", lambda _: kind)
    assert refusals.problems(attend, name, NATIVE) == []
    found = refusals.problems(args, name, NATIVE)
    if expected is None:
        assert found == []
    else:
        assert len(found) == 1 and found[0].startswith("attention_config global: ")
        assert expected in found[0] and NEXT_STEP in found[0]


def test_both_kinds_of_kernel_are_tried():
    assert len(PRODUCT) > 2 and len(ADDED) > 4
