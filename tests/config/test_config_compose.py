"""Plain union: duplicates, unknown keys, overrides, provenance, combinations that cannot run."""

from __future__ import annotations

import pydantic
import pytest
from config_files import MINIMAL

from megatron_patches import positions
from megatron_patches.config import Config, ConfigError, compose, from_mapping


@pytest.mark.parametrize("first", ["eval_iters", "eval-iters"])
@pytest.mark.parametrize("second", ["eval_iters", "eval-iters"])
def test_a_key_set_twice_is_refused_in_every_spelling(write, first, second):
    one = write(MINIMAL + f"{first}: 5\n", "one.yml")
    two = write(f"seed: 3\n{second}: 5\n", "two.yml")
    with pytest.raises(ConfigError) as over_files:
        compose([one, two])
    assert str(over_files.value) == (f"{two}:2: `eval_iters` is set twice (first at {one}:8)")
    both = write(MINIMAL + f"{first}: 5\n{second}: 6\n", "both.yml")
    with pytest.raises(ConfigError) as in_one:
        compose([both])
    assert str(in_one.value) == f"{both}:9: `eval_iters` is set twice (first at {both}:8)"


def test_a_nested_key_set_twice_is_refused(refusal):
    message = refusal("optimizer:\n  params:\n    lr: 0.1\n    lr: 0.2\n")
    assert "run.yml:11: `optimizer.params.lr` is set twice (first at" in message
    assert "run.yml:10)" in message


def test_two_files_of_one_name_are_refused(tmp_path, write):
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / "run.yml"
    twin.write_text("seed: 3\n")
    with pytest.raises(ConfigError, match="same file name"):
        compose([write(MINIMAL), twin])


def test_no_file_is_refused():
    with pytest.raises(ConfigError, match="no configuration file"):
        compose([])


def test_unknown_keys_name_place_and_nearest(refusal):
    assert refusal("pos_embd: none").endswith(
        "run.yml:8: unknown key `pos_embd`; nearest: `pos_emb`"
    )
    assert "unknown key `optimizer.params.betta`; nearest: `betas`" in refusal(
        "optimizer: {params: {betta: [0.9, 0.95]}}"
    )
    message = refusal("zero_optimization:\n  stage: 1\n  overlap_com: true\n")
    assert (
        "run.yml:10: unknown key `zero_optimization.overlap_com`; nearest: `overlap_comm`"
        in message
    )
    assert "unknown key `fp16.enable`" in refusal("fp16: {enable: true}")
    assert refusal("xyzzy: 1").endswith("unknown key `xyzzy`")


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("lr", "optimizer.params.lr"),
        ("zero_stage", "zero_optimization.stage"),
        ("rank", "leave it out"),
    ],
)
def test_keys_that_neox_overwrites_are_refused(refusal, key, instead):
    assert instead in refusal(f"{key}: 1")


def test_all_problems_come_in_one_error(refusal):
    message = refusal("sed: 1\neval_iters: 1e3\nnorm: rms\nlr: 1\n", "log_intervall=5")
    assert len(message.splitlines()) == 5
    for part in ("`sed`", "`eval_iters: 1e3`", "`norm: rms`", "`lr`", "`log_intervall`"):
        assert part in message


def test_missing_keys_share_one_line(write):
    file = write("seed: 1\nhidden_size: 8\n")
    with pytest.raises(ConfigError) as caught:
        compose([file])
    assert str(caught.value) == (
        "no file sets the required `num_layers`, `num_attention_heads`, `seq_length`, "
        f"`max_position_embeddings`, `train_iters`; read: {file}"
    )


def test_overrides_replace_and_reach_inside(config):
    text = "seed: 3\noptimizer: {params: {lr: 0.1, betas: [0.8, 0.9]}}\n"
    made = config(text, "seed=4", "optimizer.params.lr=0.001", "eval-lengths=[64, 128]", "load=")
    assert made.seed == 4
    assert made.optimizer.params.lr == 0.001
    assert made.optimizer.params.betas == [0.8, 0.9]
    assert made.eval_lengths == [64, 128]
    assert made.load is None
    assert config("", "zero_optimization.stage=2").zero_stage == 2


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("seed", "expects key=value"),
        ("=3", "expects key=value"),
        ("optimizer.params.lr=6e-4", "write 6.0e-4"),
        ("seed=010", "base 8"),
        ("seed=&a 3", "anchor"),
        ("sead=3", "nearest: `seed`"),
        ("optimizer.parms.lr=0.1", "nearest: `params`"),
        ("seed.inner=3", "expects a whole number, not a mapping"),
        ("run_name=off", 'write "off"'),
        ("eval_iters=[", "not valid YAML"),
    ],
)
def test_bad_overrides_are_refused(refusal, override, part):
    message = refusal("", override)
    assert part in message
    assert "--set" in message


def test_an_override_given_twice_is_refused(refusal):
    assert "`seed` is given twice" in refusal("", "seed=1", "seed=2")
    assert "`eval_iters` is given twice" in refusal("", "eval_iters=1", "eval-iters=2")
    inside = "optimizer.params.lr=0.1"
    assert "is given twice" in refusal("", inside, "optimizer={type: Adam}")
    assert "is given twice" in refusal("", "optimizer.params={lr: 0.2}", inside)


def test_two_overrides_inside_one_mapping_are_fine(config):
    made = config("", "optimizer.params.lr=0.1", "optimizer.params.eps=0.5", "eval_iters=1")
    assert (made.optimizer.params.lr, made.optimizer.params.eps) == (0.1, 0.5)


@pytest.mark.parametrize("name", ["..", "a/b", "-x", "a b", ""])
def test_run_and_dataset_names_are_plain(refusal, name):
    assert "may hold only" in refusal(f"run_name: '{name}'")
    assert "may hold only" in refusal(f"dataset: '{name}'")


def test_one_path_serves_as_a_list_of_one(write):
    path = write(MINIMAL)
    assert compose(path) == compose(str(path)) == compose([path])


def test_an_override_cannot_enter_a_plain_value(refusal):
    assert "has no mapping" in refusal("seed: 3", "seed.inner=3")


def test_a_name_inside_a_mapping_is_spelt_as_in_a_file(config, refusal):
    """Only keys of the file itself have two spellings."""
    made = config("variant: {kv-heads: one, b: two}", "variant.kv-heads=three")
    assert made.variant == {"kv-heads": "three", "b": "two"}
    assert config("", "zero-optimization.stage=1").zero_stage == 1
    for text, override in (
        ("zero_optimization: {reduce-scatter: true}", "seed=1"),
        ("", "zero_optimization.reduce-scatter=true"),
    ):
        assert "nearest: `reduce_scatter`" in refusal(text, override)


def test_provenance_names_lines_and_overrides(config):
    made = config("optimizer:\n  params:\n    lr: 0.1\n", "seed=4", "optimizer.params.eps=1.0e-6")
    assert made.provenance["num_layers"].endswith("run.yml:1")
    assert made.provenance["optimizer.params.lr"].endswith("run.yml:10")
    assert made.provenance["optimizer.params.eps"] == "--set"
    assert made.provenance["seed"] == "--set"
    assert made.place("optimizer.params.lr").endswith("run.yml:10)")
    assert made.place("optimizer.params.betas").endswith("run.yml:8)")
    assert made.place("min_lr") == "`min_lr` (default)"
    replaced = config("optimizer: {params: {lr: 0.1}}\n", "optimizer={type: Adam}")
    assert replaced.place("optimizer.params.lr") == "`optimizer.params.lr` (--set)"


def test_the_config_is_frozen(config):
    made = config()
    with pytest.raises(pydantic.ValidationError):
        made.seed = 5
    with pytest.raises(pydantic.ValidationError):
        made.optimizer.params.lr = 1.0
    with pytest.raises(pydantic.ValidationError):
        made.not_a_key = 5


def test_defaults_follow_other_keys(config):
    made = config()
    assert (made.intermediate_size, made.lr_decay_iters, made.head_dim) == (128, 10, 8)
    assert config("intermediate_size: 100").intermediate_size == 100
    assert config("", "hidden_size=64").intermediate_size == 256
    assert made.gradient_accumulation_steps is None


def test_run_names(config):
    assert config().run_id == "kerple_log-data-1234"
    assert str(config("dataset: arxiv\nseed: 7").save_dir) == "checkpoints/kerple_log-arxiv-7"
    assert str(config("run_name: a").save_dir) == "checkpoints/a"
    assert str(config("save: x/y\ncheckpoint_factor: 5").save_dir) == "x/y"


def test_position_names_are_canonical_and_misspellings_refused(config, refusal):
    for alias, name in positions.aliases().items():
        assert config("", f"pos_emb={alias}").pos_emb == name
    for wrong in ("kerple_power_ap", "kerple_lg", "ALiBi", "roatry"):
        message = refusal("", f"pos_emb={wrong}")
        assert f"`pos_emb: {wrong}`" in message
    assert "kerple_log" in refusal("", "pos_emb=kerple_lg")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hidden_size=30", ["`hidden_size` (--set) 30", "`num_attention_heads`", "4"]),
        ("seq_length=32", ["`seq_length` (--set) 32", "`max_position_embeddings`", "16"]),
        ("min_lr=0.1", ["`min_lr` (--set) 0.1", "`optimizer.params.lr` (default) 0.001"]),
        ("model_parallel_size=3", ["not divisible by `model_parallel_size` (--set) 3"]),
        ("num_kv_heads=3", ["not divisible by `num_kv_heads` (--set) 3"]),
        ("num_unique_layers=3", ["not divisible by `num_unique_layers` (--set) 3"]),
        ("save=x", ["`save` (--set) needs `checkpoint_factor`"]),
        ("checkpoint_scale=log checkpoint_factor=1", ["must be above 1"]),
        ("train_epochs=1", ["`train_epochs` (--set) and `train_iters`"]),
        ("zero_optimization.stage=4", ["must be 0, 1, 2 or 3, not 4"]),
        ("fp16.enabled=true bf16.enabled=true", ["both enabled"]),
        ('bf16.enabled="false"', ["`bf16.enabled` (--set) must be true or false", "not 'false'"]),
        ("fp16={enabled:}", ["`fp16.enabled` (--set) must be true or false", "not None"]),
        ("fp16.enabled=true precision=bfloat16", ["asks for fp16", "`precision` (--set)"]),
        ("bf16.enabled=true precision=fp32", ["asks for bfloat16"]),
        (
            "data_path=a train_data_paths=[b] valid_data_paths=[b] test_data_paths=[b]",
            ["set one of"],
        ),
        ("train_data_paths=[b] valid_data_paths=[b]", ["needs `test_data_paths` beside it"]),
        (
            "train_data_paths=[] valid_data_paths=[b] test_data_paths=[b]",
            ["`train_data_paths` (--set) names no data"],
        ),
        ("train_data_weights=[1.0]", ["has 1 numbers for 0 `train_data_paths`"]),
        ("split=949;50;1", ["expects shares"]),
        ("split=0,0,0", ["expects shares"]),
        ("attention_config=[[[global],x,2]]", ["expects [[[kind, ...], repeats], ...]"]),
    ],
)
def test_impossible_combinations_name_their_keys(refusal, text, parts):
    message = refusal("", *text.split(" "))
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("overrides", "precision"),
    [
        ([], "fp32"),
        (["precision=bfloat16"], "bfloat16"),
        (["fp16.enabled=true"], "fp16"),
        (["fp16={enabled: true, type: bfloat16}"], "bfloat16"),
        (["fp16={enabled: true, type: bfloat16}", "precision=bfloat16"], "bfloat16"),
        (["bf16.enabled=true"], "bfloat16"),
        (["fp16={enabled: false, type: bfloat16}"], "fp32"),
    ],
)
def test_precision_from_new_and_old_keys(config, overrides, precision):
    made = config("", *overrides)
    assert made.effective_precision == precision
    assert made.is_bf16 == (precision == "bfloat16")
    assert made.is_fp16 == (precision == "fp16")
    assert made.torch_dtype_name == {"fp32": "float32", "fp16": "float16"}.get(precision, precision)


def test_a_mapping_in_memory_is_checked_alike(config):
    values = {"num-layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
    values |= {"max_position_embeddings": 16, "train_iters": 10, "pos_emb": "kerple_log"}
    assert from_mapping(values) == config()
    with pytest.raises(ConfigError, match="here: unknown key `sed`"):
        from_mapping({**values, "sed": 1}, name="here")


def test_provenance_does_not_count_for_equality(config):
    assert config("seed: 5\n") == config("", "seed=5")
    assert config() != config("", "seed=5")
    assert isinstance(config(), Config)
