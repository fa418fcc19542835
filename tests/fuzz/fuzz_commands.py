"""Command lines run inside this process, and what their output must not contain."""

from __future__ import annotations

import contextlib
import html.parser
import importlib.util
import io
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from fuzz_target import Refused

ROOT = Path(__file__).resolve().parents[2]
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def script(name: str) -> ModuleType:
    """A file of `scripts/`, or `deepy.py`, as a module."""
    if name in sys.modules:
        return sys.modules[name]
    path = ROOT / (f"{name}.py" if name == "deepy" else f"scripts/{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run(main: Callable[[], int], *arguments: str) -> str:
    """What the command prints; Refused for an exit code other than 0."""
    out, told, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["command", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            code: Any = main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
    if code != 0:
        raise Refused(code, told.getvalue())
    return out.getvalue()


def controls(text: str) -> str | None:
    """Output for a terminal must not drive it."""
    found = _CONTROL.search(text)
    return f"a control character, {found.group()!r}, is printed" if found else None


def markdown(text: str) -> str | None:
    """A table must not let HTML through, nor begin a cell of its own."""
    if re.search(r"(?<!\\)<fuzzed", text):
        return "HTML is let through"
    return controls(text)


def latex(text: str) -> str | None:
    """A table must not let a command through."""
    return "a command of LaTeX is let through" if "\\input{fuzzed" in text else controls(text)


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.fault: str | None = None

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        names = {name for name, _ in attrs}
        if "fuzzed" in tag or any("fuzzed" in name for name in names):
            self.fault = f"the page has <{tag}> with {', '.join(sorted(names))}"[:200]
        for name, value in attrs:
            if name in ("href", "src", "action") and (value or "").strip().startswith(
                "javascript:"
            ):
                self.fault = f"the page has {name}={value}"

    handle_startendtag = handle_starttag


def page(text: str) -> str | None:
    """A page must not have an element, an attribute or a link of the results."""
    reader = _Page()
    reader.feed(text)
    reader.close()
    return reader.fault


def drawings(texts: Sequence[str]) -> str | None:
    """An SVG must be well formed and must not have an element or attribute of the results."""
    return next((fault for text in texts if (fault := _drawing(text))), None)


def _drawing(text: str) -> str | None:
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        return f"the drawing is not XML: {error}"
    for element in root.iter():
        if "fuzzed" in str(element.tag) or any("fuzzed" in name for name in element.attrib):
            return f"the drawing has <{element.tag}>"
        if str(element.tag).endswith("}script"):
            return "the drawing has a script"
    return None
