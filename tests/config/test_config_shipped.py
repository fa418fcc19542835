"""Every shipped YAML file: disjoint layers, every combination composes, every typo is caught."""

from __future__ import annotations

import re
from itertools import combinations, product

import pytest
from config_files import CONFIGS

from megatron_patches import positions
from megatron_patches.config import ConfigError, batch_arithmetic, check_standalone, compose
from megatron_patches.config.compose import compose_entries
from megatron_patches.config.keys_own import Own
from megatron_patches.config.reading import Entry, read_file
from megatron_patches.config.schema import Config
from megatron_patches.studies.schema import NOT_KEYS, Study

LAYERS = ("base", "method", "dataset", "cluster")
# Read once: the combinations differ only in which of these they join.
FILES = {
    layer: {f.stem: read_file(f) for f in sorted((CONFIGS / layer).glob("*.yml"))}
    for layer in LAYERS
}
ALL = [(f"{layer}/{stem}", entries) for layer in LAYERS for stem, entries in FILES[layer].items()]


def test_the_shipped_files_are_the_expected_ones():
    assert set(FILES["base"]) == {"tiny", "162m", "1b3"}
    assert set(FILES["dataset"]) >= {"openwebtext2", "github", "arxiv"}
    assert set(FILES["dataset"]) >= {"local_code", "local_prose", "local_latex"}
    assert set(FILES["cluster"]) == {"cpu", "gpu", "multinode", "slurm"}


def test_methods_and_their_files_match_one_to_one():
    assert sorted(FILES["method"]) == sorted(positions.names())
    for stem, entries in FILES["method"].items():
        assert {entry.key: entry.value for entry in entries}["pos_emb"] == stem


def test_dataset_files_are_named_as_their_dataset():
    for stem, entries in FILES["dataset"].items():
        assert {entry.key: entry.value for entry in entries}["dataset"] == stem


def test_layers_are_disjoint_and_file_names_unique():
    keys = {
        layer: {e.key for entries in FILES[layer].values() for e in entries} for layer in LAYERS
    }
    for one, other in combinations(LAYERS, 2):
        assert keys[one] & keys[other] == set(), (one, other)
    stems = [stem for layer in LAYERS for stem in FILES[layer]]
    assert len(stems) == len(set(stems))


def test_keys_are_spelt_with_underscores():
    for layer in LAYERS:
        for file in (CONFIGS / layer).glob("*.yml"):
            assert not re.findall(r"^[a-z_]*-[a-z_-]*:", file.read_text(), re.M), file


@pytest.mark.parametrize("base", FILES["base"])
def test_every_combination_composes_with_and_without_a_cluster(base):
    clusters = [[], *FILES["cluster"].values()]
    for method, dataset in product(FILES["method"].items(), FILES["dataset"].items()):
        for cluster in clusters:
            config = compose_entries([*FILES["base"][base], *method[1], *dataset[1], *cluster])
            check_standalone(config)
            assert config.run_id == f"{method[0]}-{dataset[0]}-{config.seed}"
            assert config.is_bf16 == (bool(cluster) and cluster != FILES["cluster"]["cpu"])
            assert batch_arithmetic(config, 2).global_ in (8, 32)


def test_the_papers_model_is_the_papers():
    config = compose(
        [
            CONFIGS / part
            for part in (
                "base/162m.yml",
                "method/alibi.yml",
                "dataset/arxiv.yml",
                "cluster/gpu.yml",
            )
        ]
    )
    assert (config.num_layers, config.hidden_size, config.num_attention_heads) == (12, 768, 12)
    assert (config.seq_length, config.train_iters, config.lr_decay_iters) == (512, 50000, 50000)
    assert batch_arithmetic(config, 1) == (32, 1, 32)
    params = config.optimizer.params
    assert (params.lr, params.betas, params.eps) == (6e-4, [0.9, 0.999], 1e-8)
    assert (config.weight_decay, config.gradient_clipping, config.min_lr) == (0.0, 1.0, 0.0)
    assert (config.lr_decay_style, config.warmup) == ("cosine", 0.01)
    assert (config.hidden_dropout, config.attention_dropout) == (0.0, 0.0)
    assert (config.torch_dtype_name, config.zero_stage) == ("bfloat16", 0)
    assert config.no_weight_tying and config.checkpoint_activations
    assert config.train_data_paths == ["data/arxiv/train"]
    fused = [key for key in Config.model_fields if key.endswith("_fusion") and getattr(config, key)]
    assert fused == []


def misspellings(key: str) -> set[str]:
    """One letter left out anywhere; one doubled, changed or swapped in the middle."""
    middle = len(key) // 2
    variants = {key[:i] + key[i + 1 :] for i in range(len(key))}
    variants |= {key[:middle] + key[middle] + key[middle:], key[:middle] + "x" + key[middle + 1 :]}
    variants.add(key[: middle - 1] + key[middle] + key[middle - 1] + key[middle + 1 :])
    return variants - {key} - set(Config.model_fields)


def test_every_key_misspelt_by_one_letter_is_refused_with_the_right_one():
    keys = {entry.key for _, entries in ALL for entry in entries}
    assert len(keys) > 50
    joined = [FILES["base"]["tiny"], FILES["method"]["rotary"], FILES["dataset"]["arxiv"]]
    run = [entry for entries in joined for entry in entries]
    for key in sorted(keys):
        for wrong in misspellings(key):
            with pytest.raises(ConfigError) as caught:
                compose_entries([*run, Entry(wrong, 1, "typo.yml:1")])
            first = str(caught.value).splitlines()[0]
            assert first.startswith(f"typo.yml:1: unknown key `{wrong}`"), first
            assert f"`{key}`" in first, first


@pytest.mark.parametrize(("name", "entries"), ALL, ids=[name for name, _ in ALL])
def test_nested_keys_misspelt_are_refused(name, entries):
    rest = {"base": [], "method": [], "dataset": [], "cluster": []} | {
        "base": FILES["base"]["tiny"],
        "method": FILES["method"]["alibi"],
    }
    rest[name.partition("/")[0]] = []
    run = [entry for part in rest.values() for entry in part]
    nested = [
        (i, inner) for i, e in enumerate(entries) if isinstance(e.value, dict) for inner in e.value
    ]
    for index, inner in nested:
        entry = entries[index]
        value = {(key + "e" if key == inner else key): item for key, item in entry.value.items()}
        changed = [*entries[:index], Entry(entry.key, value, entry.where), *entries[index + 1 :]]
        with pytest.raises(ConfigError, match=f"unknown key `{entry.key}.{inner}e`.*`{inner}`"):
            compose_entries([*run, *changed])


def test_the_readme_lists_our_own_keys():
    assert listed("Keys that NeoX does not have") == set(Own.model_fields)


def test_the_readme_lists_what_a_trained_model_may_be_read_with():
    table = section("Options of a method")
    for name in positions.names():
        row = "randomised_*" if name.startswith("randomised_") else name
        found = re.search(rf"^\| `{re.escape(row)}` \| (.*) \|$", table, re.M)
        named = tuple(re.findall(r"`(\w+)`", found[1])) if found else ()
        assert named == positions.method_class(name).evaluation_options


def test_the_readme_lists_the_keys_of_a_study():
    assert listed("Keys of a study") == set(Study.model_fields) - set(NOT_KEYS)


def section(title: str) -> str:
    """The part of configs/README.md under a heading."""
    text = (CONFIGS / "README.md").read_text()
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def listed(title: str) -> set[str]:
    """The names in the first column of that part's table."""
    cells = re.findall(r"^\| (`[^|]*) \|", section(title), re.M)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
