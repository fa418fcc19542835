"""This suite's configuration keys as arguments of GPT-NeoX."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

import pytest
from neox_tools import ATTEND_ONLY, INSERTED, LEFT_OUT, NATIVE, POSSIBLE, carrying, make_args

from megatron_patches import positions
from megatron_patches.config.keys_own import Own
from megatron_patches.neox import arguments

ATTEND = [[["attend"], "all"]]
# A value for every key of ours that is not its default.
VALUES: dict[str, Any] = {
    "dataset": "local_code",
    "run_name": "one",
    "position_options": {"init": "alibi"},
    "position_sharing": "layer",
    "position_init": "alibi",
    "position_precision": "as_published",
    "position_weight_decay": True,
    "attention_impl": "chunked",
    "variant": {"norm": "pre"},
    "watch_loss_multiple": 5.0,
    "watch_stall_seconds": 60.0,
    "join_seconds": 60.0,
    "seq_length_val": 48,
    "eval_lengths": [12, 24],
    "eval_protocol": "last",
    "eval_stride": 4,
    "eval_last_k": 3,
    "eval_window": 6,
    "eval_block": 4,
    "eval_position_options": {"factor": 2},
    "eval_paper_windows": 5,
    "eval_batch_size": 2,
    "eval_split": "test",
    "neox_fixes_off": [LEFT_OUT],  # must be what the launcher left out
}


pytestmark = pytest.mark.usefixtures("parsing")


def test_the_tables_of_these_tests_are_whole():
    assert VALUES.keys() == Own.model_fields.keys()
    assert arguments.native() == NATIVE


@pytest.mark.parametrize("name", [*POSSIBLE, *positions.aliases()])
def test_every_method_and_alias_is_accepted_under_its_canonical_name(name):
    assert make_args(pos_emb=name, **carrying(name)).pos_emb == positions.resolve(name)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("ALiBi", "alibi"), ("Kerple_Log", "kerple_log"), ("KERPLE_power_AP_", "kerple_power_ap_")],
)
def test_another_case_is_refused_with_the_right_spelling(wrong, right):
    with pytest.raises(ValueError, match=f"pos_emb '{wrong}' .*: write '{right}'"):
        make_args(pos_emb=wrong)


def test_an_unknown_method_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="kerple_lag.*known: .*kerple_log"):
        make_args(pos_emb="kerple_lag")


@pytest.mark.parametrize("key", VALUES)
def test_every_key_of_ours_is_a_field_whose_type_is_checked(key):
    common = {"pos_emb": "kerple_log", "attention_config": ATTEND}
    made = make_args(**common, **{key: VALUES[key]})
    assert getattr(made, key) == VALUES[key] != getattr(make_args(**common), key)
    with pytest.raises((ValueError, TypeError)):
        make_args(**common, **{key: object()})


def test_comparison_and_text_know_the_fields_of_ours():
    made, other = make_args(), make_args(position_weight_decay=True)
    assert made == make_args() != other
    assert "position_weight_decay=True" in repr(other)
    assert set(VALUES) <= set(type(made).__match_args__)


def test_the_configuration_cannot_leave_out_other_fixes_than_the_launcher():
    with pytest.raises(ValueError, match=f"neox_fixes_off .*the launcher left out .'{LEFT_OUT}'"):
        make_args(neox_fixes_off=["alibi_cache"])


def test_a_worker_can_be_sent_everything():
    made = make_args(pos_emb="kerple_log", attention_config=ATTEND, **VALUES)
    sent = json.dumps(made.to_dict())
    assert VALUES.items() <= json.loads(sent).items()
    assert type(made).from_dict(json.loads(sent)) == made


@pytest.mark.parametrize("key", VALUES)
def test_defaults_are_those_of_the_schema_or_none(key):
    default = Own.model_fields[key].default
    mutable = Own.model_fields[key].default_factory is not None
    assert getattr(make_args(), key) == (None if mutable else default)


@pytest.mark.parametrize("key", Own.model_fields)
def test_plain_types_are_what_neox_can_check(key):
    """A class, compared with `type(value)`, or a Literal; never a union or an annotation."""
    plain = arguments.plain_type(Own.model_fields[key].annotation)
    if get_origin(plain) is Literal:
        assert VALUES[key] in get_args(plain)
    else:
        assert plain is type(VALUES[key])


@pytest.mark.parametrize("name", POSSIBLE)
def test_whose_work_a_method_is(name):
    plain = make_args(pos_emb=name, **carrying(name))
    attend = make_args(pos_emb=name, attention_config=ATTEND)
    assert arguments.our_method(plain) == (None if name in NATIVE else name)
    assert arguments.our_method(attend) == (name if name in [*INSERTED, *ATTEND_ONLY] else None)


@pytest.mark.parametrize(
    "asked",
    [
        {"position_sharing": "layer"},
        {"position_options": {"rpe_num_buckets": 8}},
        {"position_precision": "as_published"},
    ],
)
def test_t5s_bias_is_ours_where_more_is_asked_than_neox_can(asked):
    native = [name for name in INSERTED if name in NATIVE]
    assert native
    args = make_args(pos_emb=native[0])
    for key, value in asked.items():
        setattr(args, key, value)
    assert arguments.our_method(args) == native[0]
