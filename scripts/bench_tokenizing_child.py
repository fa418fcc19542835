"""One measured preparation in a fresh process, for bench_tokenizing.py; prints one JSON line.

Imports come first and are not measured; loading the tokenizer is. Nothing of ours is imported
unless asked for, so that another interpreter may run it.

Example: python scripts/bench_tokenizing_child.py ours text.jsonl folder vocab.json merges.txt
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any


def ours(text: str, output: str, _vocab: str, _merges: str) -> Callable[[], Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import lm_dataformat  # noqa: F401  loaded by the command only when used, so here beforehand
    import tiktoken  # noqa: F401
    import tokenizers  # noqa: F401

    from data_prep.prepare import prepare

    options: dict[str, Any] = {
        "split": "1",
        "tokenizer": "gpt2",
        "keep_documents": False,
        "workers": 1,
    }
    return lambda: prepare("jsonl", output, inputs=[text], say=lambda _line: None, **options)


def neox(text: str, output: str, vocab: str, merges: str) -> Callable[[], Any]:
    """GPT-NeoX's own script, from the checkout NEOX_HOME."""
    home = Path(os.environ["NEOX_HOME"])
    sys.path.insert(0, str(home))
    for name in ("pkg_resources", "ftfy", "sentencepiece"):
        # Imported by NeoX at the top, without use in what is measured.
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = types.ModuleType(name)
    if not hasattr(sys.modules.get("pkg_resources"), "packaging"):
        import packaging.version

        stub = sys.modules.setdefault("pkg_resources", types.ModuleType("pkg_resources"))
        stub.packaging = packaging  # type: ignore[attr-defined]
    script = home / "tools" / "datasets" / "preprocess_data.py"
    spec = importlib.util.spec_from_file_location("preprocess_data", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments = ["--input", text, "--output-prefix", f"{output}/neox", "--vocab-file", vocab]
    arguments += ["--merge-file", merges, "--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    return lambda: module.main(arguments)


def transformers(text: str, output: str, vocab: str, merges: str) -> Callable[[], Any]:
    """The tokenizer that GPT-NeoX uses, with our writer."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from transformers import GPT2Tokenizer

    from data_prep.writing import write_indexed

    def work() -> None:
        tokenizer = GPT2Tokenizer(vocab, merges)
        with open(text, encoding="utf-8") as lines:
            ids = ([*tokenizer.encode(json.loads(line)["text"]), 50256] for line in lines)
            write_indexed(f"{output}/neox_text_document", ids, vocab_size=50257, sidecar={})

    return work


def baseline() -> str:
    """Which GPT2Tokenizer the measured code got: from transformers 5 on it is a fast one."""
    found = sys.modules.get("transformers")
    if found is None:
        return ""
    slow = any(c.__name__ == "PreTrainedTokenizer" for c in found.GPT2Tokenizer.__mro__)
    return f"transformers {found.__version__}, GPT2Tokenizer in {'Python' if slow else 'Rust'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = {"ours": ours, "neox": neox, "transformers": transformers}
    parser.add_argument("kind", choices=kinds)
    for name in ("text", "output", "vocab", "merges"):
        parser.add_argument(name)
    given = parser.parse_args()
    Path(given.output).mkdir(parents=True, exist_ok=True)
    work = kinds[given.kind](given.text, given.output, given.vocab, given.merges)
    begun = time.process_time()
    work()
    row = {
        "cpu_seconds": time.process_time() - begun,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "baseline": baseline(),
    }
    print("\n" + json.dumps(row))


if __name__ == "__main__":
    main()
