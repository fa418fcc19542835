"""``python -m data_prep``: prepare a corpus; inspect or merge what was prepared."""

from __future__ import annotations

import argparse
import io
import sys
from typing import Any

from data_prep import corpora
from data_prep.errors import DataError, UsageError, plain

_EXAMPLES = """examples:
  python -m data_prep local_code --output data/local_code
  python -m data_prep jsonl --input mine.jsonl.zst --output data/mine --tokenizer gpt2 --workers 2
  python -m data_prep openwebtext2 --input openwebtext2.jsonl.zst.tar --split 949,50,1
  python -m data_prep openwebtext2          (no input: says where it can be had)
  python -m data_prep inspect data/mine/train
  python -m data_prep merge data/a/train data/b/train --output data/both/train

a line of JSON lines is {"text": "..."}; --input also takes other formats, folders and globs.
output: {train,valid,test}.{bin,idx,json}, tokenizer.json, documents/; prepared.json comes last.
an interrupted preparation is continued by the same command.
"""


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without UTF-8 must not end it
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if arguments[:1] == ["inspect"]:
            return _inspect(arguments[1:])
        if arguments[:1] == ["merge"]:
            return _merge(arguments[1:])
        return _prepare(arguments)
    except UsageError as error:
        return _fail(error, 2, debug)
    except (DataError, OSError, ImportError) as error:
        return _fail(error, 1, debug)
    except KeyboardInterrupt:
        return _fail(
            KeyboardInterrupt("interrupted; nothing that looks finished is left"), 1, debug
        )


def _fail(error: BaseException, code: int, debug: bool) -> int:
    if debug:
        raise error
    print(f"data_prep: {plain(str(error))}", file=sys.stderr)
    return code


def _prepare(arguments: list[str]) -> int:
    options = vars(_parser().parse_args(arguments))
    options.pop("debug")
    corpus, output = options.pop("corpus"), options.pop("output")
    if output is None and corpus == "jsonl":
        raise UsageError("jsonl needs --output DIR")
    output = output or f"data/{corpus}"
    from data_prep.prepare import prepare

    prepared = prepare(corpus, output, inputs=options.pop("input"), **options)
    print(summary(prepared, output))
    return 0


def summary(prepared: dict[str, Any], output: str) -> str:
    """The table printed at the end."""
    tokenizer = prepared["tokenizer"]
    rows = [
        f"{output}: {prepared['corpus']}, tokenizer {tokenizer['type']} {tokenizer['fingerprint']} "
        f"with {tokenizer['vocab_size']} entries",
        f"{'split':<6} {'documents':>9} {'tokens':>12} {'MB':>9} {'bytes/token':>11} "
        f"{'windows of 16384':>16}  fingerprint",
    ]
    for name, split in prepared["splits"].items():
        rows.append(
            f"{name:<6} {split['documents']:>9} {split['tokens']:>12} "
            f"{split['text_bytes'] / 1e6:>9.2f} {split['text_bytes'] / split['tokens']:>11.2f} "
            f"{(split['tokens'] - 1) // 16384:>16}  {split['fingerprint']}"
        )
    return "\n".join(rows)


def _inspect(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep inspect",
        description="Counts, lengths, first documents and verification of one .bin/.idx pair.",
        epilog="example: python -m data_prep inspect data/local_code/valid",
    )
    parser.add_argument("prefix", help="path without .bin or .idx")
    parser.add_argument("--tokenizer", help="default: tokenizer.json beside the data, if there")
    parser.add_argument("--documents", type=int, default=2, metavar="N", help="decode the first N")
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    options = parser.parse_args(arguments)
    from data_prep.inspecting import report

    print(report(options.prefix, tokenizer=options.tokenizer, documents=options.documents))
    return 0


def _merge(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep merge",
        description="Several .bin/.idx pairs of one tokenizer into one; document borders stay.",
        epilog="example: python -m data_prep merge data/a/train data/b/train --output data/ab/train",
    )
    parser.add_argument("prefixes", nargs="+", metavar="PREFIX", help="path without .bin or .idx")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="without .bin or .idx")
    parser.add_argument(
        "--unknown-tokenizer",
        action="store_true",
        help="files without a sidecar: they come from one tokenizer, on your word",
    )
    parser.add_argument("--debug", action="store_true", help="show a traceback on errors")
    options = parser.parse_args(arguments)
    from data_prep.merging import merge

    merged = merge(options.prefixes, options.output, unknown_tokenizer=options.unknown_tokenizer)
    print(
        f"{options.output}: {merged['documents']} documents, {merged['tokens']} tokens of "
        f"{merged['dtype']} from {len(merged['merged'])} files, fingerprint {merged['fingerprint']}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep",
        description="Turn text into GPT-NeoX's .bin/.idx; `inspect PREFIX` shows what is in one, "
        "`merge PREFIX ... --output PREFIX` joins several.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("corpus", metavar="CORPUS", help=f"jsonl, or one of {', '.join(corpora.names())}")
    add("--input", nargs="+", default=[], metavar="PATH", help="files, folders or globs")
    add("--output", metavar="DIR", help="default: data/CORPUS (jsonl has none)")
    add("--sha256", nargs="+", metavar="HEX", help="one for each input, or a file of sha256sum's")
    add("--pile-set", metavar="NAME", help="keep this component of The Pile: OpenWebText2, Github, "
        "ArXiv, ... by the records' meta.pile_set_name")  # fmt: skip
    add("--source", help="which of a local corpus's sources (default: its first)")
    add(
        "--tokenizer",
        metavar="gpt2|byte|train|PATH",
        help="default: gpt2; local corpora: train; "
        "PATH: tokenizer.json, SentencePiece .model, or a folder with one",
    )
    add("--vocab-size", type=int, metavar="N", help="of --tokenizer train (default 1024)")
    add("--workers", type=int, metavar="N", help="processes at most (default: the cores)")
    add(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        help="end each document with <|endoftext|> (default: yes)",
    )
    add("--split", metavar="A,B,C", help="train, valid, test by hash; 88,10,2 (local: 86,10,4; "
        "wikitext103: published)")  # fmt: skip
    add("--text-key", metavar="KEY", help="of JSON lines (default: text)")
    add("--on-bad-line", choices=("stop", "skip"), help="default: stop")
    add("--min-characters", type=int, metavar="N", help="drop shorter documents (local: 500)")
    add("--max-document-bytes", type=int, metavar="N", help="cut longer ones (local: 250000)")
    add("--min-split-tokens", type=int, metavar="N", help="else an error (local: 16385)")
    add("--order", choices=("input", "hash"), help="of documents (default: input; local: hash)")
    _add_duplicates(parser)
    add("--fix-text", action="store_true", default=None, help="repair mojibake with ftfy first")
    add(
        "--keep-documents",
        action=argparse.BooleanOptionalAction,
        help="keep DIR/documents, an lm_dataformat archive (default: yes)",
    )
    add("--force", action="store_true", help="replace what is in the output folder")
    add("--debug", action="store_true", help="show a traceback on errors")
    return parser


def _add_duplicates(parser: argparse.ArgumentParser) -> None:
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--deduplicate",
        dest="keep_duplicates",
        action="store_false",
        default=None,
        help="drop exact duplicates by hash of the text, 16 bytes of memory a document (default)",
    )
    either.add_argument(
        "--keep-duplicates", action="store_true", default=None, help="keep exact duplicates"
    )


if __name__ == "__main__":
    sys.exit(main())
