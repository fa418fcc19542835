"""What TensorBoard and wandb get of a run: one client each, used by `tracking` in a process of its own."""

from __future__ import annotations

import json
import netrc
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import yaml

from megatron_patches.config import Config, config_sha, dump
from megatron_patches.standalone.provenance import read_run, write_json

Row = dict[str, Any]
TAG = 64  # characters that wandb allows in a tag
ANSWER = 60.0  # seconds that wandb's service has for its first answer


class Client(Protocol):
    """A tracker that is open. Every method may raise whatever the tracker's package raises."""

    begin: int  # the least iteration that it still takes

    def log(self, iteration: int, numbers: dict[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def names(config: Config) -> list[str]:
    """The trackers that a configuration asks for; GPT-NeoX's keys, and DeepSpeed's tables of the same."""
    found = []
    if tensorboard_folder(config) is not None:
        found.append("tensorboard")
    table = (config.wandb or {}).get("enabled", False)
    if config.use_wandb if config.use_wandb is not None else table:
        found.append("wandb")
    return found


def tensorboard_folder(config: Config) -> Path | None:
    """The run's own folder inside `tensorboard_dir`, so that runs stand side by side."""
    table = config.tensorboard or {}
    base = config.tensorboard_dir
    if base is None and table.get("enabled"):
        base = str(table.get("output_path") or "tensorboard")
    return Path(base) / config.run_id if base else None


class TensorBoard:
    """Scalars, written with TensorBoard's own writer: that of torch would load torch for the same bytes.

    What was written from iteration `begin` on is replaced, as the log is when a run is resumed.
    """

    def __init__(self, config: Config, folder: Path, done: int, after: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        place = tensorboard_folder(config)
        if place is None:
            raise ValueError(f"{folder / 'config.yml'}: `tensorboard_dir` names no folder")
        self._event, self._summary = Event, Summary
        # Of the last iteration a validation may be missing: it is written again as a whole.
        self.begin = done if after is None else min(done, after + 1)
        self._writer = EventFileWriter(str(place))
        if done:
            start = SessionLog(status=SessionLog.START)
            mark = Event(wall_time=time.time(), step=self.begin, session_log=start)
            self._writer.add_event(mark)

    def log(self, iteration: int, numbers: dict[str, float]) -> None:
        values = [self._summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=iteration, summary=summary))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """One wandb run for all sessions of a training: its id lies in the run's folder.

    wandb's steps only rise, so rows that it has are not sent again. Without a key it writes offline
    files in the run's folder, for `wandb sync`.
    """

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None]) -> None:
        import wandb

        if "wandb_host" in config.model_fields_set:
            os.environ.setdefault("WANDB_BASE_URL", config.wandb_host)
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_key(config) else "offline")
        # It takes the name of the program from the process, which is not the one that trains.
        os.environ.setdefault("WANDB_PROGRAM", "train.py")
        self._run = wandb.init(
            **describe(config, folder),
            id=run_id(folder),
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(folder),
            save_code=False,
            settings=wandb.Settings(silent=True, console="off", init_timeout=ANSWER),
        )
        # Offline, what was sent before is known from our own account alone.
        self.begin = int(self._run.step) if self._run.resumed else 0
        say(self._where(mode))

    def _where(self, mode: str) -> str:
        if mode != "offline":
            return f"wandb ({mode}): {self._run.url or self._run.id}"
        return f"wandb (offline): `wandb sync {Path(self._run.dir).parent}` sends it"

    def log(self, iteration: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=iteration)

    def flush(self) -> None:
        """Its service, another process, has what `log` got."""

    def close(self) -> None:
        self._run.finish()


def describe(config: Config, folder: Path) -> dict[str, Any]:
    """How a run is filed: the study is the group, the method the job type; tags for method, text, seed."""
    table = config.wandb or {}
    chosen = config.model_fields_set
    dataset = config.dataset_name
    own = {
        "method": config.pos_emb,
        "dataset": dataset,
        "config_sha": config_sha(config),
        "run": read_run(folder),
    }
    project = config.wandb_project if "wandb_project" in chosen else table.get("project")
    return {
        "project": project or config.wandb_project,
        "group": config.wandb_group or table.get("group"),
        "entity": config.wandb_team or table.get("team"),
        "name": config.wandb_run_name or config.run_id,
        "job_type": config.pos_emb,
        "tags": [tag[:TAG] for tag in (config.pos_emb, dataset, f"seed {config.seed}")],
        "config": {**yaml.safe_load(dump(config)), "seed": config.seed, **own},
    }


def run_id(folder: Path) -> str:
    """The id in the folder's `.trackers/wandb-run.json`, made at the first call.

    Raises ValueError for a file that holds no such id: another one would split the run in two.
    """
    file = folder / ".trackers" / "wandb-run.json"
    if file.exists():
        try:
            found = json.loads(file.read_text(encoding="utf-8"))["id"]
            if re.fullmatch(r"[a-z0-9]{1,64}", found):
                return str(found)
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise ValueError(f"{file}: holds no id of a wandb run; remove it to begin a new run there")
    made = secrets.token_hex(8)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"id": made})
    return made


def _has_key(config: Config) -> bool:
    """Whether wandb could log in without asking, which it would do for ever on a terminal."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or config.wandb_host).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
