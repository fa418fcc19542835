"""A tokenizer that panics: an error of that document, in one process and in a worker."""

import multiprocessing

import numpy as np
import pytest

from data_prep.errors import DataError
from data_prep.pool import WorkerDied, encode_all


class PanicException(BaseException):
    """As pyo3 raises it for a panic in Rust: no Exception."""


class Panicking:
    """A tokenizer that fails on one text."""

    origin, eod = "made-up.json", 0

    def encode_array(self, text):
        if "bomb" in text:
            raise PanicException("called `Option::unwrap()` on a `None` value")
        return np.array([len(text)], dtype=np.int32)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_panic_names_the_document_and_is_not_taken_for_a_killed_process(workers):
    texts = ["good", "a bomb " + "x" * 100, "good"]
    with pytest.raises(
        DataError, match="PanicException.*made-up.json.*'a bomb xxx.*take that"
    ) as e:
        list(encode_all(Panicking(), texts, workers=workers, append_eod=True))
    assert not isinstance(e.value, WorkerDied)  # that would be kept and tried again
    assert not multiprocessing.active_children()


def test_an_interrupt_stays_one():
    class Interrupted(Panicking):
        def encode_array(self, text):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(encode_all(Interrupted(), ["a"], workers=1, append_eod=True))
