"""What fuzzing has found, by cause: the right answer to each. The inputs as found are in `seeds/`."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import fuzz_attacks as attacks
import fuzz_checkpoints as checkpoints
import numpy as np
import pytest
import torch
from fuzz_target import write

from data_prep import bytebpe, finished, inspecting
from data_prep.errors import DataError, plain
from data_prep.indexed import IndexedDataset, write_indexed
from data_prep.tokenizer import Tokenizer, no_panic
from data_prep.tokenizing import train_bpe
from megatron_patches.analysis import fields, jsonl, run_folder, style
from megatron_patches.analysis.jsonl import RowError
from megatron_patches.config import ConfigError, compose
from megatron_patches.config.reading import MAX_BYTES, MOST_DEEP, read_file, read_text
from megatron_patches.standalone import CheckpointError, export, load_model
from megatron_patches.standalone.archive import Archive
from megatron_patches.standalone.provenance import RunRecordError, read_run
from megatron_patches.standalone.safety import step_that_neox_loads

# ---- configuration ---------------------------------------------------------------------------


def test_depth_of_yaml_ends_before_the_stack() -> None:
    fits = "save: " + "[" * (MOST_DEEP - 1) + "]" * (MOST_DEEP - 1)
    (entry,) = read_text(fits, "run.yml")
    assert str(entry.value).count("[") == MOST_DEEP - 1
    for opening in ("[", "{a: "):
        with pytest.raises(ConfigError, match=r"run.yml:2: a value inside 32 others is refused"):
            read_text("seed: 1\nsave: " + opening * 50_000, "run.yml")


def test_a_huge_file_of_yaml_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text("seed: 1\n" + "#" * MAX_BYTES)
    with pytest.raises(ConfigError, match=r"run.yml: more than 1048576 characters"):
        read_file(tmp_path / "run.yml")


def test_long_numbers_are_told_in_short() -> None:
    with pytest.raises(ConfigError, match=r"run.yml:1: .* has more than 100 digits") as caught:
        read_text("seed: " + "9" * 100_000, "run.yml")
    assert len(str(caught.value)) < 200


def test_very_many_problems_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        read_text("".join(f"a{n}: 0x1\n" for n in range(500)), "run.yml")
    lines = str(caught.value).splitlines()
    assert len(lines) == 51 and lines[-1] == "and 450 more"


def test_an_unknown_key_with_dots_in_it(tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text("optimizer: {params: {'betas../': 1, lr: 1.0e-3}}\n")
    with pytest.raises(ConfigError, match=r"unknown key `optimizer.params.betas../`"):
        compose([tmp_path / "run.yml"])


@pytest.mark.parametrize("number", ["1e9991024", "1e" + "9" * 30, "9" * 200, "1e20"])
def test_texts_that_are_huge_numbers_get_no_advice(tmp_path: Path, number: str) -> None:
    (tmp_path / "run.yml").write_text(f"eval_iters: '{number}'\nnum_layers: '1e3'\n")
    with pytest.raises(ConfigError) as caught:
        compose([tmp_path / "run.yml"])
    lines = str(caught.value).splitlines()
    assert any("eval_iters" in line and line.endswith("not a text") for line in lines)
    assert any("num_layers" in line and line.endswith("not a text: write 1000") for line in lines)


# ---- checkpoints -----------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(checkpoints.a_run(export.Form("single")), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 200_000])
def test_a_damaged_record_of_a_run(run: Path, content: bytes) -> None:
    assert read_run(run)["data"] == "d"
    (run / "run.json").write_bytes(content)
    with pytest.raises(RunRecordError, match=r"run.json: damaged \("):
        read_run(run)


def test_a_changed_bit_of_weights_without_a_manifest(run: Path) -> None:
    """torch does not look at the checksums of its files."""
    file = run / checkpoints.WEIGHTS
    whole = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as content:
        place = max(content.infolist(), key=lambda info: info.file_size).header_offset
    whole[place + 200] ^= 1
    file.write_bytes(whole)
    with pytest.raises(CheckpointError, match="model_states.pt: damaged: its checksums differ"):
        load_model(run)


@pytest.mark.parametrize(
    ("key", "value"), [("num_layers", 10**12), ("hidden_size", 2**40), ("num_layers", 20_000)]
)
def test_a_configuration_out_of_proportion(run: Path, key: str, value: int) -> None:
    config = run / "config.yml"
    text, count = re.subn(rf"\b{key}: [0-9]+", f"{key}: {value}", config.read_text())
    assert count == 1
    config.write_text(text)
    with pytest.raises(CheckpointError, match=r"run: holds [0-9,]+ numbers, but .* describes"):
        load_model(run)


def test_shards_that_do_not_fit_together(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(checkpoints.a_run(export.Form("single", 2)), run)
    file = run / checkpoints.STEP / "mp_rank_01_model_states.pt"
    content = torch.load(file, weights_only=False)
    key = next(name for name in content["module"] if name.endswith("query_key_value.weight"))
    content["module"][key] = content["module"][key][:, :3]
    torch.save(content, file)
    with pytest.raises(CheckpointError, match=rf"run: .*{key}: its parts do not fit together"):
        load_model(run)
    del content["module"][key]
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="run: its tensor-parallel shards hold different"):
        load_model(run)


@pytest.mark.parametrize("named", ["x" * 100_000, "global_step" + "9" * 300, "../global_step7"])
def test_what_latest_names(run: Path, named: str) -> None:
    assert step_that_neox_loads(run) == run / checkpoints.STEP
    (run / "latest").write_text(named)
    for read in (step_that_neox_loads, load_model):
        with pytest.raises(CheckpointError, match="latest: names") as caught:
            read(run)
        assert len(str(caught.value)) < 300 + len(str(run))


@pytest.mark.parametrize(("place", "bytes_there"), [(46, b"\0"), (42, b"\xff\xff\xff\x7f")])
def test_a_member_of_a_zip_without_name_or_place(
    tmp_path: Path, place: int, bytes_there: bytes
) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"content")
    assert [member.name for member in Archive(path).members()] == ["a"]
    whole = bytearray(path.read_bytes())
    at = whole.index(b"PK\x01\x02") + place  # in the central directory
    whole[at : at + len(bytes_there)] = bytes_there
    path.write_bytes(whole)
    with pytest.raises(DataError, match=r"a.zip: damaged or cut short .*without a name or a place"):
        Archive(path).members()


# ---- text ------------------------------------------------------------------------------------


def _byte_level(**changes: Any) -> dict[str, Any]:
    return {**json.loads(bytebpe.byte_tokenizer_json()), **changes}


def test_two_tokens_of_one_id_are_left_to_the_slow_encoder() -> None:
    content = json.loads(train_bpe(["abab"] * 9, 258).json_bytes)
    assert bytebpe.ranks(content) is not None
    vocab = content["model"]["vocab"]
    vocab["\u00fe"] = vocab["\u00ff"]
    assert bytebpe.ranks(content) is None  # tiktoken would panic
    words = Tokenizer(json.dumps(content).encode(), "t.json")
    assert words.encode("abc") == [vocab["ab"], vocab["c"]]


def test_a_tokenizer_without_added_tokens() -> None:
    content = _byte_level()
    del content["added_tokens"]
    words = Tokenizer(json.dumps(content).encode(), "t.json")
    assert words.encode("ab") == [content["model"]["vocab"][letter] for letter in "ab"]


def test_a_panic_of_a_library_in_rust_is_an_error_of_data() -> None:
    panic = type("PanicException", (BaseException,), {})
    told = "t.json breaks the tokenizer's library: out of range"
    with pytest.raises(DataError, match=told), no_panic("t.json"):
        raise panic("out of range")
    with pytest.raises(KeyboardInterrupt), no_panic("t.json"):
        raise KeyboardInterrupt


def test_the_end_of_a_document_is_an_id(tmp_path: Path) -> None:
    for name, eod in (("x", [1, 2]), ("z", "0")):
        about = {"tokenizer": {"fingerprint": "t", "eod": eod}}
        write_indexed(tmp_path / name, [np.arange(3)], vocab_size=9, sidecar=about)
        with pytest.raises(DataError, match=rf"{name}.json is not a sidecar .*no id"):
            IndexedDataset(tmp_path / name)
    about = {"tokenizer": {"fingerprint": "t", "eod": 2}}
    write_indexed(tmp_path / "y", [np.arange(3)], vocab_size=9, sidecar=about)
    assert "EOD 2       at the end of 1 of 1 documents" in inspecting.report(str(tmp_path / "y"))


def test_a_mark_that_is_nested_or_long(tmp_path: Path) -> None:
    for content in (attacks.deep_json(), json.dumps(["x" * 50_000]).encode()):
        (tmp_path / "prepared.json").write_bytes(content)
        with pytest.raises(DataError, match=r"prepared.json is not readable") as caught:
            finished.load(tmp_path)
        assert len(str(caught.value)) < 300 + len(str(tmp_path))


# ---- results ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spell", [plain, jsonl.plain])
def test_control_characters_are_spelt_out(spell: Any) -> None:
    assert spell("a\x1b[31mb\x00\x7f\x9b\ud800") == "a\\x1b[31mb\\x00\\x7f\\x9b\\ud800"
    assert spell("tab\tline\n\u00fc\u2028") == "tab\tline\n\u00fc\u2028"


def test_names_in_results_have_no_control_characters() -> None:
    assert fields.text("method", "alibi") == "alibi"
    assert fields.text("message", "\x1b[31mred") == "\x1b[31mred"  # spelt out where it is shown
    with pytest.raises(RowError, match="method: control characters"):
        fields.text("method", "ali\x1bbi")
    for options in ({"a\x07": 1}, {"a": ["\x1b"]}, {"a": {"b": "\x9b"}}):
        with pytest.raises(RowError, match="options: control characters"):
            fields.json_mapping("options", options)


def test_a_dollar_in_a_name_is_no_formula(tmp_path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(style.STYLE):
        figure = Figure()
        figure.text(0, 0, r"$\fuzzed{$")
    svg, _ = style.save(figure, tmp_path / "a")
    assert "fuzzed" in svg.read_text()  # matplotlib writes the text as a comment beside its shapes


@pytest.mark.parametrize(
    "line",
    [
        "x: &x [1]\ny: *x",
        "x: !!python/name:os.system",
        "x: " + "[" * 5000,
        "seq_length: 9",
        "<<: {seq_length: 1}",
    ],
)
def test_the_configuration_of_a_run_is_plain(tmp_path: Path, line: str) -> None:
    files = dict(_run_folder())
    write(files, tmp_path / "good")
    assert run_folder.read_run_folder(tmp_path / "good").train_length == 8
    write({**files, "config.yml": files["config.yml"] + line.encode() + b"\n"}, tmp_path / "bad")
    with pytest.raises(RowError, match=r"config.yml: not YAML: "):
        run_folder.read_run_folder(tmp_path / "bad")


def _run_folder() -> dict[str, bytes]:
    from fuzz_results import _run_folders

    return _run_folders()[0]
