"""`events.jsonl`: what happened, a line at a time, so that a soak which is stopped goes on."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

LONGEST = 400  # characters of a message


class Journal:
    """Appends to a file of JSON lines and knows those that are there.

    Args:
        path: the file; made with its folder.
        private: texts that are no one's business, and what stands for each.

    Raises ValueError for a line that is no JSON object, except a torn last one, which is dropped.
    """

    def __init__(self, path: Path, private: dict[str, str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._private = path, {**private, socket.gethostname(): "HOST"}
        self.events = read(path) if path.is_file() else []
        whole = "".join(json.dumps(event) + "\n" for event in self.events)
        if path.is_file() and path.read_text(encoding="utf-8") != whole:
            path.write_text(whole, encoding="utf-8")

    def write(self, event: str, **about: Any) -> None:
        line = {"time": time.strftime("%H:%M:%S", time.gmtime()), "event": event, **about}
        line = {key: self._clean(value) for key, value in line.items()}
        self.events.append(line)
        with open(self._path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.events if line["event"] == event]

    def _clean(self, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        for text, public in self._private.items():
            value = value.replace(text, public)
        return re.sub(r"process \d+", "process PID", value)[:LONGEST]


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a file; ValueError names the line that is none."""
    found: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: no JSON: {error}") from error
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise ValueError(f"{path}:{number}: no event of a soak")
        found.append(event)
    return found
