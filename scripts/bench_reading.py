"""Reading speed, MB of text per CPU-second: ours and lm_dataformat's Reader, in one run.

The text is this interpreter's standard library, repeated with a number in each document. Both
readers read the same files, in turn; medians of the repetitions count. Where lm_dataformat is
wrong (fails, or gives other documents) its column says so. Ours includes the checks and the sha256.

Example: python scripts/bench_reading.py --megabytes 16 --output reading.jsonl
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import statistics
import sysconfig
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import bench_common as common
import zstandard

from data_prep.reading import Reading, read


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=64, metavar="N", help="of text (64)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="medians of N (3)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append JSON lines")
    options = parser.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)  # lm_dataformat leaves its files open
    texts = list(_texts(options.megabytes * 1_000_000))
    size = sum(len(text.encode()) for text in texts)
    print(f"{len(texts)} documents, {size / 1e6:.1f} MB of text; MB of text per CPU-second")
    print(f"{'format':<16} {'file MB':>8} {'ours':>8} {'lm_dataformat':>18} {'ratio':>6}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for ending, write in _writers().items():
            path = Path(folder) / f"a{ending}"
            write(path, texts)
            ours, theirs = _compare(path, texts, options.repeat)
            other = f"{size / theirs / 1e6:.0f}" if isinstance(theirs, float) else theirs
            ratio = f"{theirs / ours:.2f}" if isinstance(theirs, float) else ""
            megabytes = path.stat().st_size / 1e6
            speed = size / ours / 1e6
            print(f"{ending:<16} {megabytes:>8.1f} {speed:>8.0f} {other:>18} {ratio:>6}")
            path.unlink()
            compared = (
                {"times_faster": theirs / ours} if isinstance(theirs, float) else {"why": theirs}
            )
            row = {"benchmark": "reading", "format": ending, "megabytes": size / 1e6, **compared}
            rows.append({**row, "mb_per_cpu_second": speed, "other": "lm_dataformat"})
    common.append(options.output, rows)


def _compare(path: Path, texts: list[str], repeat: int) -> tuple[float, float | str]:
    """CPU seconds of ours and of theirs, or why there is no figure. Wrong documents of ours raise."""
    ours: list[float] = []
    theirs: list[float] = []
    why = ""
    for _ in range(repeat):
        seconds, same = _timed((d.text for d in read([path], Reading())), texts)
        if not same:
            raise SystemExit(f"{path.name}: our reader gave other documents")
        ours.append(seconds)
        if why:
            continue
        try:
            seconds, same = _timed(_lm_dataformat(path), texts)
            theirs.append(seconds)
            why = "" if same else "wrong"
        except Exception as error:  # whatever it fails with is the result
            why = type(error).__name__
    return statistics.median(ours), why or statistics.median(theirs)


def _lm_dataformat(path: Path) -> Iterable[object]:
    from lm_dataformat import Reader

    documents: Iterable[object] = Reader(str(path)).stream_data()
    return documents


def _timed(documents: Iterable[object], texts: list[str]) -> tuple[float, bool]:
    wanted = iter(texts)
    same = True
    start = time.process_time()
    for document in documents:
        same = same and document == next(wanted, None)
    seconds = time.process_time() - start
    return seconds, same and next(wanted, None) is None


def _texts(wanted: int) -> Iterator[str]:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    sources = [file.read_text(encoding="utf-8", errors="ignore") for file in files]
    done = number = 0
    while done < wanted:
        text = f"# {number}\n{sources[number % len(sources)]}"
        done += len(text.encode())
        number += 1
        yield text


def _lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text, "meta": {}}).encode() + b"\n" for text in texts)


def _zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)


def _tar(members: Iterable[tuple[str, bytes]]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def _writers() -> dict[str, Callable[[Path, list[str]], object]]:
    def of_texts(texts: list[str]) -> bytes:
        return _tar((f"{i}.py", text.encode()) for i, text in enumerate(texts))

    def of_shards(texts: list[str]) -> bytes:
        return _tar(
            (f"{i}.jsonl.zst", _zst(_lines(texts[i : i + 500]))) for i in range(0, len(texts), 500)
        )

    def dat(texts: list[str]) -> bytes:
        return b"".join(b"%016d%b" % (len(t.encode()), t.encode()) for t in texts)

    made: dict[str, Callable[[list[str]], bytes]] = {
        ".jsonl": _lines,
        ".jsonl.zst": lambda texts: _zst(_lines(texts)),
        ".jsonl.gz": lambda texts: gzip.compress(_lines(texts), 6),
        ".json.gz": lambda texts: gzip.compress(_lines(texts), 6),
        ".json.zst": lambda texts: _zst(json.dumps(texts).encode()),
        ".dat.zst": lambda texts: _zst(dat(texts)),
        ".tar": of_texts,
        ".tar.gz": lambda texts: gzip.compress(of_texts(texts), 6),
        ".jsonl.zst.tar": of_shards,
    }
    writers: dict[str, Callable[[Path, list[str]], object]] = {
        ending: lambda path, texts, make=make: path.write_bytes(make(texts))  # type: ignore[misc]
        for ending, make in made.items()
    }
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        print("without pyarrow: no .parquet, no .arrow")
        return writers

    def arrow(path: Path, texts: list[str]) -> None:
        table = pyarrow.table({"text": texts})
        with pyarrow.OSFile(str(path), "wb") as stream, ipc.new_stream(stream, table.schema) as w:
            w.write_table(table, max_chunksize=1000)

    return {
        **writers,
        ".parquet": lambda path, texts: parquet.write_table(pyarrow.table({"text": texts}), path),
        ".arrow": arrow,
    }


if __name__ == "__main__":
    main()
