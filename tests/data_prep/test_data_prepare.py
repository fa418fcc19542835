"""The command: finished folders, refused requests, and nothing left by failed or killed runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zstandard
from lm_dataformat import Reader

from data_prep import corpora
from data_prep.__main__ import main
from data_prep.corpora import LocalCorpus, PublishedCorpus
from data_prep.corpora._base import Fetched
from data_prep.errors import DataError, UsageError
from data_prep.indexed import IndexedDataset
from data_prep.prepare import prepare
from data_prep.reading import Document, Reading, expand, read
from data_prep.splits import NAMES, digest_of, parse_split, split_of
from data_prep.tokenizing import load_tokenizer

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parents[1] / "goldens" / "neox_data"
TEXTS = [
    f"document {i}\n" + "the quick brown fox, żółć 😀 <|endoftext|>\n" * (i % 7) for i in range(300)
]
ALL = ["documents", "prepared.json", "tokenizer.json"] + sorted(
    f"{name}.{suffix}" for name in NAMES for suffix in ("bin", "idx", "json")
)


def quiet(_line):
    pass


@pytest.fixture
def source(tmp_path):
    data = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    path = tmp_path / "source.jsonl.zst"
    path.write_bytes(zstandard.compress(data[:4000]) + zstandard.compress(data[4000:]))
    return path


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def tree(folder):
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def ids_of(folder):
    return {
        name: [IndexedDataset(folder / name).get(i).tolist() for i in range(len(data))]
        for name in NAMES
        if (data := IndexedDataset(folder / name))
    }


def test_jsonl_zst_end_to_end(source, tmp_path, capsys):
    out = tmp_path / "out"
    code, shown, log = run(
        capsys, "jsonl", "--input", source, "--output", out, "--tokenizer", "train",
        "--vocab-size", 400, "--split", "80,15,5",
    )  # fmt: skip
    assert code == 0 and "windows of 16384" in shown and "MB in" in log
    assert sorted(p.name for p in out.iterdir()) == sorted(ALL)
    tokenizer = load_tokenizer(out)
    where = {t: split_of(digest_of(t), parse_split("80,15,5")) for t in TEXTS}
    prepared = json.loads((out / "prepared.json").read_text())
    for name in NAMES:
        data = IndexedDataset(out / name)
        data.verify()
        texts = [text for text in TEXTS if where[text] == name]
        assert [tokenizer.decode(data.get(i)[:-1]) for i in range(len(data))] == texts
        assert all(data.get(i)[-1] == tokenizer.eod for i in range(len(data)))
        assert int((data.tokens == tokenizer.eod).sum()) == len(texts)
        assert data.sidecar["tokenizer"] == tokenizer.describe()
        assert data.sidecar["text_bytes"] == sum(len(text.encode()) for text in texts)
        assert data.sidecar["split"] == name and data.sidecar["sources"]["files"] == 1
        assert prepared["splits"][name]["fingerprint"] == data.fingerprint
        assert str(tmp_path) not in json.dumps(data.sidecar)  # names of sources, not paths


def test_the_archive_is_lm_dataformats(source, tmp_path):
    out = tmp_path / "out"
    prepare("jsonl", out, inputs=[source], tokenizer="byte", say=quiet)
    theirs = list(Reader(str(out / "documents")).stream_data(get_meta=True))
    assert sorted(text for text, _ in theirs) == sorted(TEXTS)
    assert {meta["split"] for _, meta in theirs} == set(NAMES)
    ours = [d.text for d in read(expand([out / "documents"]), Reading())]
    assert sorted(ours) == sorted(TEXTS)
    other = tmp_path / "again"
    prepare("jsonl", other, inputs=[out / "documents"], tokenizer="byte", order="hash", say=quiet)
    assert {n: sorted(i) for n, i in ids_of(out).items()} == (
        {n: sorted(i) for n, i in ids_of(other).items()}
    )


def test_training_sees_the_training_split_alone(tmp_path):
    shares = parse_split("50,50")
    texts = [f"{i} " + ("QQQQ" if split_of(digest_of(f"{i} QQQQ"), shares) == "valid" else "aaaa")
             for i in range(200)]  # fmt: skip
    texts = [
        text for text in texts if (split_of(digest_of(text), shares) == "valid") == ("Q" in text)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    prepare("jsonl", tmp_path / "o", inputs=[path], split="50,50", tokenizer="train",
            vocab_size=300, say=quiet)  # fmt: skip
    content = json.loads((tmp_path / "o" / "tokenizer.json").read_text())
    assert any("aa" in token for token in content["model"]["vocab"])
    assert not any("QQ" in token for token in content["model"]["vocab"])


def test_equals_neox_for_corpus_a(tmp_path):
    out = tmp_path / "out"
    prepare(
        "jsonl", out, inputs=[GOLDEN / "corpus_a.jsonl"], tokenizer=str(GOLDEN / "tok_a.json"),
        split="100", keep_duplicates=True, keep_documents=False, say=quiet,
    )  # fmt: skip
    for suffix in ("bin", "idx"):
        golden = (GOLDEN / f"a_text_document.{suffix}").read_bytes()
        assert (out / f"train.{suffix}").read_bytes() == golden
    assert sorted(p.name for p in out.iterdir()) == (
        ["prepared.json", "tokenizer.json", "train.bin", "train.idx", "train.json"]
    )
    assert (out / "tokenizer.json").read_bytes() == (GOLDEN / "tok_a.json").read_bytes()


def test_output_does_not_depend_on_workers(source, tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.pool._WORTH_A_PROCESS", 1000)
    for workers in (1, 2):
        prepare("jsonl", tmp_path / str(workers), inputs=[source], tokenizer="train",
                vocab_size=400, workers=workers, say=quiet)  # fmt: skip
    for name in NAMES:
        for suffix in ("bin", "idx"):
            one, two = (tmp_path / w / f"{name}.{suffix}" for w in "12")
            assert one.read_bytes() == two.read_bytes()


def test_again_is_a_no_op_and_other_options_or_inputs_an_error(source, tmp_path, capsys):
    out = tmp_path / "out"
    base = ["jsonl", "--input", source, "--output", out]
    assert run(capsys, *base, "--tokenizer", "byte")[0] == 0
    before = tree(out)
    code, shown, log = run(capsys, *base, "--tokenizer", "byte", "--workers", 2)
    assert code == 0 and "nothing to do" in log and "fingerprint" in shown and tree(out) == before
    code, _, log = run(capsys, *base, "--tokenizer", "byte", "--no-append-eod")
    assert code == 1 and "append_eod: True -> False" in log and tree(out) == before
    code, _, log = run(capsys, *base, "--tokenizer", GOLDEN / "tok_c.json")
    assert code == 1 and "other options" in log and tree(out) == before
    os.utime(source)  # a copy has a new time and the same bytes
    assert run(capsys, *base, "--tokenizer", "byte")[0] == 0
    data = bytearray(source.read_bytes())
    source.write_bytes(data + zstandard.compress(b'{"text": "more"}\n'))
    code, _, log = run(capsys, *base, "--tokenizer", "byte")
    assert code == 1 and "other input files" in log and tree(out) == before
    assert run(capsys, *base, "--tokenizer", "byte", "--force")[0] == 0
    assert tree(out) != before
    (out / "valid.bin").unlink()
    code, _, log = run(capsys, *base, "--tokenizer", "byte")
    assert code == 1 and "valid is missing" in log
    (out / "prepared.json").unlink()
    code, _, log = run(capsys, *base, "--tokenizer", "byte")
    assert code == 1 and "not a finished preparation" in log
    assert run(capsys, *base, "--tokenizer", "byte", "--force")[0] == 0


def test_a_failed_force_keeps_the_old_output(source, tmp_path, capsys):
    out = tmp_path / "out"
    prepare("jsonl", out, inputs=[source], tokenizer="byte", say=quiet)
    before = tree(out)
    code, _, log = run(
        capsys, "jsonl", "--input", source, "--output", out, "--tokenizer", "byte", "--force",
        "--min-split-tokens", 10**6,
    )  # fmt: skip
    assert code == 1 and "too short" in log and tree(out) == before


@pytest.mark.parametrize(
    "lines, options, message",
    [
        ("", [], "no documents left"),
        ('{"text": ""}\n', [], "1 empty"),
        ('{"text": "a"}\n', ["--min-characters", 5], "1 too short"),
        ('{"text": "a"}\n', [], "is empty: "),
        ('{"text": "a"}\n', ["--split", "1", "--min-split-tokens", 9], "'train': 2"),
        ('{"txt": "a"}\n', [], "no key 'text'"),
        ('{"txt": "a"}\n', ["--on-bad-line", "skip"], "1 bad, first "),
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


@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"]])
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


@pytest.mark.parametrize("corpus", ["openwebtext2", "github", "arxiv"])
def test_published_corpora_say_what_is_wanted_and_never_download(corpus, tmp_path, capsys):
    code, _, log = run(capsys, corpus, "--output", tmp_path / "o")
    assert code == 2 and "--input" in log and "sha256" in log and "licence" in log
    known = corpora.get(corpus)
    assert isinstance(known, PublishedCorpus)
    name = next(n for n in [*known.files, "any.jsonl.zst"] if n.endswith(".jsonl.zst"))
    path = tmp_path / name
    path.write_bytes(zstandard.compress(b'{"text": "abc"}\n'))
    code, _, log = run(
        capsys, corpus, "--output", tmp_path / "o", "--input", path, "--split", "1",
        "--tokenizer", "byte",
    )  # fmt: skip
    assert code == (1 if name in known.files else 0)
    assert ("not that of the published file" in log) == (name in known.files)


def test_every_file_of_the_folder_is_a_corpus():
    assert "local_code" in corpora.names() and len(corpora.names()) >= 6
    for name in corpora.names():
        known = corpora.get(name)
        assert known.about and known.licence
        if isinstance(known, LocalCorpus):
            assert known.sources


def test_a_failing_source_names_the_alternative(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "out"
    code, _, log = run(capsys, "local_prose", "--output", out)
    assert code == 1 and "apt-get" in log and "--source sotu" in log and not out.exists()
    code, _, log = run(capsys, "local_prose", "--output", out, "--source", "sotu")
    assert code == 1 and "npm" in log and "--source anarchism" in log and not out.exists()


def test_local_code_small(tmp_path):
    """The real standard library with bytes as tokens: quick, and the counts are the files'."""
    prepared = prepare(
        "local_code", tmp_path / "o", tokenizer="byte", keep_documents=False, say=quiet
    )
    splits = prepared["splits"]
    assert splits["valid"]["tokens"] > 17 * 16384 and splits["test"]["tokens"] > 3 * 16384
    for split in splits.values():
        assert split["tokens"] == split["text_bytes"] + split["documents"]
    assert prepared["sources"]["python"] == ".".join(map(str, sys.version_info[:3]))
    data = IndexedDataset(tmp_path / "o" / "train")
    firsts = [digest_of(load_tokenizer("byte").decode(data.get(i)[:-1])) for i in range(5)]
    assert firsts == sorted(firsts)


def test_a_local_corpus_that_fails_midway_leaves_nothing(tmp_path, monkeypatch):
    def broken():
        for i in range(50):
            yield Document(f"text {i} " * 100, str(i))
        raise OSError("disk gone")

    corpus = LocalCorpus("a", "b", {"only": lambda scratch: Fetched(broken(), {})}, {})
    monkeypatch.setattr(corpora, "get", lambda name: corpus)
    with pytest.raises(OSError, match="disk gone"):
        prepare("made_up", tmp_path / "o", tokenizer="byte", say=quiet)
    assert list(tmp_path.iterdir()) == []


def test_two_preparations_exclude_each_other_and_a_killed_one_is_cleaned_up(source, tmp_path):
    out = tmp_path / "out"
    fifo = tmp_path / "slow.jsonl"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "data_prep", "jsonl", "--input", str(fifo), "--output"]
    with subprocess.Popen(
        [*command, str(out), "--tokenizer", "byte"], cwd=ROOT, stderr=subprocess.PIPE
    ) as process:
        with open(fifo, "wb") as stream:
            stream.write(b'{"text": "abc"}\n' * 10)
            stream.flush()
            deadline = time.monotonic() + 20
            while not list(out.glob(".partial-*/documents-train")) and time.monotonic() < deadline:
                time.sleep(0.02)
            with pytest.raises(DataError, match="another preparation is running"):
                prepare("jsonl", out, inputs=[source], tokenizer="byte", say=quiet)
            process.send_signal(signal.SIGKILL)
        process.wait()
    names = [p.name for p in out.iterdir()]
    assert names and all(name.startswith(".partial-") for name in names)
    prepare("jsonl", out, inputs=[source], tokenizer="byte", say=quiet)
    assert sorted(p.name for p in out.iterdir()) == sorted(ALL)


def test_interrupt_is_exit_1_and_leaves_nothing(source, tmp_path, capsys, monkeypatch):
    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("data_prep.prepare.encode_all", interrupted)
    out = tmp_path / "out"
    code, _, log = run(capsys, "jsonl", "--input", source, "--output", out, "--tokenizer", "byte")
    assert code == 1 and "interrupted" in log and not out.exists()


def test_inspect(source, tmp_path, capsys):
    out = tmp_path / "out"
    prepare("jsonl", out, inputs=[source], tokenizer="byte", say=quiet)
    code, shown, _ = run(capsys, "inspect", out / "train", "--documents", 1)
    data = IndexedDataset(out / "train")
    assert code == 0 and data.fingerprint in shown and "verified" in shown
    assert f"{len(data)} documents" in shown and f"{len(data.tokens)} tokens" in shown
    assert f"at the end of {len(data)} of {len(data)} documents" in shown
    assert "document 0" in shown and TEXTS[0].splitlines()[0][:8] in shown
    code, shown, _ = run(capsys, "inspect", GOLDEN / "c_eod_text_document")
    assert code == 0 and "another tool" in shown and "give --tokenizer" in shown
    code, shown, _ = run(
        capsys, "inspect", GOLDEN / "c_eod_text_document", "--tokenizer", GOLDEN / "tok_c.json"
    )
    assert code == 0 and "quick brown fox" in shown
    with open(out / "train.bin", "r+b") as stream:
        stream.write(b"\x07")
    code, _, log = run(capsys, "inspect", out / "train")
    assert code == 1 and "not what its sidecar describes" in log
    assert run(capsys, "inspect", out / "nowhere")[0] == 1


def test_importing_the_format_loads_nothing_else():
    script = (
        "import sys, data_prep.indexed, data_prep.prepare\n"
        "late = {'torch', 'tokenizers', 'tiktoken', 'zstandard', 'lm_dataformat', 'rich'}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)\n"
        "ours = {m.split('.')[0] for m in sys.modules} & {'megatron_patches', 'scripts'}\n"
        "assert not ours, ours\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, check=True)


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
