"""JSON lines and arrays, .dat, compression, the Pile filter: exact documents, or a named error."""

import gzip
import hashlib
import json
import tracemalloc

import pytest
import zstandard

from data_prep.errors import DataError, UsageError
from data_prep.readers import streams
from data_prep.readers.json_array import array_elements
from data_prep.reading import Reading, expand, read

TEXTS = [f"document {i}: zażółć 😀" for i in range(100)]


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def dat(texts):
    return b"".join(b"%016d%b" % (len(text.encode()), text.encode()) for text in texts)


def frame(data):
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def texts_of(path, **options):
    reading = Reading(**options)
    return [document.text for document in read(expand([path]), reading)], reading


def write(path, data):
    path.write_bytes(data)
    return path


ARRAY = json.dumps(TEXTS).encode()
FILES = {
    "a.jsonl": lines(TEXTS),
    "a.json": lines(TEXTS),
    "b.json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode(),
    "a.jsonl.gz": gzip.compress(lines(TEXTS)),
    "a.json.gz": gzip.compress(lines(TEXTS)),
    "b.json.gz": gzip.compress(ARRAY),
    "a.json.zst": frame(ARRAY),
    "b.json.zst": frame(lines(TEXTS)),
    "a.dat.zst": frame(dat(TEXTS)),
    "A.JSONL.GZ": gzip.compress(lines(TEXTS)),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_gives_the_documents_and_the_hash(tmp_path, name):
    path = write(tmp_path / name, FILES[name])
    found, reading = texts_of(path)
    assert found == TEXTS
    assert reading.sources == {str(path): hashlib.sha256(FILES[name]).hexdigest()}
    assert reading.input_bytes == len(FILES[name])


@pytest.mark.parametrize("name", sorted(set(FILES) - {"a.jsonl", "a.json"}))
def test_every_cut_is_an_error(tmp_path, name):
    data = FILES[name]
    for cut in [*range(0, len(data), 19), len(data) - 1]:
        with pytest.raises(DataError, match=name):
            texts_of(write(tmp_path / name, data[:cut]))


@pytest.mark.parametrize("name", [*FILES, "a.tar", "a.tar.gz", "a.jsonl.zst.tar", "a.txt.gz"])
def test_a_file_without_bytes_is_an_error(tmp_path, name):
    for on_bad_line in ("stop", "skip"):
        with pytest.raises(DataError, match=name):
            texts_of(write(tmp_path / name, b""), on_bad_line=on_bad_line)


def test_an_empty_text_is_an_empty_document(tmp_path):
    assert texts_of(write(tmp_path / "a.txt", b""))[1].empty == 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.dat.zst"])
@pytest.mark.parametrize(
    "foreign",
    [
        frame(b"hello"),
        gzip.compress(b"hello", mtime=0),
        b"PK\x03\x04rest",
        b"%PDF-1.5\n%\xff\xff\n",
        b"a,b\n1,2\n",
        b"a" * 257 + b"ustar" + b"\n" * 300,
    ],
)
def test_a_foreign_file_is_an_error_even_when_bad_lines_are_skipped(tmp_path, name, foreign):
    if name.endswith(".zst") and foreign == frame(b"hello"):
        foreign = frame(foreign)
    if name.endswith(".gz") and foreign == gzip.compress(b"hello", mtime=0):
        foreign = gzip.compress(foreign)
    for on_bad_line in ("stop", "skip"):
        with pytest.raises(DataError, match=name):
            texts_of(write(tmp_path / name, foreign), on_bad_line=on_bad_line)


def test_what_a_misnamed_file_is_is_said(tmp_path):
    with pytest.raises(DataError, match="a.jsonl: is zstd, not JSON lines"):
        texts_of(write(tmp_path / "a.jsonl", frame(b"x")))
    with pytest.raises(DataError, match="a.jsonl.gz: damaged gzip data, in fact it is zstd"):
        texts_of(write(tmp_path / "a.jsonl.gz", frame(b"x")))


@pytest.mark.parametrize(("name", "kind"), [("a.jsonl.gz", "gzip"), ("a.jsonl.zst", "zstd")])
def test_what_was_never_compressed_is_told_from_damage(tmp_path, name, kind):
    with pytest.raises(DataError, match=rf"{name}: damaged {kind} data, or none at all: .*rename"):
        texts_of(write(tmp_path / name, lines(TEXTS)))
    for cut in (1, 2, 3):  # too short to tell
        with pytest.raises(DataError, match="cut short"):
            texts_of(
                write(
                    tmp_path / name, (gzip.compress(b"x") if kind == "gzip" else frame(b"x"))[:cut]
                )
            )


def test_skippable_frames_may_come_first(tmp_path):
    first = b"\x5a\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    assert texts_of(write(tmp_path / "a.jsonl.zst", first + frame(lines(TEXTS))))[0] == TEXTS


def test_a_record_with_two_texts_loses_none_without_a_word(tmp_path):
    twice = b'{"text": "first", "text": "second"}'
    path = write(tmp_path / "a.jsonl", lines(["good", 'a "text" of "text"']) + twice)
    with pytest.raises(DataError, match=r"a.jsonl:3: has the key 'text' twice"):
        texts_of(path)
    found, reading = texts_of(path, on_bad_line="skip")
    assert found == ["good", 'a "text" of "text"'] and reading.bad_reasons == {"a key twice": 1}
    other = write(tmp_path / "b.jsonl", b'{"id": 1, "id": 2, "text": "good"}')
    assert texts_of(other)[0] == ["good"]  # of no other key is a text
    array = write(tmp_path / "c.json", b'["good", ' + twice + b"]")
    with pytest.raises(DataError, match=r"c.json\[2\]: has the key 'text' twice"):
        texts_of(array)


def test_a_wrong_key_is_not_so_many_bad_lines(tmp_path):
    path = write(tmp_path / "a.jsonl", lines(TEXTS))
    with pytest.raises(DataError, match="none of its 100 records .* the right --text-key"):
        texts_of(path, text_key="content", on_bad_line="skip")


def test_bad_records_are_counted_by_reason(tmp_path):
    records = ['{"text": null}', '{"text": 3}', '{"text": 4}', "{}", "[", "7", '{"text": "good"}']
    path = write(tmp_path / "a.jsonl", "\n".join(records).encode() + b'\n"\xff"\n"\\ud800"')
    found, reading = texts_of(path, on_bad_line="skip")
    assert found == ["good"] and reading.bad == 8
    assert reading.bad_reasons == {
        "null": 1,
        "a int, not text": 2,
        "no such key": 1,
        "not JSON": 1,
        "no object": 1,
        "not UTF-8": 1,
        "lone surrogate": 1,
    }


def test_gzip_members_padding_and_garbage(tmp_path):
    half = len(FILES["a.jsonl"]) // 2
    parts = [gzip.compress(FILES["a.jsonl"][:half]), gzip.compress(FILES["a.jsonl"][half:])]
    path = tmp_path / "a.jsonl.gz"
    assert texts_of(write(path, b"".join(parts)))[0] == TEXTS
    assert texts_of(write(path, parts[0] + b"\0" * 512 + parts[1] + b"\0" * 70_000))[0] == TEXTS
    with pytest.raises(DataError, match="damaged gzip"):
        texts_of(write(path, b"".join(parts) + b"garbage"))
    wrong = bytearray(FILES["a.jsonl.gz"])
    wrong[-5] ^= 1  # of the checksum
    with pytest.raises(DataError, match="incorrect data check"):
        texts_of(write(path, bytes(wrong)))


def test_zst_with_the_longest_window(tmp_path):
    # By hand: the library needs gigabytes to write such a frame. One raw block, the last.
    data = lines(TEXTS)
    header = zstandard.FRAME_HEADER + bytes([0, (31 - 10) << 3])
    assert zstandard.get_frame_parameters(header + b"\0" * 16).window_size == 2**31
    long = header + (1 | len(data) << 3).to_bytes(3, "little") + data
    assert texts_of(write(tmp_path / "a.jsonl.zst", long + frame(data)))[0] == TEXTS * 2


def test_a_bomb_is_refused_and_memory_stays_flat(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BOMB_BYTES", 32 << 20)
    path = write(tmp_path / "a.jsonl.zst", frame(b"\n" * (80 << 20)))
    with pytest.raises(DataError, match="a.jsonl.zst: refused, .* no archive of text"):
        texts_of(path)
    monkeypatch.setattr(streams, "BOMB_BYTES", 128 << 20)
    many = write(tmp_path / "b.jsonl.zst", frame(b'{"text": "' + b"x" * 9980 + b'"}\n') * 3000)
    tracemalloc.start()
    assert sum(1 for _ in read([many], Reading())) == 3000
    assert tracemalloc.get_traced_memory()[1] < 4 << 20  # of 30 MB
    tracemalloc.stop()


def test_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "DOCUMENT_LIMIT", 100_000)
    with pytest.raises(DataError, match="a line of more than 100000 bytes"):
        texts_of(write(tmp_path / "a.jsonl", lines(["x" * 200_000])))
    path = write(tmp_path / "a.txt", b"x" * 200_000)
    with pytest.raises(DataError, match="a text of more than 100000 bytes"):
        texts_of(path)
    assert texts_of(path, on_bad_line="skip")[1].bad_reasons == {"too long": 1}


@pytest.mark.slow
def test_a_line_of_300_megabytes(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    text = "0123456789 " * (300_000_000 // 11)
    write(path, frame(lines(["before", text, "after"])))
    before, long, after = (document.text for document in read([path], Reading()))
    assert (before, after) == ("before", "after") and long == text


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 10_000])
def test_an_array_is_the_same_however_the_blocks_fall(size):
    array = [*TEXTS, 12345, -1.5e10, None, True, {"a": [1, {}]}, "x" * 5000, '"[,]\\', [], "ü"]
    data = json.dumps(array, ensure_ascii=False, indent=size % 2 or None).encode()
    blocks = (data[i : i + size] for i in range(0, len(data), size))
    assert list(array_elements(blocks, "a")) == array


@pytest.mark.parametrize(
    "data, message",
    [
        (b'["a", "b"', r"a: cut short after element 2"),
        (b'["a", "b', r"a\[2\]: cut short"),
        (b'["a",]', r"a\[2\]: cut short, or not JSON"),
        (b'["a" "b"]', "'\"' where , or ] belongs after element 1"),
        (b'["a"]["b"]', "more after the end"),
        (b'["a", nonsense and so on and on and on]', r"a\[2\]: not JSON"),
        (b'["a", "\xff"]', "a: not UTF-8 near byte 7"),
        (b"[" * 100_000, r"a\[1\]: not JSON"),
        (b"[" + b"1" * 5000 + b"]", r"a\[1\]: not JSON"),
        (b"{}", "no JSON array"),
    ],
)
def test_damaged_arrays(data, message):
    with pytest.raises(DataError, match=message) as caught:
        list(array_elements([data], "a"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data, message",
    [
        (dat(["a", "b"])[:-1], "document 2: cut short, 0 of 1 bytes"),
        (dat(["a"]) + b"00", "document 2: cut short at byte 17"),
        (b"{'text': 'not dat at all'}", "document 1: no length of 16 digits at byte 0"),
        (b"9" * 16, "document 1: claims 9999999999999999 bytes"),
    ],
)
def test_damaged_dat(tmp_path, data, message):
    with pytest.raises(DataError, match=message):
        texts_of(write(tmp_path / "a.dat.zst", frame(data)))


def test_dat_that_is_not_utf8(tmp_path):
    path = write(tmp_path / "a.dat.zst", frame(dat(["a"]) + b"%016d\xff" % 1 + dat(["b"])))
    with pytest.raises(DataError, match="document 2: not UTF-8 at byte 0"):
        texts_of(path)
    found, reading = texts_of(path, on_bad_line="skip")
    assert found == ["a", "b"] and reading.bad_reasons == {"not UTF-8": 1}


def pile(names):
    rows = [{"text": f"{i} of {n}", "meta": {"pile_set_name": n}} for i, n in enumerate(names)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_pile_set_keeps_exactly_that_set(tmp_path):
    path = write(tmp_path / "00.jsonl.zst", frame(pile(["Github", "ArXiv", "github", "Github"])))
    found, reading = texts_of(path, pile_set="Github")
    assert found == ["0 of Github", "3 of Github"]
    assert (reading.documents, reading.other_sets, reading.bad) == (2, 2, 0)
    reading = Reading()
    assert len(list(read([path], reading, pile_set="ArXiv"))) == 1
    found, reading = texts_of(path, pile_set="Enron Emails")
    assert found == [] and reading.other_sets == 4


@pytest.mark.parametrize(
    "name, data",
    [
        ("a.jsonl", lines(TEXTS)),
        ("a.jsonl", b'{"text": "a", "meta": {}}\n'),
        ("a.jsonl", b'{"text": "a", "meta": "Github"}\n'),
        ("a.json.zst", frame(ARRAY)),
        ("a.dat.zst", frame(dat(TEXTS))),
        ("a.txt", b"text"),
    ],
)
def test_a_file_without_names_cannot_be_filtered(tmp_path, name, data):
    for on_bad_line in ("stop", "skip"):
        with pytest.raises(DataError, match=f"{name}: .* cannot be filtered"):
            texts_of(write(tmp_path / name, data), pile_set="Github", on_bad_line=on_bad_line)


def test_one_row_without_a_name_is_a_bad_line(tmp_path):
    path = write(tmp_path / "a.jsonl", pile(["Github"]) + lines(["x"]) + pile(["Github"]))
    with pytest.raises(DataError, match="a.jsonl:2: no meta.pile_set_name"):
        texts_of(path, pile_set="Github")
    found, reading = texts_of(path, pile_set="Github", on_bad_line="skip")
    assert len(found) == 2 and reading.bad_reasons == {"no meta.pile_set_name": 1}
    found, reading = texts_of(path, pile_set="ArXiv", on_bad_line="skip")  # a shard without any
    assert found == [] and (reading.other_sets, reading.bad) == (2, 1)


@pytest.mark.parametrize(
    "name, near",
    [
        ("GitHub", "'Github'"),
        ("github", "'Github'"),
        ("openwebtext2", "'OpenWebText2'"),
        ("Arxiv", "'ArXiv'"),
        ("PubmedCentral", "'PubMed Central'"),
        ("zzz", "there are Pile-CC, PubMed Central"),
    ],
)
def test_unknown_pile_sets_get_the_nearest_name(name, near):
    with pytest.raises(UsageError, match=near):
        Reading(pile_set=name)
    with pytest.raises(UsageError, match=near):
        read([], Reading(), pile_set=name)
