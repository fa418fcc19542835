"""What is said while a long stage runs: how far, how fast, how much longer."""

import pytest

from data_prep import progress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_with_speed_and_time_left_where_there_is_no_terminal(clock):
    said = []
    with progress.stage("tokenizing", 4_000_000_000, said.append) as advance:
        for second in range(0, 100, 10):
            clock[0] = float(second)
            advance(second * 1_000_000)
    assert said[0] == "tokenizing: 30.0 of 4000.0 MB, 1.0 MB/s, 1 h 6 min left"
    assert len(said) == 4  # every 30 seconds, and the end
    assert said[-1] == "tokenizing: 90.0 MB in 90.0 s, 1.0 MB/s"


def test_a_continued_stage_counts_its_own_work_alone(clock):
    said = []
    with progress.stage("tokenizing", 300_000_000, said.append) as advance:
        advance(200_000_000)
        clock[0] = 40.0
        advance(240_000_000)
    assert said[0] == "tokenizing: 240.0 of 300.0 MB, 1.0 MB/s, 1 min 0 s left"


def test_without_a_total_there_is_no_time_left(clock):
    said = []
    with progress.stage("reading", None, said.append) as advance:
        advance(0)
        clock[0] = 31.0
        advance(62_000_000)
    assert said[0] == "reading: 62.0 MB, 2.0 MB/s"
