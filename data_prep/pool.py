"""Many texts to ids, in order, by one process or several."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait

import numpy as np

from data_prep.errors import DataError
from data_prep.tokenizer import Tokenizer


class WorkerDied(DataError):
    """A process was killed: not the fault of the data, so what was done before can be kept."""


_BATCH_BYTES = 1 << 18
_WORTH_A_PROCESS = 16 << 20
_AHEAD = 4  # batches read ahead for each worker: bounded, so memory stays flat


def encode_all(
    tokenizer: Tokenizer, texts: Iterable[str], *, workers: int, append_eod: bool
) -> Iterator[np.ndarray]:
    """Ids int32 [T] of each text, in the order of ``texts`` whatever ``workers`` is.

    With ``append_eod`` exactly one EOD ends each document. A killed worker is a DataError, and so
    is a text on which the tokenizer fails; that message quotes its beginning.
    """
    tail = [tokenizer.eod] if append_eod else []
    if workers == 1:
        encoded: Iterable[np.ndarray] = (_encoded(tokenizer, text) for text in texts)
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
    """Each worker has one batch at a time; results wait in ``done`` for their turn."""
    batches = enumerate(_batches(texts))
    done: dict[int, list[np.ndarray]] = {}
    busy: dict[Connection, int] = {}
    given = taken = 0
    with _started(tokenizer, workers) as idle:
        while True:
            while idle and given - taken < workers * _AHEAD:
                number, batch = next(batches, (given, None))
                if batch is None:
                    break
                connection = idle.pop()
                _talk(connection, batch)
                busy[connection] = number
                given = number + 1
            if taken in done:
                yield from done.pop(taken)
                taken += 1
            elif busy:
                for ready in wait(list(busy)):
                    assert isinstance(ready, Connection)
                    done[busy.pop(ready)] = _talk(ready)
                    idle.append(ready)
            else:
                return


@contextmanager
def _started(tokenizer: Tokenizer, workers: int) -> Iterator[list[Connection]]:
    """Worker processes, as the connections to them.

    Not concurrent.futures: when a worker dies while others are being started, its clean-up waits
    for ever (seen in Python 3.11). Here each worker has a pipe of its own and no shared lock: a
    dead worker is the end of its pipe, and a dead parent the end of the worker's.
    """
    context = get_context("spawn")  # not fork: the parent may hold threads
    processes, connections = [], []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            connections.append(ours)
            with theirs:  # the parent's copy must go, or the pipe would never end
                process = context.Process(target=_work, args=(theirs, tokenizer), daemon=True)
                process.start()
                processes.append(process)
        yield list(connections)
    finally:
        for process in processes:
            process.kill()  # it holds nothing that would want a gentler end
            process.join()
            process.close()
        for connection in connections:
            connection.close()


def _talk(connection: Connection, batch: list[str] | None = None) -> list[np.ndarray]:
    """Send a batch, or without one receive ids; a worker that is gone is a DataError."""
    try:
        if batch is not None:
            connection.send(batch)
            return []
        answer: list[np.ndarray] | str = connection.recv()
    except (EOFError, OSError) as error:
        raise WorkerDied(
            "a tokenizing process died (out of memory, or killed, or the calling script lacks "
            "'if __name__ == \"__main__\"'); try again with fewer --workers"
        ) from error
    if isinstance(answer, str):
        raise DataError(f"a tokenizing process failed: {answer}")
    return answer


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


def _work(connection: Connection, tokenizer: Tokenizer) -> None:
    """The life of a worker: batches in, ids out, until the parent's end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone answers Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with suppress(EOFError, OSError):
        while True:
            connection.send(_answer(tokenizer, connection.recv()))


def _answer(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray] | str:
    try:
        return [_encoded(tokenizer, text) for text in texts]
    except BaseException as error:  # whatever it was, the parent must hear of it
        return str(error) if isinstance(error, DataError) else repr(error)


def _encoded(tokenizer: Tokenizer, text: str) -> np.ndarray:
    try:
        return tokenizer.encode_array(text)
    except (KeyboardInterrupt, SystemExit, MemoryError, DataError):
        raise
    except BaseException as error:  # a panic of tokenizers or tiktoken is no Exception
        raise DataError(
            f"{error!r} from the tokenizer {tokenizer.origin} at the document that begins "
            f"{text[:60]!r}; take that document out of the input, or use another tokenizer"
        ) from error
