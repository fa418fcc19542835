"""How a process that was in a process group ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process with `code`: exit handlers run and output written, Python not taken apart.

    DeepSpeed keeps the process group, and with it gloo's threads, which free the tensors of the last
    collective some time after it is over. On a busy machine that is while the interpreter ends, and
    torch then aborts the process: "terminate called without an active exception", SIGABRT, and a run
    that was complete counts as failed.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
    os._exit(code)
