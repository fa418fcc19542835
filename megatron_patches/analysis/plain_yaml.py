"""YAML as a run writes it: no aliases, tags, repeated keys or depth, which a file of others may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_patches.analysis.jsonl import RowError

MAX_CHARACTERS = 2**20  # a configuration has some kilobytes; the scanner reads 100 a second
MOST_DEEP = 32


def read_plain(path: Path, text: str) -> Any:
    """The value of ``text``, the content of ``path``; RowError names the file and what is wrong.

    An alias stands for a copy, and nine aliases of nine aliases, ten times over, for a billion.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        deep = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()
            anchored = event.anchor is not None or isinstance(event, yaml.AliasEvent)
            if anchored or getattr(event, "tag", None) is not None or self.deep > MOST_DEEP:
                raise yaml.MarkedYAMLError(
                    problem="an anchor, an alias, a tag, or too deep", problem_mark=event.start_mark
                )
            self.deep += 1
            node = super().compose_node(parent, index)
            self.deep -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            found = super().construct_mapping(node, deep)
            if len(found) != len(node.value):
                raise yaml.MarkedYAMLError(problem="a repeated key", problem_mark=node.start_mark)
            return found

    if len(text) > MAX_CHARACTERS:
        raise RowError(f"{path}: more than {MAX_CHARACTERS} characters, no configuration")
    try:
        return yaml.load(text, Loader=Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = " ".join(str(error).split())[:200]
        raise RowError(f"{path}: not YAML: {what}") from error
