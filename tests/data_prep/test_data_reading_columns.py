"""Parquet, arrow and folders of Hugging Face data sets; they need the extra `parquet`."""

import json
import random

import pytest

from data_prep.errors import DataError
from data_prep.reading import Reading, expand, read

TEXTS = [f"row {i}: ünïcode" for i in range(1000)]


def texts_of(path, **options):
    reading = Reading(**options)
    return [document.text for document in read(expand([path]), reading)], reading


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
from pyarrow import ipc, parquet  # noqa: E402


def table(texts=TEXTS, kind=None, **columns):
    return pyarrow.table({"text": pyarrow.array(texts, kind), **columns})


def as_parquet(path, data, **options):
    parquet.write_table(data, path, row_group_size=300, **options)
    return path


def as_stream(path, data, writer=ipc.new_stream):
    with pyarrow.OSFile(str(path), "wb") as stream, writer(stream, data.schema) as made:
        made.write_table(data, max_chunksize=100)
    return path


def as_file(path, data):
    return as_stream(path, data, ipc.new_file)


KINDS = {
    "a.parquet": as_parquet,
    "stream.arrow": as_stream,  # what `datasets` writes
    "file.arrow": as_file,
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_rows_in_order_and_named(tmp_path, name, kind):
    path = KINDS[name](tmp_path / name, table(kind=getattr(pyarrow, kind)(), other=[1] * 1000))
    documents = list(read([path], Reading()))
    assert [document.text for document in documents] == TEXTS
    assert documents[499].origin == f"{path}:500"
    reading = texts_of(path)[1]
    assert reading.input_bytes == path.stat().st_size and list(reading.sources) == [str(path)]


@pytest.mark.parametrize("name", KINDS)
def test_nulls_numbers_and_lists(tmp_path, name):
    path = KINDS[name](tmp_path / name, table(["a", None, "", "b"]))
    with pytest.raises(DataError, match=f"{name}:2: 'text' is null"):
        texts_of(path)
    found, reading = texts_of(path, on_bad_line="skip")
    assert found == ["a", "b"] and reading.bad_reasons == {"null": 1} and reading.empty == 1
    path = KINDS[name](tmp_path / name, table([["a", "b"], ["c"]]))
    assert texts_of(path)[0] == ["a\n\nb", "c"]
    path = KINDS[name](tmp_path / name, table([1, 2]))
    with pytest.raises(DataError, match="none of its 2 records is usable"):
        texts_of(path, on_bad_line="skip")


@pytest.mark.parametrize("name", KINDS)
def test_columns_and_the_pile(tmp_path, name):
    names = [{"pile_set_name": "ArXiv" if i % 2 else "Github"} for i in range(1000)]
    path = KINDS[name](tmp_path / name, table(meta=names, content=["x"] * 1000))
    found, reading = texts_of(path, pile_set="ArXiv")
    assert found == TEXTS[1::2] and reading.other_sets == 500
    assert texts_of(path, text_key="content")[0] == ["x"] * 1000
    with pytest.raises(DataError, match=f"{name}: no column 'body'; there are 'text', 'meta'"):
        texts_of(path, text_key="body", on_bad_line="skip")
    path = KINDS[name](tmp_path / name, table())
    with pytest.raises(DataError, match=f"{name}: .* cannot be filtered"):
        texts_of(path, pile_set="ArXiv")


@pytest.mark.parametrize("name", KINDS)
def test_cuts_joins_and_foreign_files(tmp_path, name):
    data = KINDS[name](tmp_path / "whole", table()).read_bytes()
    for cut in [*range(0, len(data), len(data) // 150), len(data) - 8, len(data) - 1]:
        with pytest.raises(DataError, match=name):
            texts_of(write(tmp_path / name, data[:cut]))
    for wrong in (data + data, b"", b"hello", b"\x28\xb5\x2f\xfd" * 9, b"PAR1", b"ARROW1\0\0"):
        with pytest.raises(DataError, match=name):
            texts_of(write(tmp_path / name, wrong))


@pytest.mark.parametrize("name", KINDS)
def test_a_flipped_bit_never_costs_rows_and_never_ends_the_process(tmp_path, name):
    """There is no checksum, so another text may come; fewer rows, or another exception, may not."""
    data = KINDS[name](tmp_path / "whole", table()).read_bytes()
    draw = random.Random(0)
    for _ in range(150):
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        try:
            found, reading = texts_of(write(tmp_path / name, bytes(flipped)))
        except DataError as error:
            assert name in str(error)  # noqa: PT017
        else:
            assert len(found) + reading.empty == 1000


def test_a_page_checksum_is_checked(tmp_path):
    path = tmp_path / "a.parquet"
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    data = bytearray(as_parquet(path, table(), **options).read_bytes())
    data[data.index(b"row 500")] ^= 1
    with pytest.raises(DataError, match="a.parquet: damaged.*CRC"):
        texts_of(write(path, bytes(data)))


def saved(folder, *shards, **state):
    """As `datasets` 5.2's save_to_disk leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data-{i:05}-of-{len(shards):05}.arrow" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        as_stream(folder / name, table(shard))
    listed = {"_data_files": [{"filename": name} for name in names], **state}
    (folder / "state.json").write_text(json.dumps(listed, indent=2))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}, indent=2))
    return folder


def test_a_saved_data_set(tmp_path):
    folder = saved(tmp_path / "set", TEXTS[:400], TEXTS[400:])
    as_stream(folder / "cache-0123456789abcdef.arrow", table(["twice"]))  # of a filter
    assert texts_of(folder)[0] == TEXTS
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match="names data-00001-of-00002.arrow, which is not there"):
        texts_of(folder)


def test_a_saved_dictionary_of_splits(tmp_path):
    saved(tmp_path / "train", TEXTS[:400])
    saved(tmp_path / "validation", TEXTS[400:])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    assert texts_of(tmp_path)[0] == TEXTS


def test_the_cache_of_datasets_and_a_copy_from_its_hub(tmp_path):
    cache = tmp_path / "cache" / "json" / "0.0.0"
    cache.mkdir(parents=True)
    as_stream(cache / "json-train.arrow", table())
    write(cache / "dataset_info.json", b"{}")
    write(cache.parent / "0.0.0_builder.lock", b"")
    assert texts_of(tmp_path / "cache")[0] == TEXTS
    as_stream(cache / "cache-0123456789abcdef.arrow", table(["twice"]))
    with pytest.raises(DataError, match="cache-0123456789abcdef.arrow: an intermediate result"):
        texts_of(tmp_path / "cache")
    write(tmp_path / "hub" / "README.md", b"a card")
    write(tmp_path / "hub" / ".gitattributes", b"")
    (tmp_path / "hub" / "data").mkdir()
    as_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", table())
    assert texts_of(tmp_path / "hub")[0] == TEXTS


@pytest.mark.parametrize(
    "state, message",
    [
        ({"_data_files": [{"filename": "../a.arrow"}]}, "outside its folder"),
        ({"_data_files": "a"}, "not the state of a saved data set"),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, "rows picked by an index"),
    ],
)
def test_states_that_are_not_followed(tmp_path, state, message):
    with pytest.raises(DataError, match=f"state.json.*{message}"):
        texts_of(saved(tmp_path / "set", TEXTS, **state))
