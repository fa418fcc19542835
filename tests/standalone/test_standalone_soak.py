"""The soak itself: it ends well on a sound engine, and no broken promise passes it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from megatron_patches.soak import campaign, disk, faults, promises, table
from megatron_patches.soak.campaign import Soak
from megatron_patches.soak.course import Course, write_text
from megatron_patches.soak.journal import Journal, read
from megatron_patches.soak.process import Start
from megatron_patches.soak.promises import Broken


def soak(tmp_path: Path, **changes) -> Soak:
    asked = {"minutes": 60.0, "seed": 3, "processes": 1, "iterations": 40, **changes}
    return Soak(tmp_path / "out", tmp_path / "work", say=lambda _: None, **asked)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A complete unbroken run of 30 steps and its course."""
    work = tmp_path_factory.mktemp("soak")
    write_text(work, 1)
    course = Course(work, work / "disk", processes=1, seed=1, iterations=30)
    start = Start(course.command(course.unbroken), work / "unbroken.txt")
    assert start.wait() == 0, start.said()
    shutil.copytree(course.unbroken, course.run)
    return course


@pytest.fixture
def course(trained, tmp_path, monkeypatch):
    """The same with a run folder that may be spoilt."""
    made = Course(trained.work, tmp_path, processes=1, seed=1, iterations=30)
    shutil.copytree(trained.run, made.run)
    return made


def test_from_the_first_fault_to_the_end(tmp_path, monkeypatch):
    """One process, few steps, three kinds; stopped after the first fault and called again."""
    kinds = (faults.kill_in_a_save, faults.terminate, faults.damage_a_step)
    monkeypatch.setattr(faults, "KINDS", tuple(k for k in faults.KINDS if k[0] in kinds))
    monkeypatch.setattr(disk, "mounted", lambda *_: "not in this test")
    monkeypatch.setattr(campaign, "LONGEST_WAIT", 24)
    first = soak(tmp_path)
    course = first._course(40)

    class Stopped(Exception):
        pass

    def stops(_):
        raise Stopped

    first.say = stops
    with pytest.raises(Stopped):
        first.run()
    assert [e["event"] for e in read(tmp_path / "out" / "events.jsonl")] == [
        *("begin", "unbroken", "fault")
    ]
    with pytest.raises(Broken, match="another soak was begun here"):
        soak(tmp_path, seed=4).run()
    end = soak(tmp_path).run()
    events = read(tmp_path / "out" / "events.jsonl")
    found = [event for event in events if event["event"] == "fault"]
    assert end["faults"] == len(found) >= 2 and end["iterations"] == 40
    assert end["numbers_equal"] > 100_000  # weights and two moments of each
    assert end["rows_equal"] == len(promises.rows(course.unbroken / "log.jsonl")) >= 40
    assert soak(tmp_path).run() == end  # done: nothing is trained again
    assert str(tmp_path) not in (tmp_path / "out" / "events.jsonl").read_text()
    shown = table.markdown([e for e in events if e["event"] != "broken promise"])
    assert f"{len(found)} of them, on a training of 40 steps, 1 process(es)" in shown
    assert "The disk could not be filled: not in this test." in shown


def test_the_median_of_an_even_number_lies_between_the_middle_two():
    begin = {"event": "begin", "iterations": 9, "processes": 1, "accumulation": 1}
    begin |= {"save_every": 3, "seed": 1, "no_disk": None}
    fault = {"event": "fault", "code": 1, "broken": []}
    faults = [fault | {"fault": "warn", "seconds": s} for s in (30.0, 10.0, 20.0, 90.0)]
    faults += [fault | {"fault": "kill_all", "seconds": s} for s in (7.0, 1.0, 3.0)]
    end = {"event": "end", "minutes": 1, "rows_equal": 9, "numbers_equal": 9, "iterations": 9}
    end |= {"without_faults_from": 5}
    shown = table.markdown([begin, *faults, end])
    assert "| warn | 4 | 1 (4) | 0 | 25 |" in shown
    assert "| kill all | 3 | 1 (3) | 0 | 3 |" in shown


# ---- broken promises -------------------------------------------------------------------------


def unbroken(course: Course) -> list[promises.Row]:
    return promises.rows(course.unbroken / "log.jsonl")


def test_a_sound_run_passes(course):
    assert promises.check_log(course.run / "log.jsonl", unbroken(course), 30) == 30
    assert promises.check_same_state(course.run, course.unbroken, 30) > 100_000
    promises.check_order(unbroken(course), course.batch)
    assert promises.check_intact(course.run, 30) == promises.Standing(30, {}, True)


def rewrite(log: Path, change) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    change(lines)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[12].update(lm_loss=rows[12]["lm_loss"] + 1e-7), "lm_loss"),
        (lambda rows: rows[12].update(learning_rate=0.1), "learning_rate"),
        (lambda rows: rows[12].pop("gradient_norm"), "gradient_norm"),
        (lambda rows: rows.insert(12, rows.pop(11)), "iteration"),
        (lambda rows: rows.insert(12, rows[11]), "rows"),
        (lambda rows: rows.pop(12), "iteration"),
        (lambda rows: rows.append(rows[-1]), "rows"),
        (lambda rows: rows.__delitem__(slice(-3, None)), "ends at iteration"),
    ],
)
def test_another_log(course, change, words):
    rewrite(course.run / "log.jsonl", change)
    with pytest.raises(Broken, match=words):
        promises.check_log(course.run / "log.jsonl", unbroken(course), 30)


def test_speed_alone_may_differ(course):
    rewrite(course.run / "log.jsonl", lambda rows: rows[3].update(tokens_per_second=1.0))
    assert promises.check_log(course.run / "log.jsonl", unbroken(course), 30) == 30


def test_samples_in_another_order(course):
    rows = unbroken(course)
    with pytest.raises(Broken, match="iteration 1: consumed_sha"):
        promises.check_order(rows, course.batch + 1)


def test_other_weights(course):
    import torch

    (file,) = (course.run / "global_step30").glob("*model_states.pt")
    state = torch.load(file, weights_only=True)
    name, tensor = next((k, v) for k, v in state["module"].items() if v.is_floating_point())
    tensor.view(-1)[7] = torch.nextafter(tensor.view(-1)[7], torch.tensor(9.0))
    torch.save(state, file)
    with pytest.raises(Broken, match=f"{file.name}: .*{name} differs"):
        promises.check_same_state(course.run, course.unbroken, 30)


def test_a_step_that_is_not_whole(course):
    (file,) = (course.run / "global_step30").glob("*model_states.pt")
    file.write_bytes(file.read_bytes()[:-1])
    found = promises.standing(course.run)
    assert found.step == 20 and "bytes, the manifest says" in found.broken["global_step30"]
    with pytest.raises(Broken, match="checkpoints broken by the fault"):
        promises.check_intact(course.run, 30)
    shutil.rmtree(course.run / "global_step30")
    (course.run / "latest").write_text("global_step20")
    with pytest.raises(Broken, match="step 30 was there before, now the newest is 20"):
        promises.check_intact(course.run, 30)


# ---- commands that end otherwise ---------------------------------------------------------------


def scene(tmp_path: Path, program: str) -> faults.Scene:
    import random

    course = Course(tmp_path, tmp_path, processes=1, seed=1, iterations=30)
    start = Start([sys.executable, "-c", program], tmp_path / "output.txt")
    return faults.Scene(course, start, random.Random(1))


def test_another_exit_code_or_other_words(tmp_path):
    made = scene(tmp_path, "import sys; sys.exit('error: something else')")
    with pytest.raises(Broken, match="exit code 1 instead of 75: error: something else"):
        made.ended(75)
    with pytest.raises(Broken, match="'the disk is full' was not said"):
        made.ended(1, "error: ", "the disk is full")
    assert made.ended(1, "error: ") == 1


def test_a_fault_that_comes_too_late(course, tmp_path):
    """Filling a disk takes seconds, in which the last checkpoint is saved: but only if it is whole."""
    made = scene(tmp_path, "")
    made.course = course
    with pytest.raises(faults.TooLate):
        made.ended(1)
    (course.run / "global_step30" / "manifest.json").unlink()
    with pytest.raises(Broken, match="exit code 0 instead of 1"):
        made.ended(1)


def test_a_process_that_stays(tmp_path):
    child = "import time; time.sleep(600)"
    made = scene(
        tmp_path,
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print('there', flush=True); time.sleep(1.5)",
    )
    made.start.wait_for(lambda: "there" in made.start.said(), "its word")
    made.start.look()
    with pytest.MonkeyPatch.context() as patch:
        import psutil

        waits = psutil.wait_procs
        patch.setattr(psutil, "wait_procs", lambda found, timeout: waits(found, timeout=0.5))
        with pytest.raises(Broken, match="1 processes outlived the command"):
            made.start.wait()
    made.start.destroy()


def test_a_command_that_ends_too_early(tmp_path):
    made = scene(tmp_path, "print('hello')")
    with pytest.raises(Broken, match="ended by itself, code 0, before step 7: hello"):
        made.start.wait_for(lambda: made.start.reached() >= 7, "step 7")


# ---- the journal and its table ------------------------------------------------------------------


def test_a_torn_journal_goes_on(tmp_path):
    journal = Journal(tmp_path / "events.jsonl", {"/home/me": "WORK"})
    journal.write("begin", what="in /home/me, process 123 on it")
    with open(tmp_path / "events.jsonl", "a") as stream:
        stream.write('{"event": "fau')
    again = Journal(tmp_path / "events.jsonl", {})
    again.write("fault", seconds=1.0)
    events = read(tmp_path / "events.jsonl")
    assert [event["event"] for event in events] == ["begin", "fault"]
    assert events[0]["what"] == "in WORK, process PID on it"
    (tmp_path / "events.jsonl").write_text("nonsense\n[1]\n")
    with pytest.raises(ValueError, match=r"events.jsonl:1: no JSON"):
        read(tmp_path / "events.jsonl")


def test_a_table_of_an_unfinished_soak_is_refused(tmp_path):
    journal = Journal(tmp_path / "events.jsonl", {})
    with pytest.raises(ValueError, match="no soak was begun here"):
        table.markdown(journal.events)
    journal.write("begin", iterations=30)
    journal.write("broken promise", what="it was not")
    with pytest.raises(ValueError, match="has no end; its last event: .*it was not"):
        table.markdown(journal.events)
