"""One input, one verdict: in a process with little memory and time, under Python's audit hook."""

from __future__ import annotations

import faulthandler
import os
import re
import resource
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fuzz_target import Files, Refused, Target, write

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10  # of processor time for a file of some kilobytes
LARGEST_FILE = 256 << 20
LONGEST_MESSAGE = 20_000

_RUNS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen")
_REACHES = (
    "socket.connect",
    "socket.bind",
    "urllib.Request",
    "webbrowser.open",
    "pickle.find_class",
)
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True)
class Verdict:
    """`kind` is accepted, refused or finding; `key` is the same for findings of one cause."""

    kind: str
    key: str = ""
    text: str = ""


class TooLong(BaseException):
    """Processor time is used up; no `except Exception` of a reader may swallow it."""


class Escaped(BaseException):
    """A reader was about to run, write or reach something."""


class Watch:
    """The audit hook: what a reader does besides reading its own folder."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.inside = str(scratch), str(scratch / "in")
        self.on, self.seen = False, ""

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and (what := self._harm(event, arguments)):
            self.seen = f"{event} {what}"[:200]
            raise Escaped(self.seen)

    def _harm(self, event: str, arguments: tuple[Any, ...]) -> str | None:
        if event in _RUNS or event in _REACHES:
            return repr(arguments[:2])
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path, flags = self._real(arguments[0]), arguments[2] or 0
            away = path.startswith(self.scratch) and not self._own(path)
            outside = flags & _WRITES and not self._own(path) and path != os.devnull
            return path if away or outside else None
        if event in _CHANGES:
            ends = [a for a in arguments if isinstance(a, str | bytes | os.PathLike)]
            away_ends = [path for path in map(self._real, ends) if not self._own(path)]
            return away_ends[0] if away_ends else None
        if event == "exec" and hasattr(arguments[0], "co_filename"):
            code = str(arguments[0].co_filename)
            return code if code.startswith(self.scratch) else None
        return None

    def _real(self, path: Any) -> str:
        self.on = False  # realpath is audited as well
        try:
            return os.path.realpath(os.fsdecode(path))
        except ValueError:  # a zero byte: the call itself will fail
            return self.inside
        finally:
            self.on = True

    def _own(self, path: str) -> bool:
        return path == self.inside or path.startswith(self.inside + os.sep)


class Child:
    """What a process needs that judges inputs; made once in it, after the fork."""

    def __init__(self, target: Target, scratch: Path) -> None:
        self.target, self.folder = target, scratch / "in"
        self.watch = Watch(scratch)
        (scratch / "outside").mkdir(parents=True, exist_ok=True)
        (scratch / "outside" / "secret").write_text("not for you")
        faulthandler.disable()  # a crash is a verdict, and its report no output of ours
        silence = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(silence, descriptor)
        socket.getaddrinfo = _no_names  # nothing is looked up outside
        sys.addaudithook(self.watch)
        # The first reading imports what is imported late, and gives what sealed files must give.
        self.expected = [self._first(files) for files in target.sound()]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        signal.signal(signal.SIGPROF, _too_long)
        limit = _virtual_bytes() + target.memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def _first(self, files: Files) -> Any:
        with self._placed(files):
            return self.target.read(self.folder)

    @contextmanager
    def _placed(self, files: Files) -> Iterator[None]:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write(files, self.folder)
        try:
            yield
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def verdict(self, files: Files) -> Verdict:
        with self._placed(files):
            self.watch.seen = ""
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            self.watch.on = True
            try:
                result = self.target.read(self.folder)
            except BaseException as error:
                self.watch.on = False
                signal.setitimer(signal.ITIMER_PROF, 0)
                return self._refused(error, files)
            finally:
                self.watch.on = False
                signal.setitimer(signal.ITIMER_PROF, 0)
            return self._accepted(result)

    def _accepted(self, result: Any) -> Verdict:
        if self.watch.seen:
            return Verdict("finding", f"escape {self.watch.seen.split()[0]}", self.watch.seen)
        if self.target.sealed and result not in self.expected:
            return Verdict("finding", "wrong content", f"accepted as {str(result)[:300]}")
        complaint = self.target.judge(result)
        if complaint:
            return Verdict("finding", f"judged: {complaint[:60]}", complaint)
        return Verdict("accepted")

    def _refused(self, error: BaseException, files: Files) -> Verdict:
        text = _told(error)
        if self.watch.seen:
            return Verdict("finding", f"escape {self.watch.seen.split()[0]}", text)
        if isinstance(error, TooLong):
            return Verdict("finding", f"more than {SECONDS} s {_place(error)}", text)
        if any(isinstance(cause, MemoryError) for cause in _causes(error)):
            return Verdict("finding", f"memory {_place(error)}", text)
        if isinstance(error, Refused):
            fault = _command_fault(error)
            return (
                Verdict("finding", f"command: {fault[:60]}", text) if fault else Verdict("refused")
            )
        if isinstance(error, self.target.refusals):
            fault = _message_fault(str(error), self.folder, files)
            if fault is None:
                return Verdict("refused")
            return Verdict("finding", f"{fault} {_place(error)}", text)
        return Verdict("finding", f"{type(error).__name__} {_place(error)}", text)


def _command_fault(error: Refused) -> str | None:
    if error.code not in (1, 2):
        return f"exit code {error.code}"
    if "Traceback (most recent" in error.said:
        return "a traceback"
    if "error: " not in error.said:
        return "no error is told"
    return "control characters in the message" if _CONTROL.search(error.said) else None


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _message_fault(message: str, folder: Path, files: Files) -> str | None:
    """What is wrong with the text of a refusal: it must say where, and not be a flood."""
    names = {str(folder), *(Path(name).name for name in files)}
    if not any(name in message for name in names) and "--set" not in message:
        return "a message that names no file"
    if len(message) > LONGEST_MESSAGE:
        return "a message without end"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _place(error: BaseException) -> str:
    """The deepest frame of the project's own code, which names the cause."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(str(ROOT)) and "/.venv/" not in f.filename]
    own = [f for f in own if "/tests/" not in f.filename] or own or list(frames)
    if not own:
        return ""
    return f"in {Path(own[-1].filename).stem}.{own[-1].name}"


def _told(error: BaseException) -> str:
    lines = traceback.format_exception(type(error), error, error.__traceback__, limit=-6)
    return "".join(lines)[-3000:]


def _virtual_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[0]) * resource.getpagesize()


def _too_long(*_: Any) -> NoReturn:
    raise TooLong(f"more than {SECONDS} s of processor time")


def _no_names(host: Any, *_: Any, **__: Any) -> list[Any]:
    if host in ("localhost", "127.0.0.1"):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
