"""Many texts to ids, in order, by one process or several."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process

import numpy as np

from data_prep.errors import DataError
from data_prep.tokenizing import Tokenizer

_BATCH_BYTES = 1 << 18
_WORTH_A_PROCESS = 16 << 20
_AHEAD = 4  # batches in flight for each worker: bounded, so memory stays flat

_worker_tokenizer: Tokenizer


def encode_all(
    tokenizer: Tokenizer, texts: Iterable[str], *, workers: int, append_eod: bool
) -> Iterator[np.ndarray]:
    """Ids int32 [T] of each text, in the order of ``texts`` whatever ``workers`` is.

    With ``append_eod`` exactly one EOD ends each document. A killed worker is a DataError.
    """
    tail = [tokenizer.eod] if append_eod else []
    if workers == 1:
        encoded: Iterable[np.ndarray] = map(tokenizer.encode_array, texts)
    else:
        encoded = _encode_in_pool(tokenizer, texts, workers)
    for ids in encoded:
        yield np.concatenate([ids, np.array(tail, dtype=ids.dtype)])


def worker_count(asked: int | None, size: int) -> int:
    """Processes for ``size`` bytes of text: at most ``asked``, by default the usable cores.

    A process costs about a second to start, so small texts are not shared out.
    """
    if asked is None:
        affinity = getattr(os, "sched_getaffinity", None)  # Linux alone has it
        asked = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(asked, size // _WORTH_A_PROCESS))


def _encode_in_pool(
    tokenizer: Tokenizer, texts: Iterable[str], workers: int
) -> Iterator[np.ndarray]:
    # spawn, not fork: the parent may hold threads of tokenizers, torch or a progress bar.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (tokenizer,))
    pending: deque[Future[list[np.ndarray]]] = deque()
    try:
        for batch in _batches(texts):
            pending.append(pool.submit(_encode_batch, batch))
            if len(pending) >= workers * _AHEAD:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenizing process died (out of memory, or killed, or the calling script lacks "
            "'if __name__ == \"__main__\"'); try again with fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _start(tokenizer: Tokenizer) -> None:
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone answers Ctrl-C
    # A killed parent cannot tell its workers; without this they would wait for work for ever.
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = tokenizer


def _leave_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode_batch(texts: list[str]) -> list[np.ndarray]:
    return [_worker_tokenizer.encode_array(text) for text in texts]
