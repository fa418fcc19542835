"""What is done to a running training, and how it must end for that. Each returns the exit code."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_patches.soak import damage, disk
from megatron_patches.soak.course import STALL_SECONDS, Course
from megatron_patches.soak.process import Start
from megatron_patches.soak.promises import require, standing

FAILED, INTERRUPTED = 1, 75
Fault = Callable[["Scene"], int]


class TooLate(Exception):
    """The training came to its end before the fault could reach it."""


@dataclass
class Scene:
    """One start that is to be broken.

    Attributes:
        course, start, chance: the training, its present start, the random numbers of the soak.
        told: filled by the fault with what it did, for the journal.
    """

    course: Course
    start: Start
    chance: random.Random
    told: str = ""

    @property
    def run(self) -> Path:
        return self.course.run

    def rank(self) -> int:
        return self.chance.randrange(self.course.processes)

    def ended(self, code: int, *words: str) -> int:
        """Wait for the end; it must have this code, and say each of `words`.

        Raises TooLate when the last step is saved whole: filling a disk takes seconds.
        """
        found = self.start.wait()
        if found == 0 and standing(self.run).step == self.course.iterations:
            raise TooLate
        said = self.start.last_words()
        require(found == code, f"exit code {found} instead of {code}: {said}")
        for word in words:
            require(word in self.start.said(), f"{word!r} was not said: {said}")
        return found

    def writing(self) -> Path:
        """The folder of the next checkpoint, as soon as there is one."""
        found: list[Path] = []

        def begun() -> bool:
            found[:] = self.run.glob("writing-global_step*")
            return bool(found)

        self.start.wait_for(begun, "a checkpoint", pause=0.0005)
        return found[0]


# ---- signals ---------------------------------------------------------------------------------


def kill_a_rank(scene: Scene) -> int:
    """kill -9 of one worker: the other names it, and deepy.py fails."""
    rank = scene.rank()
    scene.told = f"rank {rank}"
    scene.start.send(f"rank {rank}", signal.SIGKILL)
    if scene.course.processes == 1:
        return scene.ended(FAILED)
    return scene.ended(FAILED, f"error: rank {rank} (process ", "is dead")


def kill_all(scene: Scene) -> int:
    """kill -9 of everything at once, as when the machine goes down."""
    scene.start.destroy()
    return scene.start.process.returncode


def kill_in_a_save(scene: Scene) -> int:
    """The same in the middle of a save: a moment after its folder has appeared."""
    folder = scene.writing()
    delay = scene.chance.uniform(0, 0.05)
    time.sleep(delay)
    scene.start.destroy()
    scene.told = f"{folder.name}, {1000 * delay:.0f} ms after it appeared"
    return scene.start.process.returncode


def terminate(scene: Scene) -> int:
    """SIGTERM to the whole job, as schedulers send it: a checkpoint, and code 75."""
    scene.start.send("group", signal.SIGTERM)
    return scene.ended(INTERRUPTED, "interrupted: ")


def warn(scene: Scene) -> int:
    """SIGUSR1 to deepy.py alone, which hands it on."""
    scene.start.send("launcher", signal.SIGUSR1)
    return scene.ended(INTERRUPTED, "interrupted: ")


def stop_a_rank(scene: Scene) -> int:
    """SIGSTOP of one rank: after `watch_stall_seconds` the run ends and names it."""
    rank = scene.rank()
    scene.told = f"rank {rank}, for {STALL_SECONDS:g} s"
    scene.start.send(f"rank {rank}", signal.SIGSTOP)
    return scene.ended(FAILED, "error: no progress for ", f"rank {rank} (process ", "is stopped")


# ---- files -----------------------------------------------------------------------------------


def fill_the_disk(scene: Scene) -> int:
    """No room for the next checkpoint, or for the log before it: the run says which, and ends."""
    left = disk.fill(scene.course.place, scene.chance.choice([0, 1 << 14, 1 << 18]))
    scene.told = f"{left:,} bytes left"
    try:
        code = scene.ended(FAILED, "error: ")
        said = scene.start.said()
        whole = "the disk is full" in said and "make room" in said
        log = "No space left on device" in said and "log.jsonl" in said
        require(whole or log, f"a full disk was not named: {scene.start.last_words()}")
        return code
    finally:
        scene.start.destroy()
        disk.empty(scene.course.place)


def damage_in_a_save(scene: Scene) -> int:
    """A file is damaged while it is being saved: noticed in that save, or in the next start."""
    folder = scene.writing()
    time.sleep(scene.chance.uniform(0, 0.03))
    what = scene.chance.choice(damage.WHILE_WRITING)
    try:
        scene.told = f"{what.__name__}: {what(folder, scene.chance)}"
    except (OSError, IndexError, ValueError) as error:  # renamed meanwhile, or still empty
        scene.told = f"{what.__name__}: too late or too early ({type(error).__name__})"
    time.sleep(0.5)
    noticed = scene.start.process.poll()
    if noticed is None:
        scene.start.destroy()
        return scene.start.process.returncode
    return scene.ended(FAILED, "error: ")


def damage_a_step(scene: Scene) -> int:
    """Everything ends; then the newest checkpoint is damaged."""
    return _at_rest(scene, damage.TO_A_STEP)


def damage_latest(scene: Scene) -> int:
    """Everything ends; then `latest` is overwritten or removed."""
    return _at_rest(scene, damage.TO_LATEST)


def _at_rest(scene: Scene, kinds: tuple[damage.Damage, ...]) -> int:
    scene.start.destroy()
    latest = scene.run / "latest"
    what = scene.chance.choice(kinds)
    step = scene.run / latest.read_text(encoding="utf-8")
    scene.told = f"{what.__name__}: {what(step, scene.chance)}"
    return scene.start.process.returncode


# Fault, its weight in the draw, and how many whole checkpoints there must be before it.
KINDS: tuple[tuple[Fault, int, int], ...] = (
    (kill_a_rank, 4, 0),
    (kill_all, 4, 0),
    (kill_in_a_save, 4, 0),
    (terminate, 3, 0),
    (warn, 3, 0),
    (stop_a_rank, 1, 0),
    (fill_the_disk, 2, 0),
    (damage_in_a_save, 3, 1),
    (damage_a_step, 5, 2),
    (damage_latest, 3, 2),
)
TOUCHES_FILES = {damage_in_a_save, damage_a_step, damage_latest}
NEEDS_A_DISK = {fill_the_disk}
NEEDS_RANKS = {stop_a_rank}  # a rank alone cannot be named by another
