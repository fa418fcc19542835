"""The archive that we write: lm_dataformat reads it, and damage to it is seen."""

import json

import lm_dataformat
import pytest
import zstandard

from data_prep import archive
from data_prep.errors import DataError
from data_prep.reading import Document, Reading, expand, read

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # lm_dataformat leaves files open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TEXTS = [f'document {i}: zażółć 😀 \u2028 \\ "' for i in range(60)]


@pytest.fixture
def folder(tmp_path):
    with archive.ArchiveWriter(tmp_path / "documents") as writer:
        for i, text in enumerate(TEXTS):
            writer.add("valid" if i % 3 == 0 else "train", Document(text, f"a.jsonl:{i}"))
    assert writer.documents == {"train": 40, "valid": 20, "test": 0}
    return tmp_path / "documents"


def test_both_readers_and_our_own_give_the_documents(folder):
    assert list(archive.texts(folder, "train")) == [t for i, t in enumerate(TEXTS) if i % 3]
    assert list(archive.texts(folder, "valid")) == TEXTS[::3]
    ours = [document.text for document in read(expand([folder]), Reading())]
    assert sorted(ours) == sorted(TEXTS)
    assert ours == list(lm_dataformat.Reader(str(folder)).stream_data())


def test_a_record_says_where_it_came_from(folder):
    (file,) = folder.glob("*_valid.jsonl.zst")
    data = zstandard.ZstdDecompressor().decompressobj().decompress(file.read_bytes())
    assert json.loads(data.split(b"\n")[1]) == {
        "text": TEXTS[3],
        "meta": {"split": "valid", "origin": "a.jsonl:3"},
    }


def test_every_flipped_bit_is_seen_or_harmless(folder):
    """lm_dataformat writes no checksums; ours are in its frames, and it reads them all the same."""
    (file,) = folder.glob("*_valid.jsonl.zst")
    whole = file.read_bytes()
    assert zstandard.get_frame_parameters(whole).has_checksum
    refused = 0
    for bit in range(0, len(whole) * 8, 5):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            assert list(archive.texts(folder, "valid")) == TEXTS[::3]
        except DataError:
            refused += 1
    assert refused > len(whole) * 8 / 5 * 0.95
