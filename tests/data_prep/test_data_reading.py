"""Raw data: every way of losing documents is an error or a count."""

import json
import sys

import pytest
import zstandard

from data_prep.errors import DataError, UsageError
from data_prep.reading import PILE_SETS, Document, Reading, expand, read, supported

TEXTS = [f"document {i}: zażółć 😀" for i in range(100)]


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def frame(data):
    return zstandard.ZstdCompressor().compress(data)


def texts_of(path, **options):
    reading = Reading(**options)
    return [document.text for document in read(expand([path]), reading)], reading


def write(path, data):
    path.write_bytes(data)
    return path


def test_jsonl(tmp_path):
    path = write(tmp_path / "a.jsonl", lines(TEXTS))
    found, reading = texts_of(path)
    assert found == TEXTS
    assert reading.documents == 100 and reading.input_bytes == path.stat().st_size
    assert list(reading.sources) == [str(path)]


@pytest.mark.parametrize("frames", [1, 2, 7])
def test_zst_with_many_frames(tmp_path, frames):
    step = -(-100 // frames)
    data = b"".join(frame(lines(TEXTS[i : i + step])) for i in range(0, 100, step))
    assert texts_of(write(tmp_path / "a.jsonl.zst", data))[0] == TEXTS


def test_zst_frame_that_splits_a_line_and_skippable_frame(tmp_path):
    data = lines(TEXTS)
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    whole = frame(data[:1001]) + skippable + frame(data[1001:])
    assert texts_of(write(tmp_path / "a.jsonl.zst", whole))[0] == TEXTS


def test_zst_with_a_long_window(tmp_path):
    parameters = zstandard.ZstdCompressionParameters(window_log=28)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(lines(TEXTS)) + compressor.flush()  # size unknown: window stays
    assert texts_of(write(tmp_path / "a.jsonl.zst", data))[0] == TEXTS


def test_every_cut_inside_a_frame_is_an_error(tmp_path):
    first, second = frame(lines(TEXTS[:50])), frame(lines(TEXTS[50:]))
    whole = first + second
    for cut in range(len(whole)):
        path = write(tmp_path / "a.jsonl.zst", whole[:cut])
        if cut == len(first):  # between frames nothing in the bytes can tell
            assert texts_of(path)[0] == TEXTS[:50]
            continue
        with pytest.raises(DataError, match="cut short"):
            texts_of(path)


def test_damaged_zst_is_an_error(tmp_path):
    data = bytearray(frame(lines(TEXTS)))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(DataError, match="damaged zstd|a.jsonl.zst:"):
        texts_of(write(tmp_path / "a.jsonl.zst", bytes(data)))
    with pytest.raises(DataError, match="damaged zstd"):
        texts_of(write(tmp_path / "a.jsonl.zst", frame(lines(TEXTS)) + b"garbage"))


@pytest.mark.parametrize(
    "record, message",
    [
        (b'{"text": null}', "'text' is null, not text"),
        (b'{"text": 3}', "'text' is 3, not text"),
        (b'{"text": {"a": 1}}', "not text"),
        (b'{"text": ["a", 1]}', "not text"),
        (b'{"content": "a"}', "no key 'text'; there are 'content'"),
        (b"{}", "no key 'text'; there are none"),
        (b"[1]", "not list"),
        (b"3", "not int"),
        (b"{", "indented JSON"),
        (b'{"text": "a"', "not JSON"),
        (b'{"text": "\xff"}', r"not UTF-8 at byte 10 \(0xff\)"),
        (rb'{"text": "a\ud800"}', "character 1 is a lone surrogate"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": ' + b"1" * 5000 + b"}", "not JSON"),
        ('{"text": "a"}'.encode("utf-16"), "not UTF-8|UTF-16"),
    ],
)
def test_bad_lines_are_named_or_counted(tmp_path, record, message):
    data = lines(["a"]) + record.replace(b"\n", b"") + b"\n" + lines(["b"])
    path = write(tmp_path / "a.jsonl", data)
    with pytest.raises(DataError, match=message) as caught:
        texts_of(path)
    assert str(caught.value).startswith(f"{path}:2: ") and "\n" not in str(caught.value)
    found, reading = texts_of(path, on_bad_line="skip")
    assert found == ["a", "b"] and reading.bad == 1 and f"{path}:2" in reading.first_bad


def test_odd_but_valid_records(tmp_path):
    data = (
        b'\xef\xbb\xbf{"text": "bom", "meta": {"a": [1]}}\r\n'
        b"\n   \n"
        b'{"text": ["one", "two"]}\n{"text": ""}\n{"text": []}\n"bare string"\n{"text": "no newline"}'
    )
    found, reading = texts_of(write(tmp_path / "a.jsonl", data))
    assert found == ["bom", "one\n\ntwo", "bare string", "no newline"]
    assert (reading.empty, reading.blank_lines, reading.documents) == (2, 2, 4)


def test_text_key(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "a", "content": "b"}\n')
    assert texts_of(path, text_key="content")[0] == ["b"]


def test_lines_longer_than_a_block(tmp_path):
    long = "x" * 3_000_000
    found, _ = texts_of(write(tmp_path / "a.jsonl.zst", frame(lines([long, "b", long]))))
    assert found == [long, "b", long]


def test_txt_files_and_folders_and_globs(tmp_path):
    (tmp_path / "sub").mkdir()
    write(tmp_path / "b.txt", b"\xef\xbb\xbfsecond\n")
    write(tmp_path / "a.txt", b"first\n")
    write(tmp_path / "sub" / "c.jsonl", lines(["third"]))
    write(tmp_path / ".hidden", b"no")
    wanted = ["first\n", "second\n", "third"]
    assert texts_of(tmp_path)[0] == wanted
    assert texts_of(tmp_path / "*.txt")[0] == wanted[:2]
    assert texts_of(tmp_path / "s*")[0] == wanted[2:]
    documents = list(read(expand([tmp_path / "sub"]), Reading()))
    assert documents == [Document("third", f"{tmp_path}/sub/c.jsonl:1")]


def test_txt_that_is_not_utf8(tmp_path):
    path = write(tmp_path / "a.txt", b"good\n\xe9")
    with pytest.raises(DataError, match=r"a.txt: not UTF-8 at byte 5"):
        texts_of(path)
    assert texts_of(path, on_bad_line="skip")[1].bad_reasons == {"not UTF-8": 1}
    with pytest.raises(DataError, match="UTF-16"):
        texts_of(write(tmp_path / "b.txt", "a".encode("utf-16")))


@pytest.mark.parametrize("name", ["a.csv", "a.xz", "a.md", "a", "a.zst", "a.gz"])
def test_unknown_endings_are_refused_by_name_also_in_folders(tmp_path, name):
    write(tmp_path / "good.jsonl", lines(["a"]))
    write(tmp_path / name, b"x")
    for given in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match=rf"{name}: unknown ending; supported are \.jsonl"):
            expand([given])


def test_missing_and_doubled_inputs(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        expand([tmp_path / "a.jsonl"])
    with pytest.raises(UsageError, match="no file matches"):
        expand([tmp_path])
    path = write(tmp_path / "a.jsonl", lines(["a"]))
    with pytest.raises(UsageError, match="a.jsonl: this input file is named twice; its documents"):
        expand([path, tmp_path])
    (tmp_path / "b.jsonl").symlink_to(path)
    with pytest.raises(UsageError, match="b.jsonl: .* named twice, also as .*a.jsonl; "):
        expand([tmp_path])


def test_lm_dataformat_archive(tmp_path):
    from lm_dataformat import Archive

    archive = Archive(str(tmp_path / "archive"))
    for text in TEXTS:
        archive.add_data(text, meta={"a": 1})
    archive.commit()
    archive.fh.close()
    assert texts_of(tmp_path / "archive")[0] == TEXTS
    write(tmp_path / "archive" / "current_chunk_incomplete", b"x")
    with pytest.raises(DataError, match="never committed"):
        texts_of(tmp_path / "archive")


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_without_pyarrow_the_message_says_what_to_install(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=rf"{name}: reading it needs pyarrow.*pip install pyarrow"):
        texts_of(write(tmp_path / name, b"PAR1"))


def test_the_pile_has_22_sets_and_endings_are_told():
    assert len(set(PILE_SETS)) == 22
    assert ".jsonl.zst.tar" in supported() and ".parquet" in supported()


def test_a_key_that_json_spells_in_escapes_is_not_there_twice_either(tmp_path):
    """As `json.dumps` writes every key that is not ASCII."""
    twice = json.dumps({"żółć": "first", "x": "second"}).replace('"x"', json.dumps("żółć"))
    path = write(
        tmp_path / "a.jsonl", f'{{"\\u017c\\u00f3\\u0142\\u0107": "good"}}\n{twice}'.encode()
    )
    assert "ż" not in path.read_text()
    with pytest.raises(DataError, match="a.jsonl:2: has the key 'żółć' twice"):
        texts_of(path, text_key="żółć")
    found, reading = texts_of(path, text_key="żółć", on_bad_line="skip")
    assert found == ["good"] and reading.bad_reasons == {"a key twice": 1}
