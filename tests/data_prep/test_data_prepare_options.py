"""Options of a preparation: expected hashes, a component of The Pile, repaired text, the text key."""

import hashlib
import json
import sys
from types import SimpleNamespace

import pytest
from prepare_tools import quiet, run, tree, write_jsonl

from data_prep import options as options_module
from data_prep.indexed import IndexedDataset
from data_prep.prepare import prepare
from data_prep.tokenizing import load_tokenizer


def base(out, *inputs):
    return ["jsonl", "--output", out, "--tokenizer", "byte", "--split", "1", "--input", *inputs]


@pytest.fixture
def two(tmp_path):
    return [
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name} {i}"} for i in range(20)])
        for name in ("a", "b")
    ]


def sums_of(files):
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def listing(folder, files, sums):
    path = folder / "SHA256SUMS"
    path.write_text(
        "".join(f"{s}  some/where/{f.name}\n" for f, s in zip(files, sums, strict=True))
    )
    return path


def test_right_sums_pass_and_wrong_ones_leave_nothing(two, tmp_path, capsys):
    right = sums_of(two)
    for given in (right, [listing(tmp_path, two, right)], [s.upper() for s in right]):
        out = tmp_path / f"out{len(str(given))}"
        assert run(capsys, *base(out, *two), "--sha256", *given)[0] == 0
    for number in (0, 1):
        wrong = list(right)
        wrong[number] = "0" * 64
        for given in (wrong, [listing(tmp_path, two, wrong)]):
            code, _, log = run(capsys, *base(tmp_path / "no", *two), "--sha256", *given)
            assert code == 1 and f"{two[number]}: sha256 {right[number][:12]} is not that" in log
            assert not (tmp_path / "no").exists()


def test_a_wrong_sum_stops_at_the_end_of_its_file(two, tmp_path, capsys):
    two[1].write_text("this would fail if it were read")
    given = ["0" * 64, "1" * 64]
    code, _, log = run(capsys, *base(tmp_path / "o", *two), "--sha256", *given)
    assert code == 1 and f"{two[0]}: sha256" in log


def test_a_finished_folder_is_held_against_the_sums(two, tmp_path, capsys):
    out, right = tmp_path / "out", sums_of(two)
    assert run(capsys, *base(out, *two))[0] == 0
    before = tree(out)
    code, _, log = run(capsys, *base(out, *two), "--sha256", right[0], "0" * 64)
    assert code == 1 and "given by --sha256" in log and tree(out) == before
    assert run(capsys, *base(out, *two), "--sha256", *right)[0] == 0


@pytest.mark.parametrize(
    "given, message",
    [
        (["0" * 64], "1 sums for 2 input files"),
        (["0" * 64, "xyz"], "64 hexadecimal digits"),
        (["nowhere.txt"], "neither 64 hexadecimal digits nor a readable file"),
    ],
)
def test_unusable_sums_are_usage_errors(given, message, two, tmp_path, capsys):
    code, _, log = run(capsys, *base(tmp_path / "o", *two), "--sha256", *given)
    assert code == 2 and message in log and not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "content, message",
    [
        ("hello\n", ":1: 'SHA256  NAME' is wanted"),
        ("0" * 64 + "  a.jsonl\n", "has no sum of b.jsonl"),
        ("0" * 64 + "  y/a.jsonl\n" + "1" * 64 + "  x/a.jsonl\n", ":2: a second, other sum"),
    ],
)
def test_unusable_files_of_sums(content, message, two, tmp_path, capsys):
    (tmp_path / "sums").write_text(content)
    code, _, log = run(capsys, *base(tmp_path / "o", *two), "--sha256", tmp_path / "sums")
    assert code == 2 and message in log


def test_a_component_of_the_pile(tmp_path, capsys):
    sets = ["Github", "ArXiv", "OpenWebText2", "ArXiv"]
    records = [{"text": f"{i}", "meta": {"pile_set_name": name}} for i, name in enumerate(sets)]
    source = write_jsonl(tmp_path / "pile.jsonl", records)
    out = tmp_path / "o"
    code, _, log = run(capsys, *base(out, source), "--pile-set", "ArXiv")
    data, tokenizer = IndexedDataset(out / "train"), load_tokenizer("byte")
    assert code == 0 and "2 other sets" in log
    assert [tokenizer.decode(data.get(i)[:-1]) for i in range(len(data))] == ["1", "3"]
    assert data.sidecar["dropped"]["other_sets"] == 2
    assert data.sidecar["options"]["pile_set"] == "ArXiv"
    code, _, log = run(capsys, *base(out, source), "--pile-set", "Github")
    assert code == 1 and "pile_set: ArXiv -> Github" in log


def test_text_key_and_skipped_lines(tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", [{"content": "one"}, {"text": "two"}])
    code, _, log = run(capsys, *base(tmp_path / "o", source), "--text-key", "content",
                       "--on-bad-line", "skip")  # fmt: skip
    sidecar = IndexedDataset(tmp_path / "o" / "train").sidecar
    assert code == 0 and "1 bad, first " in log and sidecar["dropped"]["bad"] == 1
    assert sidecar["documents"] == 1


def test_text_is_repaired_counted_and_the_version_is_an_option(tmp_path, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "ftfy", SimpleNamespace(fix_text=lambda t: t.replace("Ã©", "é"))
    )
    monkeypatch.setattr(options_module, "ftfy_version", lambda: "1.2")
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in ("cafÃ©", "café", "tea")])
    prepared = prepare("jsonl", tmp_path / "o", inputs=[source], tokenizer="byte", split="1",
                       fix_text=True, say=quiet)  # fmt: skip
    # Repaired first: the two spellings are one document then.
    assert prepared["dropped"]["repaired"] == 1 and prepared["dropped"]["duplicates"] == 1
    assert prepared["options"]["identity"]["ftfy"] == "1.2"
    text = json.loads((tmp_path / "o" / "prepared.json").read_text())["splits"]["train"]
    assert text["documents"] == 2


def test_the_real_ftfy(tmp_path):
    pytest.importorskip("ftfy", reason="ftfy is an optional package")
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "schÃ¶n"}])
    prepare("jsonl", tmp_path / "o", inputs=[source], tokenizer="byte", split="1", fix_text=True,
            say=quiet)  # fmt: skip
    data = IndexedDataset(tmp_path / "o" / "train")
    assert load_tokenizer("byte").decode(data.get(0)[:-1]) == "schön"


def test_without_ftfy_the_message_says_what_to_install(two, tmp_path, capsys, monkeypatch):
    def missing(name):
        raise options_module.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(options_module.metadata, "version", missing)
    code, _, log = run(capsys, *base(tmp_path / "o", *two), "--fix-text")
    assert code == 2 and "pip install ftfy" in log and not (tmp_path / "o").exists()


def test_folders_prepared_before_an_option_existed_stay_valid():
    """An option that is not used leaves the record, and so its hash, as it was."""
    record = options_module.Options.of("jsonl", {}).record()
    assert set(record) == {
        *("corpus", "source", "tokenizer", "vocab_size", "append_eod", "split", "text_key"),
        *("on_bad_line", "min_characters", "max_document_bytes", "keep_duplicates", "order"),
        *("min_split_tokens", "keep_documents", "identity"),
    }
    used = options_module.Options.of("jsonl", {"pile_set": "ArXiv"}).record()
    assert used["pile_set"] == "ArXiv" and "fix_text" not in used
