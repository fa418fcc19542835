"""Unusable text and wrong requests: one line that says what to do, and nothing left behind."""

import json

import pytest
from prepare_tools import GOLDEN, make_source, run

from data_prep.__main__ import main
from data_prep.errors import DataError, UsageError
from data_prep.prepare import prepare
from data_prep.reading import expand


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path)


@pytest.mark.parametrize(
    "lines, options, message",
    [
        ("", [], "has no bytes"),
        ("\n", [], "no documents left"),
        ('{"text": ""}\n', [], "1 empty"),
        ('{"text": "a"}\n', ["--min-characters", 5], "1 too short"),
        ('{"text": "a"}\n', [], "is empty: "),
        ('{"text": "a"}\n', ["--split", "1", "--min-split-tokens", 9], "'train': 2"),
        ('{"txt": "a"}\n', [], "no key 'text'"),
        ('{"txt": "a"}\n', ["--on-bad-line", "skip"], "none of its 1 records"),
        ('{"text": "a"\n', [], ":1: not JSON"),
    ],
)
def test_unusable_text_is_one_line_and_leaves_nothing(lines, options, message, tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_text(lines)
    out = tmp_path / "deep" / "out"
    code, shown, log = run(
        capsys, "jsonl", "--input", source, "--output", out, "--tokenizer", "byte", *options
    )
    assert code == 1 and message in log and shown == ""
    assert log.splitlines()[-1].startswith("data_prep: ") and "Traceback" not in log
    assert not out.exists()


def test_truncated_archive_leaves_nothing(source, tmp_path, capsys):
    source.write_bytes(source.read_bytes()[:-20])
    out = tmp_path / "out"
    code, _, log = run(capsys, "jsonl", "--input", source, "--output", out, "--tokenizer", "byte")
    assert code == 1 and "cut short" in log and not out.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nope", "--output", "o"], "no corpus 'nope'"),
        (["local_cod", "--output", "o"], "did you mean local_code?"),
        (["jsonl", "--output", "o"], "needs --input"),
        (["jsonl", "--input", __file__], "needs --output"),
        (["local_code", "--output", "o", "--split", "published"], "no published splits"),
        (["local_code", "--output", "o", "--pile-set", "ArXiv"], "none of it"),
        (["jsonl", "--output", "o", "--input", "x", "--pile-set", "Arxiv"], "'ArXiv'"),
        (["jsonl", "--output", "o", "--input", "missing.jsonl"], "no such file"),
        (["local_code", "--output", "o", "--input", __file__], "unknown ending"),
        (["local_code", "--output", "o", "--source", "x"], "no source 'x'"),
        (["local_code", "--output", "o", "--split", "x"], "split 'x'"),
        (["local_code", "--output", "o", "--workers", "0"], "--workers 0"),
        (["local_code", "--output", "o", "--vocab-size", "100"], "at least 257"),
        (["local_code", "--output", "o", "--tokenizer", "byte", "--vocab-size", "999"], "is for"),
        (["local_code", "--output", "o", "--tokenizer", "missing.json"], "no tokenizer"),
        (["local_code", "--output", __file__], "is a file"),
    ],
)
def test_wrong_requests_exit_2_or_name_the_file(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, log = run(capsys, *arguments)
    assert code == (1 if message == "unknown ending" else 2)
    assert message in log and log.count("\n") == 1 and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["merge", "--help"]])
def test_help_has_an_example(arguments, capsys):
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert "example" in capsys.readouterr().out


def test_a_tokenizer_without_eod_stops_before_reading(tmp_path, capsys):
    content = json.loads((GOLDEN / "tok_c.json").read_text())
    content["added_tokens"] = []
    del content["model"]["vocab"]["<|endoftext|>"]
    (tmp_path / "t.json").write_text(json.dumps(content))
    source = tmp_path / "bad.jsonl"
    source.write_text("this would fail if it were read")
    base = ["jsonl", "--input", source, "--output", tmp_path / "o", "--tokenizer"]
    code, _, log = run(capsys, *base, tmp_path / "t.json")
    assert code == 2 and "has no <|endoftext|> to append" in log
    source.write_text('{"text": "abc"}\n')
    assert run(capsys, *base, tmp_path / "t.json", "--no-append-eod", "--split", "1")[0] == 0


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(UsageError):
        main(["jsonl", "--output", str(tmp_path / "o"), "--debug"])


def test_force_deletes_nothing_that_no_preparation_made(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(
        "".join(json.dumps({"text": f"document {n} " * 40}) + "\n" for n in range(60))
    )
    mine = tmp_path / "out" / "documents" / "thesis.odt"
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    with pytest.raises(DataError, match="thesis.odt, which no preparation made"):
        prepare("jsonl", tmp_path / "out", inputs=[source], tokenizer="byte", force=True)
    assert mine.read_text() == "years of work"


def test_inputs_inside_the_output_are_refused(tmp_path):
    inside = tmp_path / "out" / "documents" / "data_0.jsonl"
    inside.parent.mkdir(parents=True)
    inside.write_text(json.dumps({"text": "one"}) + "\n")
    with pytest.raises(DataError, match="lies in the output"):
        prepare("jsonl", tmp_path / "out", inputs=[inside], tokenizer="byte", force=True)


def test_a_link_to_a_folder_is_an_error(tmp_path):

    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.jsonl").write_text("{}")
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "b.jsonl").write_text("{}")
    (tmp_path / "top" / "link").symlink_to(tmp_path / "real")
    with pytest.raises(DataError, match="link to a folder"):
        expand([tmp_path / "top"])
