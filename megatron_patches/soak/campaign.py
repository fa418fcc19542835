"""The loop: train on, break, check, until the time is over; then to the end, and compare."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_patches.soak import disk, faults
from megatron_patches.soak.course import SAVE_EVERY, Course, write_text
from megatron_patches.soak.journal import Journal
from megatron_patches.soak.process import Start, destroy_leftovers
from megatron_patches.soak.promises import (
    Broken,
    Row,
    Standing,
    check_intact,
    check_log,
    check_order,
    check_same_state,
    fault,
    require,
    rows,
    standing,
    steps_of,
)

LONGEST_WAIT = 4 * SAVE_EVERY  # steps between a start and its fault
CALIBRATION = 60  # steps of the run that measures how long a start and a step take


class Soak:
    """One soak in `work`, told in `output`/events.jsonl; the same call goes on with one that stopped.

    Args:
        output: events.jsonl.
        work: text, runs, what commands printed; tens of megabytes.
        minutes: of faults; the training is made long enough for them.
        seed: of the faults, the text and the model.
        processes: ranks.
        say: a line a fault, for the terminal.
    """

    def __init__(
        self,
        output: Path,
        work: Path,
        *,
        minutes: float,
        seed: int,
        processes: int,
        iterations: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.work, self.minutes, self.say = work, minutes, say
        self.asked = {"minutes": minutes, "seed": seed, "processes": processes}
        self.journal = Journal(output / "events.jsonl", {str(work): "WORK"})
        self.seed, self.processes, self.iterations = seed, processes, iterations
        self.place = work / "disk"
        self.no_disk = ""

    # ---- from the beginning to the end -------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """The summary, which is also the journal's last event. Raises Broken."""
        done = self.journal.of("end")
        if done:
            return done[-1]
        self.work.mkdir(parents=True, exist_ok=True)
        for name in ("run", "unbroken", "calibration"):
            destroy_leftovers(self.work / f"{name}.yml")
        write_text(self.work, self.seed)
        self.no_disk = disk.mounted(self.place, self.work / "disk.ext4")
        disk.empty(self.place)
        try:
            return self._run()
        except Broken as broken:
            self.journal.write("broken promise", what=str(broken))
            raise
        finally:
            disk.unmount(self.place)

    def _run(self) -> dict[str, Any]:
        course = self._begin()
        unbroken = self._unbroken(course)
        while self._spent() < 60 * self.minutes:
            if not self._one_fault(course, unbroken):
                break
        return self._end(course, unbroken)

    def _begin(self) -> Course:
        known = self.journal.of("begin")
        if known:
            asked = {key: known[-1][key] for key in self.asked}
            require(asked == self.asked, f"another soak was begun here: {asked}, not {self.asked}")
            return self._course(known[-1]["iterations"])
        iterations = self.iterations or self._calibrate()
        course = self._course(iterations)
        described = {**course.described(), **self.asked}
        self.journal.write("begin", **described, no_disk=self.no_disk)
        return course

    def _course(self, iterations: int) -> Course:
        return Course(self.work, self.place, self.processes, self.seed, iterations)

    def _calibrate(self) -> int:
        """So many steps that faults of `minutes` find the training unfinished, but not by much."""
        course = self._course(CALIBRATION)
        folder = self.work / "calibration"
        shutil.rmtree(folder, ignore_errors=True)
        start = Start(course.command(folder), self.work / "calibration.txt")
        start.wait_for(lambda: start.reached() > 0, "the first step")
        begun = time.monotonic()
        code = start.wait()
        require(code == 0, f"the calibration ended with code {code}: {start.last_words()}")
        opening, step = begun - start.began, (time.monotonic() - begun) / CALIBRATION
        gained = LONGEST_WAIT / 2 - SAVE_EVERY / 2  # steps a fault leaves standing, about
        cycle = 1.5 * opening + LONGEST_WAIT / 2 * step  # and ends take time, too
        return SAVE_EVERY * max(10, round(60 * self.minutes / cycle * gained / SAVE_EVERY))

    # ---- the run that nothing happens to -----------------------------------------------------

    def _unbroken(self, course: Course) -> list[Row]:
        if not self.journal.of("unbroken"):
            began = time.monotonic()
            start = Start(course.command(course.unbroken), self.work / "unbroken.txt")
            limit = max(600.0, course.iterations)  # a second a step
            code = start.wait(limit)
            require(code == 0, f"the unbroken run ended with code {code}: {start.last_words()}")
            seconds = round(time.monotonic() - began, 1)
            self.journal.write("unbroken", iterations=course.iterations, seconds=seconds)
        found = rows(course.unbroken / "log.jsonl")
        last = found[-1]["iteration"] if found else 0
        require(last == course.iterations, f"the unbroken log ends at iteration {last}")
        check_order(found, course.batch)
        return found

    # ---- one fault ---------------------------------------------------------------------------

    def _spent(self) -> float:
        """Seconds that faults have taken so far."""
        return float(sum(event["seconds"] for event in self.journal.of("fault")))

    def _one_fault(self, course: Course, unbroken: list[Row]) -> bool:
        """False: the training came to its end before the fault."""
        number = len(self.journal.of("fault"))
        chance = random.Random(f"{self.seed} {number}")
        before = standing(course.run)
        if before.step >= course.iterations:
            return False
        began = time.monotonic()
        start = Start(course.command(course.run), self.work / "output.txt")
        scene = faults.Scene(course, start, chance)
        try:
            self._check_start(course, start, before)
            reached = before.step + chance.randrange(1, LONGEST_WAIT)
            if reached >= course.iterations:
                code = start.wait()
                require(code == 0, f"the last start ended with code {code}: {start.last_words()}")
                raise faults.TooLate
            start.wait_for(lambda: start.reached() >= reached, f"step {reached}")
            whole = standing(course.run)
            require(not whole.broken, f"checkpoints of a healthy run are broken: {whole.broken}")
            kind = self._draw(course, chance)
            code = kind(scene)
        except faults.TooLate:
            self.journal.write("finished", number=number, iteration=course.iterations)
            return False
        finally:
            start.destroy()
        after = standing(course.run)
        if kind not in faults.TOUCHES_FILES:
            after = check_intact(course.run, whole.step)
        last = check_log(course.run / "log.jsonl", unbroken, after.step)
        about = {
            "number": number,
            "fault": kind.__name__,
            "told": scene.told,
            "begun_at": before.step,
            "code": code,
            "logged": last,
            "goes_on_from": after.step,
            "broken": ", ".join(sorted(after.broken)),
            "seconds": round(time.monotonic() - began, 2),
        }
        self.journal.write("fault", **about)
        self.say(
            f"{self._spent() / 60:5.1f} min  {about['fault']:<17} code {code:>3}  at {last} of "
            f"{course.iterations}, goes on from {after.step}  {scene.told}"
        )
        return True

    def _check_start(self, course: Course, start: Start, before: Standing) -> None:
        """It goes on from the newest whole checkpoint, and says which are broken."""
        start.wait_for(lambda: start.begins_at() is not None, "the first line")
        begins = start.begins_at()
        require(
            begins == before.step,
            f"continued at iteration {begins}; the newest whole checkpoint is of {before.step}",
        )
        warned = "WARNING: " in start.said()
        require(
            warned == bool(before.broken),
            f"broken checkpoints {before.broken}, but said: {start.last_words()}",
        )

    def _draw(self, course: Course, chance: random.Random) -> faults.Fault:
        whole = sum(not fault(step) for step in steps_of(course.run))
        possible = [
            (kind, weight)
            for kind, weight, needed in faults.KINDS
            if whole >= needed
            and not (kind in faults.NEEDS_A_DISK and self.no_disk)
            and not (kind in faults.NEEDS_RANKS and course.processes == 1)
        ]
        kinds, weights = zip(*possible, strict=True)
        chosen: faults.Fault = chance.choices(kinds, weights)[0]
        return chosen

    # ---- the end -----------------------------------------------------------------------------

    def _end(self, course: Course, unbroken: list[Row]) -> dict[str, Any]:
        """Train to the end without faults; weights, optimizer and log must equal the unbroken run's."""
        before = standing(course.run)
        if before.step < course.iterations:
            start = Start(course.command(course.run), self.work / "output.txt")
            try:
                self._check_start(course, start, before)
                code = start.wait(max(600.0, course.iterations))
            finally:
                start.destroy()
            require(code == 0, f"the last start ended with code {code}: {start.last_words()}")
        last = check_log(course.run / "log.jsonl", unbroken, course.iterations)
        ours, theirs = rows(course.run / "log.jsonl"), unbroken
        require(len(ours) == len(theirs), f"{len(ours)} rows in the log, unbroken {len(theirs)}")
        compared = check_same_state(course.run, course.unbroken, course.iterations)
        self.journal.write(
            "end",
            iterations=last,
            rows_equal=len(ours),
            numbers_equal=compared,
            faults=len(self.journal.of("fault")),
            minutes=round(self._spent() / 60, 1),
            without_faults_from=before.step,
        )
        return self.journal.of("end")[-1]
