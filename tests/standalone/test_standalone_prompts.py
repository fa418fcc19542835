"""`generate.py`: the prompts that it takes, and whose tokenizer reads them."""

from __future__ import annotations

import json
import shutil

import pytest

from megatron_patches.hf.likelihood import Scorer
from megatron_patches.standalone.cli import generate_main
from megatron_patches.standalone.generate import batches_of, continued
from megatron_patches.standalone.model import GPT, ModelShape


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with random weights and a tokenizer of bytes."""
    from data_prep.tokenizing import load_tokenizer
    from megatron_patches.config import from_mapping
    from megatron_patches.standalone import export
    from megatron_patches.standalone.build import shape_of

    folder = tmp_path_factory.mktemp("generate")
    load_tokenizer("byte").save(folder)
    config = from_mapping(
        {
            **{"num_layers": 2, "hidden_size": 24, "num_attention_heads": 2, "seq_length": 32},
            **{"max_position_embeddings": 32, "no_weight_tying": True, "init_method_std": 0.3},
            **{"train_iters": 1, "train_micro_batch_size_per_gpu": 1, "pos_emb": "kerple_log"},
            **{"padded_vocab_size": 257, "vocab_file": str(folder / "tokenizer.json")},
            **{"tokenizer_type": "HFTokenizer", "distributed_backend": "gloo"},
        }
    )
    made = GPT(shape_of(config, 257))
    export.export(made, folder / "run", step=1, config=config, form=export.Form())
    return folder / "run"


def test_the_command_with_several_prompts(run, tmp_path, capsys):
    def said(*options: str) -> str:
        assert generate_main(["--checkpoint", str(run), "--tokens", "9", *options]) == 0
        return capsys.readouterr().out

    alone = {text: said("--prompt", text) for text in ("def main(", "x")}
    rows = [
        json.loads(line) for line in said("--prompt", "x", "--prompt", "def main(").splitlines()
    ]
    assert [row["prompt"] for row in rows] == ["x", "def main("]
    assert all(row["text"] + "\n" == alone[row["prompt"]] for row in rows)
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "def main("}\n{"text": "x"}\n')
    assert [json.loads(line) for line in said("--prompts", str(file)).splitlines()] == rows[::-1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "x"}', "jsonl:1"),
        ('{"text": "x"}\nx', "jsonl:2"),
        ("", "a prompt is empty"),
        ('{"text": ""}', "a prompt is empty"),
        ('{"text": null}', "jsonl:1"),
        ('{"text": "x"}\n{"text": 5}', "jsonl:2"),
        ('{"text": ["x"]}', "jsonl:1"),
        ('{"text": "\\ud800"}', r"the prompt '\ud800' is not valid Unicode"),
    ],
)
def test_files_of_prompts_that_are_wrong(run, tmp_path, capsys, lines, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    assert generate_main(["--checkpoint", str(run), "--prompts", str(file)]) == 2
    assert message in capsys.readouterr().err


def test_a_prompt_may_hold_any_character(run, tmp_path, capsys):
    """JSON ends a line at a line feed alone."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "a\u2028b\x85c"}\n{"text": "d"}\n', encoding="utf-8")
    options = ["--checkpoint", str(run), "--tokens", "1", "--prompts", str(file)]
    assert generate_main(options) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["a\u2028b\x85c", "d"]
    file.write_bytes(b'{"text": "\xff"}')
    assert generate_main(options) == 2
    assert f"{file}: not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(("trained", "code"), [("unknown", 0), ("another", 1)])
def test_text_without_a_record_of_its_tokenizer(run, tmp_path, capsys, trained, code):
    """Text that other programs prepared says nothing: that is no other tokenizer."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "run.json").write_text(json.dumps({"tokenizer": trained}))
    options = ["--checkpoint", str(copy), "--tokens", "1", "--prompt", "x"]
    assert generate_main(options) == code
    assert ("was trained with another" in capsys.readouterr().err) == bool(code)


def test_the_mark_of_an_editor_and_empty_lines_at_the_end(run, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    options = ["--checkpoint", str(run), "--tokens", "1", "--prompts", str(file)]
    file.write_text('{"text": "a"}\n{"text": "b"}\n', encoding="utf-8")
    assert generate_main(options) == 0
    wanted = capsys.readouterr().out
    file.write_text('{"text": "a"}\r\n{"text": "b"}\r\n\r\n \n', encoding="utf-8-sig")
    assert generate_main(options) == 0
    assert capsys.readouterr().out == wanted
    file.write_text('{"text": "a"}\n\n{"text": "b"}\n')  # within the file a line is missing
    assert generate_main(options) == 2
    assert "jsonl:2" in capsys.readouterr().err


@pytest.mark.parametrize("seed", ["-1", str(2**64)])
def test_seeds_that_torch_does_not_take(run, capsys, seed):
    with pytest.raises(SystemExit) as stop:
        generate_main(["--checkpoint", str(run), "--prompt", "x", "--seed", seed])
    assert stop.value.code == 2
    assert f"'{seed}' is not an integer of at least 0 and less than {2**64}" in (
        capsys.readouterr().err
    )
    options = ["--checkpoint", str(run), "--prompt", "x", "--tokens", "2", "--temperature", "1"]
    assert generate_main([*options, "--seed", str(2**64 - 1)]) == 0


CASES = [("randomised_rotary", {"span": 64}, None), ("kerple_log", {}, ("blockwise", 4))]


@pytest.mark.parametrize(("name", "options", "window"), CASES)
def test_prompts_that_padding_would_move_are_continued_by_length(name, options, window):
    from data_prep.tokenizing import load_tokenizer

    words = load_tokenizer("byte")
    given = {"layers": 2, "hidden_size": 24, "heads": 2, "vocabulary": 257, "init_method_std": 0.3}
    shape = ModelShape(
        **given, pos_emb=name, max_length=64, position_options=options, window=window
    )
    model = GPT(shape).eval()
    assert batches_of(model, [3, 5, 3]) == [[0, 2], [1]]
    prompts = ["one", "seven", "two"]
    alone = [continued(model, words, [prompt], 8)[0] for prompt in prompts]
    assert continued(model, words, prompts, 8) == alone
    scorer = Scorer(model, words, 32)
    written = scorer.write([words.encode(prompt) for prompt in prompts], [], 8)
    assert [a + b for a, b in zip(prompts, written, strict=True)] == alone
