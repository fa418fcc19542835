"""Tar archives: every header that tar and Python write, and nothing lost without a word."""

import gzip
import io
import json
import random
import shutil
import subprocess
import tarfile

import pytest
import zstandard

from data_prep.errors import DataError
from data_prep.reading import Reading, expand, read

TEXTS = [f"text {i}: ünïcode" for i in range(20)]


def frame(data):
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def member(name, data=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def tar(*members, mode="w", form=tarfile.PAX_FORMAT):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode, format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def texts_of(path, **options):
    reading = Reading(**options)
    return [document.text for document in read(expand([path]), reading)], reading


def write(path, data):
    path.write_bytes(data)
    return path


def openwebtext2(texts=TEXTS, **options):
    """The archive's own form: monthly .jsonl.zst members."""
    half = len(texts) // 2
    return tar(
        member("2005-06.jsonl.zst", frame(lines(texts[:half]))),
        member("2005-07.jsonl.zst", frame(lines(texts[half:]))),
        **options,
    )


FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


@pytest.mark.parametrize("form", FORMS)
def test_openwebtext2s_own_format(tmp_path, form):
    path = write(tmp_path / "o.jsonl.zst.tar", openwebtext2(form=FORMS[form]))
    documents = list(read([path], Reading()))
    assert [document.text for document in documents] == TEXTS
    assert documents[10].origin == f"{path}!2005-07.jsonl.zst:1"


@pytest.mark.parametrize("form", ["gnu", "pax"])
@pytest.mark.parametrize("mode, name", [("w", "a.tar"), ("w:gz", "a.tar.gz"), ("w:gz", "a.tgz")])
def test_long_names_and_numbers(tmp_path, form, mode, name):
    folder = "a long folder name of ä/" * 20
    extra = {"mtime": 12345.6789, "uid": 2**40, "uname": "ü" * 40}  # each of these is a pax record
    members = [member(f"{folder}{i}.tex", t.encode(), **extra) for i, t in enumerate(TEXTS)]
    path = write(tmp_path / name, tar(*members, mode=mode, form=FORMS[form]))
    documents = list(read([path], Reading()))
    assert [document.text for document in documents] == TEXTS
    assert documents[3].origin == f"{path}!{folder}3.tex"


def test_the_size_that_a_pax_header_gives_counts(tmp_path):
    data = TEXTS[0].encode()
    info, _ = member("a.tex", data)
    info.pax_headers = {"size": str(len(data))}
    whole = bytearray(tar((info, data)))
    header = 1024  # the extended header and its content come first
    fields = tarfile.TarInfo.frombuf(bytes(whole[header : header + 512]), "utf-8", "strict")
    fields.size = 0
    whole[header : header + 512] = fields.tobuf(tarfile.USTAR_FORMAT)
    assert texts_of(write(tmp_path / "a.tar", bytes(whole)))[0] == [TEXTS[0]]


def test_members_are_read_by_their_endings(tmp_path):
    members = [
        member("folder", type=tarfile.DIRTYPE),
        member("folder/a.jsonl", lines(TEXTS[:2])),
        member("b.jsonl.gz", gzip.compress(lines(TEXTS[2:4]))),
        member("c.json.zst", frame(json.dumps(TEXTS[4:6]).encode())),
        member("d.tex", TEXTS[6].encode()),
        member("e.tex.gz", gzip.compress(TEXTS[7].encode())),
        member("f.md.zst", frame(TEXTS[8].encode())),
        member("empty"),
        member("G.TXT", b"\xef\xbb\xbf" + TEXTS[9].encode()),
    ]
    for name, data in (
        ("a.tar", tar(*members)),
        ("a.tar.gz", tar(*members, mode="w:gz")),
        ("a.tar.zst", frame(tar(*members))),
    ):
        found, reading = texts_of(write(tmp_path / name, data))
        assert found == TEXTS[:10] and reading.empty == 1


BAD = {
    "a.pdf": (member("a.pdf", b"%PDF-1.4 only ASCII"), "binary"),
    "a.png": (member("a.png", b"\x89PNG\r\n"), "not UTF-8"),
    "a.bin": (member("a.bin", b"text\0text"), "binary"),
    "latin.tex": (member("latin.tex", b"caf\xe9"), "not UTF-8"),
    "cut.tex.gz": (member("cut.tex.gz", gzip.compress(b"hello hello")[:-4]), "damaged member"),
    "no.gz": (member("no.gz", b"hello"), "damaged member"),
    "inner.tar.gz": (member("inner.tar.gz", tar(mode="w:gz")), "an archive"),
    "a.parquet": (member("a.parquet", b"PAR1"), "an archive"),
    "soft": (member("soft", type=tarfile.SYMTYPE, linkname="/etc/hosts"), "a link"),
    "hard": (member("hard", type=tarfile.LNKTYPE, linkname="a.tex"), "a link"),
    "null": (member("null", type=tarfile.CHRTYPE), "a device"),
    "disk": (member("disk", type=tarfile.BLKTYPE), "a device"),
    "pipe": (member("pipe", type=tarfile.FIFOTYPE), "a pipe"),
    "odd": (member("odd", b"what is this", type=b"Z"), "a tar member of type 'Z'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_member_is_an_error_or_counted_and_the_rest_is_read(tmp_path, name):
    bad, reason = BAD[name]
    members = [member("1.tex", b"one"), bad, member("2.tex", b"two")]
    path = write(tmp_path / "a.tar.gz", tar(*members, mode="w:gz"))
    with pytest.raises(DataError) as caught:
        texts_of(path)
    assert str(caught.value).startswith(f"{path}!{name}: ")
    found, reading = texts_of(path, on_bad_line="skip")
    assert found == ["one", "two"] and reading.bad_reasons == {reason: 1}


@pytest.mark.parametrize(
    "data", [frame(lines(TEXTS))[:-3], b"", b"not zstd", gzip.compress(b"x", mtime=0)]
)
def test_a_damaged_member_of_many_documents_is_an_error_also_when_skipping(tmp_path, data):
    members = [member("1.jsonl.zst", frame(lines(["a"]))), member("2.jsonl.zst", data)]
    for name in ("a.jsonl.zst.tar", "a.tar"):
        for on_bad_line in ("stop", "skip"):
            with pytest.raises(DataError, match=f"{name}!2.jsonl.zst: (cut short|damaged zstd)"):
                texts_of(write(tmp_path / name, tar(*members)), on_bad_line=on_bad_line)


def test_damage_to_the_archive_is_not_one_bad_member(tmp_path):
    noise = random.Random(0).randbytes(300_000).hex().encode()
    data = bytearray(tar(member("1.txt", noise), member("2.txt", b"two"), mode="w:gz"))
    data[len(data) // 2] ^= 0xFF
    path = write(tmp_path / "a.tar.gz", bytes(data))
    with pytest.raises(DataError, match="a.tar.gz: damaged gzip data near byte"):
        texts_of(path, on_bad_line="skip")


def test_a_link_that_claims_a_size_has_no_data(tmp_path):
    link, _ = member("hard", type=tarfile.LNKTYPE, linkname="a.tex")
    link.size = 5000  # of the file that it stands for, as some programs write it
    data = link.tobuf(tarfile.USTAR_FORMAT) + tar(member("1.tex", b"one"))
    found, reading = texts_of(write(tmp_path / "a.tar", data), on_bad_line="skip")
    assert found == ["one"] and reading.bad_reasons == {"a link": 1}


def test_every_cut_is_an_error_between_members_too(tmp_path):
    whole = openwebtext2()
    end = len(whole.rstrip(b"\0"))
    mark = end + -end % 512
    assert not whole[mark:].strip(b"\0")
    for cut in sorted({*range(0, mark + 512, 64), end, mark, mark + 511}):
        with pytest.raises(DataError, match="o.jsonl.zst.tar"):
            texts_of(write(tmp_path / "o.jsonl.zst.tar", whole[:cut]))
    for cut in (mark + 512, mark + 1024, len(whole)):  # one block of zeros is enough
        assert texts_of(write(tmp_path / "o.jsonl.zst.tar", whole[:cut]))[0] == TEXTS


def test_archives_joined_end_to_end_are_all_read(tmp_path):
    path = write(tmp_path / "o.jsonl.zst.tar", openwebtext2() + openwebtext2())
    assert texts_of(path)[0] == TEXTS * 2
    with pytest.raises(DataError, match=r"no tar header at byte 10240 of the archive"):
        texts_of(write(path, openwebtext2() + b"garbage" * 100))


def test_a_damaged_header_in_the_middle_is_not_the_end(tmp_path):
    whole = bytearray(tar(*(member(f"{i}.tex", b"text") for i in range(3))))
    whole[1024 + 3] ^= 1
    with pytest.raises(DataError, match="no tar header at byte 1024 of the archive"):
        texts_of(write(tmp_path / "a.tar", bytes(whole)))


def test_names_are_no_paths_and_no_terminal_commands(tmp_path):
    names = ["/etc/passwd.tex", "../../up.tex", "\x1b[31mred\n.tex", "caf\udce9.tex"]
    members = [member(name, name.encode("utf-8", "replace")) for name in names]
    before = sorted(tmp_path.rglob("*"))
    path = write(tmp_path / "a.tar", tar(*members, form=tarfile.GNU_FORMAT))
    documents = list(read([path], Reading()))
    assert len(documents) == 4 and sorted(tmp_path.rglob("*")) == [*before, path]
    assert all(document.origin.isprintable() for document in documents)
    assert documents[3].origin.endswith(r"caf\xe9.tex")


def test_headers_that_claim_too_much(tmp_path):
    long = member("a" * (2 << 20), b"x")
    with pytest.raises(DataError, match="refused, an extended header of 2097"):
        texts_of(write(tmp_path / "a.tar", tar(long, form=tarfile.GNU_FORMAT)))
    info, _ = member("a.tex")
    info.size = 1 << 50
    with pytest.raises(DataError, match="a.tex: cut short, the archive ends at byte"):
        texts_of(write(tmp_path / "a.tar", info.tobuf(tarfile.GNU_FORMAT) + b"x" * 2000))
    for size in ("-1", "1e3", "9" * 30):
        info, data = member("a.tex", b"x")
        info.pax_headers = {"size": size}
        with pytest.raises(DataError, match="a.tex: a size of"):
            texts_of(write(tmp_path / "a.tar", tar((info, data))))


def test_damaged_and_orphaned_extended_headers(tmp_path):
    info, data = member("ü.tex", b"x")
    whole = tar((info, data))
    content = whole[512:1024]
    for wrong in (b"xx" + content[2:], b"99999 " + content[6:], b"5 abc" + content[5:]):
        with pytest.raises(DataError, match="a damaged extended header at byte 0"):
            texts_of(write(tmp_path / "a.tar", whole[:512] + wrong + whole[1024:]))
    with pytest.raises(DataError, match="an extended header without a member"):
        texts_of(write(tmp_path / "a.tar", whole[:1024] + b"\0" * 1024))


def test_a_global_header_is_read_over_unless_it_renames(tmp_path):
    def archive(**headers):
        stream = io.BytesIO()
        with tarfile.open(
            fileobj=stream, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers
        ) as made:
            made.addfile(member("a.tex", b"x")[0], io.BytesIO(b"x"))
        return write(tmp_path / "a.tar", stream.getvalue())

    assert texts_of(archive(comment="a commit"))[0] == ["x"]
    with pytest.raises(DataError, match="one path or size for all"):
        texts_of(archive(path="b.pdf"))


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar program")
@pytest.mark.parametrize("form", ["gnu", "posix", "ustar", "v7", "oldgnu"])
def test_archives_of_the_tar_program(tmp_path, form):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    for i, text in enumerate(TEXTS):
        (folder / "sub" / f"{i:02}.tex").write_text(text)
    path = tmp_path / "a.tar"
    command = ["tar", f"--format={form}", "--sort=name", "-cf", str(path), "-C", str(tmp_path)]
    subprocess.run([*command, "texts"], check=True)
    assert texts_of(path)[0] == TEXTS


@pytest.mark.skipif(shutil.which("tar") is None, reason="no tar program")
@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_sparse_members_are_refused_and_the_rest_is_read(tmp_path, form):
    with open(tmp_path / "1.txt", "wb") as stream:
        for i in range(40):  # more pieces than one header holds
            stream.seek(i << 20)
            stream.write(b"x" * 4096)
    (tmp_path / "2.txt").write_text("after")
    path = tmp_path / "a.tar"
    command = ["tar", f"--format={form}", "-S", "-cf", str(path), "-C", str(tmp_path)]
    subprocess.run([*command, "1.txt", "2.txt"], check=True)
    if path.stat().st_size > 10 << 20:
        pytest.skip("this disk keeps no holes")
    with pytest.raises(DataError, match="a sparse file, not a regular file"):
        texts_of(path)
    found, reading = texts_of(path, on_bad_line="skip")
    assert found == ["after"] and reading.bad_reasons == {"a sparse file": 1}


def test_a_tar_of_texts_cannot_be_filtered_one_of_shards_can(tmp_path):
    path = write(tmp_path / "a.tar.gz", tar(member("a.tex", b"x"), mode="w:gz"))
    with pytest.raises(DataError, match="a.tex: .* cannot be filtered"):
        texts_of(path, pile_set="ArXiv", on_bad_line="skip")
    rows = b'{"text": "a", "meta": {"pile_set_name": "ArXiv"}}\n'
    path = write(tmp_path / "b.tar", tar(member("00.jsonl.zst", frame(rows))))
    assert texts_of(path, pile_set="ArXiv")[0] == ["a"]


def test_hidden_members_are_left_out_as_in_folders(tmp_path):
    """What macOS and version control put beside the texts is none."""
    names = ["a.txt", "._a.txt", ".DS_Store", ".git/config.txt", "./b.txt", "x/../c.txt", "d..txt"]
    data = tar(*(member(name, f"text of {name}".encode()) for name in names))
    found, reading = texts_of(write(tmp_path / "notes.tar", data))
    assert found == [f"text of {name}" for name in ("a.txt", "./b.txt", "x/../c.txt", "d..txt")]
    assert reading.hidden == 3 and reading.bad == 0


def test_letters_at_the_place_of_a_tar_header_are_text(tmp_path):
    text = "x" * (257 - len('{"text": "')) + "ustar" + "y" * 400
    line = json.dumps({"text": text})
    assert line[257:262] == "ustar"
    found, _ = texts_of(write(tmp_path / "a.jsonl", line.encode() + b"\n"))
    assert found == [text]
    archive = write(tmp_path / "b.jsonl", tar(member("a.txt", b"text")))
    with pytest.raises(DataError, match="tar"):
        texts_of(archive)
