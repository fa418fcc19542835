"""Our .bin/.idx against the builders and readers of others, byte by byte, where they are at hand."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from prepare_tools import ROOT, quiet

from data_prep.indexed import IndexedDataset, write_indexed
from data_prep.merging import merge

DOCUMENTS = [list(range(1, 40)), [], [7], [5, 6, 7] * 100, [250]]

NEOX = """
import json, sys, types, importlib.util
if importlib.util.find_spec("pkg_resources") is None:
    import packaging.version
    stub = sys.modules["pkg_resources"] = types.ModuleType("pkg_resources")
    stub.packaging = packaging
# The format's module alone: importing all of NeoX takes packages that it does not need.
package = types.ModuleType("megatron")
package.__path__, package.print_rank_0 = [sys.argv[1] + "/megatron"], print
sys.modules["megatron"] = package
import numpy as np
spec = importlib.util.spec_from_file_location(
    "indexed", sys.argv[1] + "/megatron/data/indexed_dataset.py")
indexed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(indexed)
job = json.load(sys.stdin)
if "documents" in job:
    builder = indexed.make_builder(job["prefix"] + ".bin", "mmap", vocab_size=job["vocab"])
    for document in job["documents"]:
        builder.add_item(np.array(document, dtype=builder.dtype))
        builder.end_document()
    builder.finalize(job["prefix"] + ".idx")
else:
    data = indexed.make_dataset(job["prefix"], "mmap", skip_warmup=True)
    found = [np.array(data[i]).tolist() for i in range(len(data))]
    print(json.dumps([found, np.array(data.doc_idx).tolist()]))
"""


def neox(**job):
    done = subprocess.run([sys.executable, "-c", NEOX, os.environ["NEOX_HOME"]], cwd=ROOT,
                          input=json.dumps(job), capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_same_files(one, other):
    for suffix in (".bin", ".idx"):
        ours, theirs = (p.with_name(p.name + suffix).read_bytes() for p in (one, other))
        assert ours == theirs, suffix


@pytest.fixture(params=[50257, 65499, 65500, 100_000])
def vocab(request):
    return request.param


@pytest.mark.neox
def test_neox_writes_the_same_bytes(vocab, tmp_path):
    documents = [*DOCUMENTS, [vocab - 1]]
    write_indexed(tmp_path / "ours", documents, vocab_size=vocab, sidecar={})
    neox(prefix=str(tmp_path / "theirs"), documents=documents, vocab=vocab)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.neox
def test_neox_reads_what_we_write_and_merge(tmp_path):
    sidecar = {"tokenizer": {"fingerprint": "t"}}
    for name in "ab":
        write_indexed(tmp_path / name, DOCUMENTS, vocab_size=300, sidecar=sidecar)
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "m", say=quiet)
    found, documents = json.loads(neox(prefix=str(tmp_path / "m")).splitlines()[-1])
    assert found == DOCUMENTS * 2
    assert documents == list(range(2 * len(DOCUMENTS) + 1))


def importable(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package that is not there
        return False


@pytest.mark.skipif(not importable("megatron.core"), reason="megatron-core is not installed")
def test_megatron_core_writes_the_same_bytes_and_reads_ours(vocab, tmp_path):
    documents = [*DOCUMENTS, [vocab - 1]]
    write_indexed(tmp_path / "ours", documents, vocab_size=vocab, sidecar={})
    script = (
        "import json, sys, torch\n"
        "from megatron.core.datasets.indexed_dataset import *\n"
        "prefix, vocab, documents = sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)\n"
        "builder = IndexedDatasetBuilder(prefix + 'theirs.bin', DType.optimal_dtype(vocab))\n"
        "for document in documents:\n"
        "    builder.add_item(torch.tensor(document, dtype=torch.int64))\n"
        "    builder.end_document()\n"
        "builder.finalize(prefix + 'theirs.idx')\n"
        "data = IndexedDataset(prefix + 'ours')\n"
        "assert [data[i].tolist() for i in range(len(data))] == documents\n"
    )
    arguments = [f"{tmp_path}/", str(vocab)]
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=tmp_path,
                          input=json.dumps(documents), capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.skipif(not importable("datatrove"), reason="datatrove is not installed")
def test_datatrove_writes_the_same_bytes(tmp_path):
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile

    write_indexed(tmp_path / "ours", DOCUMENTS, vocab_size=50257, sidecar={})
    file = MegatronTokenizedFile(str(tmp_path), "theirs", token_size=2)
    for document in DOCUMENTS:
        file.write(document)
    file.close()
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    assert IndexedDataset(tmp_path / "theirs").sizes.tolist() == [len(d) for d in DOCUMENTS]
    assert np.dtype("<u2") == IndexedDataset(tmp_path / "ours").dtype
