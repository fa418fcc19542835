"""What YAML 1.1 would misread, merge or drop in silence is an error with a place and a remedy."""

from __future__ import annotations

import pytest

from megatron_patches.config import ConfigError, compose


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("weight_decay: 6e-4", "write 6.0e-4"),
        ("weight_decay: 1E5", "write 1.0e+5"),
        ("weight_decay: 1.5e8", "write 1.5e+8"),
        ("weight_decay: '0.1'", "write 0.1 without quotes"),
        ("eval_iters: '10'", "write 10"),
        ("eval_iters: 1e3", "write 1000"),
        ("eval_iters: 08", "write 8"),
        ("eval_iters: 1.5", "a whole number, not a number with a fraction"),
        ("eval_iters: true", "a whole number, not a boolean"),
        ("weight_decay: false", "a number, not a boolean"),
        ("weight_decay: .nan", "a finite number"),
        ("checkpoint_factor: 1e3", "write 1.0e+3"),
        ("no_weight_tying: 1", "true or false, not a whole number"),
        ("no_weight_tying: 'true'", "true or false, not a text"),
        ("save: 5", "a text, not a whole number"),
        ("eval_lengths: 512", "a list, not a whole number"),
        ("eval_lengths: [512, '1024']", "write 1024"),
        ("optimizer: Adam", "a mapping, not a text"),
        ("norm: layernom", "nearest: `layernorm`"),
        ("warmup: 1.5", "must be less than or equal to 1"),
        ("eval_lengths: []", "must have at least 1 item"),
        ("eval_iters: '12345678901234567891'", "write 12345678901234567891"),
        ("eval_iters: .", "a whole number, not a text"),
        ("weight_decay: .5e3", "write 0.5e+3"),
        ("weight_decay: e5", "a number, not a text"),
        ("weight_decay: 1__0.e5", "a number, not a text"),
        ("num_workers:", "a whole number, not nothing"),
    ],
)
def test_wrong_types_name_key_line_and_remedy(refusal, line, remedy):
    message = refusal(line)
    assert f"run.yml:8: `{line.split(':')[0]}: " in message
    assert remedy in message
    assert message.count("\n") == 0


@pytest.mark.parametrize("number", ["010", "-017", "0x1F", "0b101", "0_7"])
def test_numbers_to_another_base_are_refused(refusal, number):
    assert "to the base 8, 16 or 2" in refusal(f"eval_iters: {number}")


@pytest.mark.parametrize("number", ["1:30", "190:20:30", "1:30.5"])
def test_sexagesimal_numbers_are_refused(refusal, number):
    assert "to the base 60" in refusal(f"eval_iters: {number}")
    assert "to the base 60" in refusal(f"eval_lengths: [512, {number}]")


def test_a_date_is_refused_unless_quoted(refusal, config):
    assert "as a date" in refusal("run_name: 2024-01-01")
    assert config("run_name: '2024-01-01'").run_id == "2024-01-01"


@pytest.mark.parametrize("word", ["off", "on", "yes", "no", "Off", "NO"])
def test_switch_words_are_booleans_only_where_one_is_wanted(refusal, config, word):
    message = refusal(f"run_name: {word}")
    assert message.endswith(f'`run_name: {word}` is a boolean in YAML 1.1: write "{word}"')
    assert config(f"run_name: '{word}'").run_name == word
    truth = word.lower() in ("on", "yes")
    assert config(f"checkpoint_activations: {word}").checkpoint_activations is truth
    assert config(f"use_wandb: {word}").use_wandb is truth
    nested = config(f"zero_optimization: {{stage: 1, overlap_comm: {word}}}")
    assert nested.zero_optimization == {"stage": 1, "overlap_comm": truth}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("seed: &s 1\n", "anchor `&s`"),
        ("data_types: &d {}\ndata_types: *d\n", "anchor `&d`"),
        ("eval_iters: *missing\n", "alias `*missing`"),
        ("<<: {seed: 1}\n", "merge key `<<`"),
        ("optimizer:\n  <<: {type: Adam}\n", "merge key `<<`"),
        ("seed: !!int '1'\n", "tag `tag:yaml.org,2002:int`"),
        ("save: !env HOME\n", "tag `!env`"),
        ("seed: [1\n", "not valid YAML"),
        ("seed: 1\n---\nseed: 2\n", "not valid YAML"),
        ("? [a, b]\n: 1\n", "a key must be one word"),
    ],
)
def test_indirection_and_broken_yaml_are_refused(refusal, text, what):
    message = refusal(text)
    assert what in message
    assert "run.yml:" in message


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n", "null\n"])
def test_a_file_without_keys_is_refused(write, text):
    with pytest.raises(ConfigError, match="run.yml"):
        compose([write(text)])


@pytest.mark.parametrize(("text", "kind"), [("- seed\n", "a list"), ("seed\n", "a single value")])
def test_a_file_that_is_no_mapping_is_refused(write, text, kind):
    with pytest.raises(ConfigError, match=f"run.yml:1: expects `key: value` lines, not {kind}"):
        compose([write(text)])


def test_missing_unreadable_and_binary_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="absent.yml: no such file"):
        compose([tmp_path / "absent.yml"])
    with pytest.raises(ConfigError, match="cannot be read"):
        compose([tmp_path])
    (tmp_path / "latin.yml").write_bytes(b"save: \xe9\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        compose([tmp_path / "latin.yml"])
    (tmp_path / "nul.yml").write_bytes(b"save: a\x00b\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        compose([tmp_path / "nul.yml"])


def test_neox_json_style_reads_the_same(write):
    json_style = write(
        """# a comment
        {
          "num-layers": 2, "hidden-size": 32,
          "num_attention_heads": 4,   # trailing comment
          "seq_length": 16, "max_position_embeddings": 16, "train_iters": 10,
          "pos-emb": "kerple_log",
          "optimizer": {"type": "Adam",
            "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1.0e-8,}},
          "checkpoint_activations": True,
        }
        """,
        "json.yml",
    )
    plain = write(
        "num_layers: 2\nhidden_size: 32\nnum_attention_heads: 4\nseq_length: 16\n"
        "max_position_embeddings: 16\ntrain_iters: 10\npos_emb: kerple_log\n"
        "optimizer: {type: Adam, params: {lr: 6.0e-4, betas: [0.9, 0.95], eps: 1.0e-8}}\n"
        "checkpoint_activations: true\n",
        "plain.yml",
    )
    assert compose([json_style]) == compose([plain])
    assert compose([json_style]).optimizer.params.lr == 0.0006


def test_whole_numbers_serve_as_numbers_and_separators_are_read(config):
    assert config("weight_decay: 0\ns3_chunk_size: 104_857_600").weight_decay == 0.0
    assert config("s3_chunk_size: 104_857_600").s3_chunk_size == 104857600
    assert config("checkpoint_factor: 200").checkpoint_factor == 200
    assert isinstance(config("checkpoint_factor: 200").checkpoint_factor, int)
    assert config("checkpoint_scale: log\ncheckpoint_factor: 1.5").checkpoint_factor == 1.5


@pytest.mark.parametrize("escape", ["\\UFFFFFFFF", "\\U00110000"])
def test_an_escape_that_names_no_character_has_a_place(refusal, escape):
    message = refusal(f'save: "{escape}"')
    assert "run.yml:8: not valid YAML: an escape names no character" in message


def test_characters_that_json_escapes_in_two_halves_are_one(config, refusal):
    assert config('comment: "\\ud83d\\ude00 \\u00e9"').comment == "\U0001f600 \u00e9"
    for half in ("\\ud83d", "\\ude00\\ud83d"):
        assert "run.yml:8: half of a character" in refusal(f'comment: "{half}"')
        assert "run.yml:8: half of a character" in refusal(f'wandb: {{"{half}": 1}}')
