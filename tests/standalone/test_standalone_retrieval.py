"""Retrieval of a model: an ideal copier has all of it, one that cannot see the needle has none."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import retrieval_models as cases
import standalone_tools as tools
import torch
import yaml

from data_prep.errors import DataError
from data_prep.tokenizing import load_tokenizer
from megatron_patches import positions
from megatron_patches.analysis.retrieval_rows import RetrievalRow, read_retrieval
from megatron_patches.config import ConfigError
from megatron_patches.standalone import load_model
from megatron_patches.standalone import retrieval as retrieval_module
from megatron_patches.standalone.generate import generate
from megatron_patches.standalone.retrieval import Request, Retrieval, answer_scores, ask


@pytest.fixture(scope="session")
def words(tmp_path_factory) -> Path:
    """Folder with a toy text of bytes and its tokenizer."""
    folder = tmp_path_factory.mktemp("words")
    cases.write_text(folder)
    return folder


@pytest.fixture(scope="session")
def random_run(words, tmp_path_factory) -> Path:
    return cases.checkpoint(words, tmp_path_factory.mktemp("random") / "run")


def quiet(_: str) -> None: ...


def opened(path: Path, *lengths: int, **settings) -> Retrieval:
    request = {"depths": (0.0, 0.5, 1.0), "samples": 3, **settings}
    return Retrieval(path, Request(lengths or (64, 160), **request))


def without_time(rows: list[RetrievalRow]) -> list[RetrievalRow]:
    return [dataclasses.replace(row, seconds=0.0) for row in rows]


# --- the two ends of the scale --------------------------------------------------------------------


def test_an_ideal_copier_finds_every_answer(random_run):
    asked = opened(random_run, 100)
    asked.model = cases.Oracle(asked.model)
    rows = asked.run(None, quiet)
    assert [(row.task, row.source) for row in rows[::3]] == [
        ("passkey", "digits"),
        ("copy", "random"),
        ("copy", "text"),
    ]
    sure = math.log(1 + (cases.ENTRIES - 1) * math.exp(-12))
    for row in rows:
        assert (row.status, row.exact, row.token_accuracy) == ("ok", 1.0, 1.0)
        assert row.loss == pytest.approx(sure, abs=2e-5)  # float32 adds small odds to 1
        assert row.gain == pytest.approx(row.control_loss - row.loss) and row.gain > 1
        if row.task == "passkey":
            # The control holds another key, of which the copier writes the first digit, 12 nats for
            # the right one; given the right one it has nothing to go by.
            wanted = (12 + 4 * math.log(cases.ENTRIES)) / 5
            assert row.control_loss == pytest.approx(wanted, rel=1e-3)
            assert row.control_accuracy == 0
        if row.source == "random":
            # Nothing to copy: even odds.
            assert row.control_loss == pytest.approx(math.log(cases.ENTRIES), rel=1e-5)


@pytest.mark.parametrize("method", ["kerple_log", "rotary", "none"])
def test_a_model_that_cannot_see_the_needle_gains_nothing_exactly(words, tmp_path, method):
    # Two layers that look 8 tokens back reach 16 positions.
    run = cases.checkpoint(words, tmp_path / "run", pos_emb=method)
    far = opened(run, 160, depths=(0.0, 0.5), window=8, samples=5).run(None, quiet)
    for row in far:
        assert row.distance > 40
        assert row.losses == row.control_losses and row.gain == 0.0
        assert row.correct == row.control_correct
        assert row.options["sliding_window_width"] == 8
    seeing = opened(run, 160, depths=(0.0, 0.5), samples=5).run(None, quiet)
    assert all(row.losses != row.control_losses for row in seeing)
    # Right before the question, the needle's end is in sight of the answer.
    near = opened(run, 160, depths=(1.0,), window=8, tasks=("passkey",)).run(None, quiet)
    assert near[0].losses != near[0].control_losses


# --- scores ---------------------------------------------------------------------------------------


def test_scores_are_those_of_all_logits(random_run):
    asked = opened(random_run)
    model = asked.model
    task = asked.tasks[1]
    text = torch.from_numpy(task.texts(64, 0.5))
    # Padding would win everywhere if it were let.
    weight = model.sequential["6"].final_linear.weight
    with torch.no_grad():
        weight[260] = 50 * weight[:257].mean(0) + 3
        logits = model(text[:, :-1]).double()
    wanted = -logits.log_softmax(-1).gather(2, text[:, 1:, None])[:, -16:, 0]
    losses, best = answer_scores(model, text, 16, 257)
    assert losses.shape == best.shape == (3, 16) and losses.dtype == torch.float32
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert torch.equal(best, logits[:, -16:, :257].argmax(-1))
    assert not torch.equal(best, logits[:, -16:].argmax(-1))


def test_exact_is_what_greedy_decoding_writes(random_run):
    model = opened(random_run).model
    prompt = torch.from_numpy(np.random.RandomState(3).randint(0, 257, size=(4, 30)))
    written = generate(model, prompt, 6, vocabulary=257)
    assert ask(model, written.numpy(), 6, 257).correct == [6] * 4
    written[:, -3] = (written[:, -3] + 1) % 257
    assert all(right < 6 for right in ask(model, written.numpy(), 6, 257).correct)


def test_batches_and_order_change_nothing(random_run, monkeypatch):
    first = opened(random_run, 64, 160).run(None, quiet)
    assert without_time(first) == without_time(opened(random_run, 64, 160).run(None, quiet))
    other = opened(random_run, 160, 64).run(None, quiet)
    assert without_time(first) == without_time(other[9:] + other[:9])
    monkeypatch.setattr(retrieval_module, "TOKENS_PER_PASS", 1)
    for one, two in zip(first, opened(random_run, 64, 160).run(None, quiet), strict=True):
        np.testing.assert_allclose(one.losses, two.losses, rtol=1e-5)
        np.testing.assert_allclose(one.control_losses, two.control_losses, rtol=1e-5)


def test_every_field_of_a_row(random_run):
    asked = opened(random_run, 64, split="test")
    rows = asked.run(None, quiet)
    wanted = {
        **{"method": "kerple_log", "dataset": "toy", "seed": 1234, "train_length": 32},
        **{"split": "test", "eval_length": 64, "samples": 3, "engine": "unknown", "step": 3},
        **{"attention": "chunked", "dtype": "float32", "status": "ok", "options": {}},
        **{"tokenizer": load_tokenizer("byte").fingerprint},
        "parameters": asked.model.parameter_count(),
    }
    for row, (task, length, depth) in zip(rows, asked.cells(), strict=True):
        found = dataclasses.asdict(row)
        assert {key: found[key] for key in wanted} == wanted
        assert (row.eval_length, row.depth) == (length, depth)
        assert row.distance == task.distance(length, depth)
        assert row.questions == task.fingerprint and row.answer_tokens == task.answer_tokens
        assert row.seconds > 0 and len(row.losses) == len(row.control_correct) == 3
        assert row.gain == pytest.approx(np.mean(row.control_losses) - np.mean(row.losses))
    assert len({row.questions for row in rows}) == 3


# --- all methods ----------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("method", positions.names())
def test_the_last_states_alone_are_the_same(words, tmp_path, method, window):
    """What `answer_scores` asks of a model: no states of the last layer but those it needs."""
    changes = yaml.safe_load((tools.ROOT / "configs" / "method" / f"{method}.yml").read_text())
    lengths = {"seq_length": 64, "max_position_embeddings": 64}
    run = cases.checkpoint(words, tmp_path / "run", **lengths, **changes)
    model = load_model(run, window=window, dtype=torch.float64)
    ids = torch.from_numpy(np.random.RandomState(1).randint(0, 257, size=(2, 50)))
    with torch.no_grad():
        whole = model.hidden(ids)
        for last in (1, 7, 50):
            part = model.hidden(ids, last=last)
            assert part.shape == (2, last, 16)
            np.testing.assert_allclose(part, whole[:, -last:], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", positions.names())
def test_every_method_answers_or_refuses(words, tmp_path, method):
    changes = yaml.safe_load((tools.ROOT / "configs" / "method" / f"{method}.yml").read_text())
    lengths = {"seq_length": 64, "max_position_embeddings": 64}
    run = cases.checkpoint(words, tmp_path / "run", **lengths, **changes)
    asked = opened(run, 64, 256, samples=2)
    rows = asked.run(None, quiet)
    near, far = rows[:9], rows[9:]
    assert {row.status for row in near} == {"ok"} and len(rows) == 18
    longest = asked.model.position_method.max_length
    reaches = longest is None or longest >= 256
    assert {row.status for row in far} == {"ok" if reaches else "refused"}
    if not reaches:
        assert all(f"max_length={longest}" in row.message for row in far)
    assert any(row.gain != 0 for row in near)


# --- cells that cannot be answered ----------------------------------------------------------------


def test_windows_too_short_and_too_long_are_rows(random_run):
    asked = opened(random_run, 20, 47, 48, 1700, 4000, depths=(0.5,))
    rows = {(row.eval_length, row.source): row for row in asked.run(None, quiet)}
    assert rows[20, "digits"].status == "refused"
    assert "passkey (digits) needs windows of at least 33 tokens" in rows[20, "digits"].message
    assert rows[47, "digits"].status == rows[48, "text"].status == "ok"
    assert rows[47, "random"].status == rows[47, "text"].status == "refused"
    assert "copy (text) needs windows of at least 48 tokens" in rows[47, "text"].message
    assert rows[1700, "digits"].status == rows[1700, "random"].status == "ok"
    # The copied span lies half of the 3000 tokens away.
    assert rows[1700, "text"].status == "failed"
    assert "prepare more held-out text" in rows[1700, "text"].message
    assert {rows[4000, source].status for source in ("digits", "random", "text")} == {"failed"}
    for row in rows.values():
        assert (row.gain is None) == (row.status != "ok") == bool(row.message)


def test_losses_that_are_not_finite_are_failed_rows(random_run):
    asked = opened(random_run, 64)
    asked.model.sequential["6"].final_linear.weight.data[3] = float("nan")
    rows = asked.run(None, quiet)
    assert {row.status for row in rows} == {"failed"}
    assert {row.message for row in rows} == {"the loss of an answer is not finite"}


def test_resume_asks_what_is_missing(random_run, tmp_path):
    output = tmp_path / "rows.jsonl"
    opened(random_run, 64, tasks=("copy",)).run(output, quiet)
    before = read_retrieval(output)
    assert len(before) == 6
    new = opened(random_run, 64, 160).run(output, quiet, resume=True)
    assert [(row.task, row.eval_length) for row in new] == [
        *[("passkey", 64)] * 3,
        *[("passkey", 160)] * 3,
        *[("copy", 160)] * 6,
    ]
    assert without_time(read_retrieval(output)[:6]) == without_time(before)
    assert opened(random_run, 64, 160).run(output, quiet, resume=True) == []
    # Other questions are asked again; a refusal is an answer.
    assert len(opened(random_run, 64, samples=4).run(output, quiet, resume=True)) == 9
    short = opened(random_run, 20, tasks=("passkey",)).run(output, quiet, resume=True)
    assert [row.status for row in short] == ["refused"] * 3
    assert opened(random_run, 20, tasks=("passkey",)).run(output, quiet, resume=True) == []
    failed = [opened(random_run, 4000, tasks=("passkey",)) for _ in range(2)]
    assert [len(asked.run(output, quiet, resume=True)) for asked in failed] == [3, 3]


# --- inputs that cannot be right ------------------------------------------------------------------


def test_another_tokenizer_is_refused(words, tmp_path):
    cases.write_text(tmp_path, fingerprint="feed")
    with pytest.raises(DataError, match="is tokenizer .*, the text was prepared with feed"):
        opened(cases.checkpoint(tmp_path, tmp_path / "run"))


def test_a_configuration_without_tokenizer_is_refused(words, tmp_path):
    run = cases.checkpoint(words, tmp_path / "run", vocab_file=None)
    with pytest.raises(ConfigError, match="`vocab_file` names no tokenizer"):
        opened(run)


def test_a_tokenizer_larger_than_the_model(words, tmp_path, random_run):
    run = shutil.copytree(random_run, tmp_path / "run")
    file = run / "global_step3" / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=True)["module"]
    for name in ("sequential.0.word_embeddings.weight", "sequential.6.final_linear.weight"):
        state[name] = state[name][:256].clone()
    torch.save({"module": state}, file)
    settings = yaml.safe_load((run / "config.yml").read_text())
    (run / "config.yml").write_text(yaml.safe_dump({**settings, "padded_vocab_size": 256}))
    with pytest.raises(DataError, match="257 entries, the model 256|outside the model's vocab"):
        opened(run)


def in_process(*arguments: object) -> int:
    """The exit code of scripts/retrieval.py, in this process."""
    path = tools.ROOT / "scripts" / "retrieval.py"
    spec = importlib.util.spec_from_file_location("retrieval_script", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    try:
        options = script.make_parser().parse_args([*map(str, arguments)])
        return script.guarded(lambda: script.ask(options), False)
    except SystemExit as stop:  # argparse
        return stop.code


def test_the_command_writes_rows(random_run, tmp_path, capsys):
    output = tmp_path / "new" / "rows.jsonl"
    few = ("--checkpoint", random_run, "--lengths", 64, "--depths", 0, 1, "--samples", 2)
    line = [sys.executable, "scripts/retrieval.py", *map(str, few), "--output", str(output)]
    done = subprocess.run(
        line, cwd=tools.ROOT, env=tools.clean_environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "kerple_log, copy (text) at 64, depth 1: gain " in done.stdout
    assert "6 rows appended to" in done.stdout
    assert [row.samples for row in read_retrieval(output)] == [2] * 6
    assert in_process(*few, "--tasks", "copy", "--resume", "--output", output) == 0
    assert capsys.readouterr().out == f"0 rows appended to {output}\n"
    long = ("--lengths", 4000, "--tasks", "passkey")
    assert in_process(*few[:2], *long, "--output", output) == 1
    assert "failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--depths", "1.5"],
        ["--depths", "nan"],
        ["--tasks", "sort"],
        ["--samples", "0"],
        ["--lengths", "0"],
        ["--split", "train"],
        ["--attention", "chunkd"],
        ["--device", "tpu"],
        ["--set", "seed=1"],
    ],
)
def test_questions_without_an_answer_end_with_2(random_run, tmp_path, arguments, capsys):
    output = tmp_path / "rows.jsonl"
    assert in_process("--checkpoint", random_run, "--output", output, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and len(shown.err.splitlines()) == 1
    assert not output.exists()
