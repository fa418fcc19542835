"""The command from text to .bin/.idx: end to end, finished folders, killed and competing runs."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import zstandard
from lm_dataformat import Reader
from prepare_tools import ALL, GOLDEN, ROOT, TEXTS, ids_of, make_source, quiet, run, tree

from data_prep.errors import DataError
from data_prep.indexed import IndexedDataset
from data_prep.prepare import prepare
from data_prep.reading import Reading, expand, read
from data_prep.splits import NAMES, digest_of, parse_split, split_of
from data_prep.tokenizing import load_tokenizer


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path)


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


def test_two_preparations_exclude_each_other_and_a_killed_one_is_cleaned_up(source, tmp_path):
    out = tmp_path / "out"
    slow = (
        "import sys, time; from data_prep import archive; from data_prep.__main__ import main\n"
        "archive.ArchiveWriter.add = lambda *_: time.sleep(60)\n"
        "main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", slow, "jsonl", "--input", str(source), "--output", str(out)]
    with subprocess.Popen([*command, "--tokenizer", "byte"], cwd=ROOT) as process:
        deadline = time.monotonic() + 20
        while not list(out.glob(".partial-*/documents-train")) and time.monotonic() < deadline:
            time.sleep(0.02)
        with pytest.raises(DataError, match="another preparation is running"):
            prepare("jsonl", out, inputs=[source], tokenizer="byte", say=quiet)
        process.send_signal(signal.SIGKILL)
    names = [p.name for p in out.iterdir()]
    assert names and all(name.startswith(".partial-") for name in names)
    prepare("jsonl", out, inputs=[source], tokenizer="byte", say=quiet)
    assert sorted(p.name for p in out.iterdir()) == sorted(ALL)


def test_interrupt_is_exit_1_and_leaves_nothing(source, tmp_path, capsys, monkeypatch):
    """While reading; what is kept later on is in test_data_resume.py."""

    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("data_prep.preparation.read", interrupted)
    out = tmp_path / "out"
    code, _, log = run(capsys, "jsonl", "--input", source, "--output", out, "--tokenizer", "byte")
    assert code == 1 and "interrupted" in log and not out.exists()


def test_importing_the_format_loads_nothing_else():
    script = (
        "import sys, data_prep.indexed, data_prep.prepare\n"
        "late = {'torch', 'tokenizers', 'tiktoken', 'zstandard', 'lm_dataformat', 'rich'}\n"
        "assert not late & set(sys.modules), late & set(sys.modules)\n"
        "ours = {m.split('.')[0] for m in sys.modules} & {'megatron_patches', 'scripts'}\n"
        "assert not ours, ours\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], cwd=ROOT, check=True)
