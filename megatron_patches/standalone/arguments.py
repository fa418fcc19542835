"""What all command lines share: argument types, errors in one line, exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from data_prep.errors import DataError, plain
from megatron_patches.config import Config, ConfigError
from megatron_patches.config.keys_own import scoring_window
from megatron_patches.config.reading import duplicates, read_override
from megatron_patches.standalone.placement import PlaceError
from megatron_patches.standalone.signals import INTERRUPTED, Interrupted

USAGE, FAILED = 2, 1


def guarded(main: Callable[[], int], debug: bool) -> int:
    """Run `main`; known errors become one message on stderr and an exit code, others a traceback.

    2 stands for a command or configuration that cannot be right, 1 for a run that failed, 75 for a
    training that a signal ended after a checkpoint.
    """
    try:
        return main()
    except ConfigError as error:
        return _say(error, USAGE, debug)
    except (DataError, ValueError, RuntimeError, OSError) as error:
        return _say(error, FAILED, debug)
    except Interrupted as ended:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"interrupted: {ended}\n")
        return INTERRUPTED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _say(error: Exception, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    own = code == FAILED or isinstance(error, PlaceError)  # may be this rank's alone
    if own or os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"error: {plain(str(error))}\n")
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line on stderr, like every other error."""
        self.exit(USAGE, f"error: {message} (--help explains)\n")


def parser(description: str, example: str) -> argparse.ArgumentParser:
    made = _Parser(
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--debug", action="store_true", help="show the traceback of an error")
    # Launchers of the DeepSpeed family pass it to every worker; the environment says the same.
    made.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    return made


def add_config_arguments(made: argparse.ArgumentParser, nargs: str = "+") -> None:
    made.add_argument("config", nargs=nargs, metavar="CONFIG.yml", help="YAML files, joined")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace one key; may be repeated",
    )


def whole(low: int, below: int | None = None) -> Callable[[str], int]:
    """argparse type: an integer of at least `low`, and less than `below`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (below is not None and value >= below):
            more = "" if below is None else f" and less than {below}"
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {low}{more}")
        return value

    return convert


def number(low: float, high: float = float("inf")) -> Callable[[str], float]:
    """argparse type: a number in `[low, high)`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value < high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number in [{low:g}, {high:g})")
        return value

    return convert


def window_argument(text: str) -> int | str:
    """argparse type: a number of tokens, or `blockwise:b`."""
    try:
        found: int | str = scoring_window(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from error
    return found


def add_position_argument(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--position-option",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="the same weights with another option of the position method; may be repeated",
    )


def position_options_of(texts: Sequence[str]) -> dict[str, Any]:
    """What `--position-option` says; the values are YAML. Raises ConfigError naming a wrong one."""
    entries = [read_override(text, "--position-option") for text in texts]
    if problems := duplicates(entries):
        raise ConfigError.of(problems)
    return {entry.key: entry.value for entry in entries}


def add_device_argument(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--device", help="cpu, cuda, cuda:1, ...; default: as `distributed_backend` and machine say"
    )


def device_of(name: str | None, config: Config) -> str:
    """The device to work on. Raises ConfigError for one that is not here."""
    import torch

    from megatron_patches.standalone.devices import use_cpu

    if name is None:
        return "cpu" if use_cpu(config) else "cuda"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: no such device") from error
    here = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0)
    if (device.index or 0) >= here:
        raise ConfigError(f"--device {name}: torch sees {here} devices of this kind here")
    return name
