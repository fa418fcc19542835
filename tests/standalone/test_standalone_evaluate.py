"""Scores do not depend on how they are computed, and every row says what it measured."""

from __future__ import annotations

import dataclasses
import math
import shutil

import numpy as np
import pytest
import standalone_tools as tools
import torch

from data_prep.errors import DataError
from megatron_patches.analysis.rows import Row, read_kernels, read_rows
from megatron_patches.config import config_sha, load_run_config
from megatron_patches.standalone import cli
from megatron_patches.standalone.evaluate import Evaluation, Request
from megatron_patches.standalone.scoring import score
from megatron_patches.standalone.train import train
from megatron_patches.standalone.windows import Plan


def quiet(_: str) -> None: ...


def run(path, lengths=(32, 64), **request) -> list[Row]:
    return Evaluation(path, Request(tuple(lengths), **request)).run(None, quiet)


def slow_losses(model, tokens, windows) -> list[float]:
    """One window at a time, from the logits, in float64."""
    found = []
    for window in windows:
        ids = torch.tensor(tokens[window.start : window.start + window.length + 1].astype(np.int64))
        with torch.no_grad():
            logs = model(ids[None, :-1])[0].double().log_softmax(-1)
        each = -logs.gather(1, ids[1:, None])[:, 0]
        found.append(each[window.score_from :].mean().item())
    return found


PROTOCOLS = {
    "nonoverlap": {},
    "last": {"last_k": 16, "stride": 40},
    "sliding": {"stride": 24},
    "position": {},
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_slow_loop_gives_the_same(trained, protocol):
    request = Request((32, 64, 96), protocol=protocol, **PROTOCOLS[protocol])
    evaluation = Evaluation(trained, request)
    for row in evaluation.run(None, quiet):
        windows = evaluation.text.plan.windows(row.eval_length)
        wanted = slow_losses(evaluation.model, evaluation.text.tokens, windows)
        np.testing.assert_allclose(row.window_losses, wanted, rtol=1e-5)
        counts = [window.scored for window in windows]
        assert row.loss == pytest.approx(np.dot(wanted, counts) / sum(counts), rel=1e-6)
        assert row.perplexity == pytest.approx(math.exp(row.loss), rel=1e-9)
        assert row.tokens == sum(counts) and row.windows == len(windows)


def test_the_batch_size_changes_nothing(trained):
    rows = [run(trained, (32, 64), batch_size=size) for size in (1, 3, 100, None)]
    for other in rows[1:]:
        for first, second in zip(rows[0], other, strict=True):
            np.testing.assert_allclose(first.window_losses, second.window_losses, rtol=1e-6)
            assert first.loss == pytest.approx(second.loss, rel=1e-6)


def test_the_order_of_lengths_changes_nothing(trained):
    first = run(trained, (32, 64, 128))
    second = run(trained, (128, 64, 32))[::-1]
    for one, two in zip(first, second, strict=True):
        assert dataclasses.replace(one, seconds=0.0) == dataclasses.replace(two, seconds=0.0)


def test_chunked_equals_reference(trained):
    request = Request((32, 300))
    chunked, reference = (
        Evaluation(trained, request, attention=name).run(None, quiet)
        for name in ("chunked", "reference")
    )
    for one, two in zip(chunked, reference, strict=True):
        assert (one.attention, two.attention) == ("chunked", "reference")
        np.testing.assert_allclose(one.window_losses, two.window_losses, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_uniform_model_has_the_vocabulary_as_perplexity(trained, dtype):
    evaluation = Evaluation(trained, Request((32, 64, 128)))
    evaluation.model.to(dtype)
    evaluation.model.sequential["6"].final_linear.weight.data.zero_()
    for row in evaluation.run(None, quiet):
        # In bfloat16, too: losses are float32 whatever the weights are.
        assert row.perplexity == pytest.approx(tools.VOCABULARY, rel=1e-6)


def test_loss_by_position(trained):
    evaluation = Evaluation(trained, Request((96,), protocol="position"))
    (row,) = evaluation.run(None, quiet)
    windows = evaluation.text.plan.windows(96)
    tokens = torch.from_numpy(
        np.stack([evaluation.text.tokens[w.start : w.start + 97] for w in windows]).astype(np.int64)
    )
    each = evaluation.model.token_losses(tokens[:, :-1], tokens[:, 1:])
    wanted = each.double().mean(0).view(48, 2).mean(1)  # 48 is the most that divides 96, up to 64
    np.testing.assert_allclose(row.position_losses, wanted, rtol=1e-5)
    assert np.mean(row.position_losses) == pytest.approx(row.loss, rel=1e-6)
    assert wanted[0] > wanted[8:].mean()  # less context, less known


def test_every_field_of_a_row(trained, text):
    first, second = run(trained, (32, 64), split="test")
    config = load_run_config(trained)
    model_file = trained / "global_step12" / "mp_rank_00_model_states.pt"
    count = sum(
        tensor.numel()
        for key, tensor in torch.load(model_file, weights_only=False)["module"].items()
        if "3.attention.rpe" not in key  # shared
    )
    wanted = {
        "method": "kerple_log",
        "dataset": "toy",
        "seed": 1234,
        "train_length": 32,
        "protocol": "nonoverlap",
        "split": "test",
        "last_k": None,
        "tokenizer": "tok-a",
        "config_sha": config_sha(config),
        "engine": "standalone",
        "attention": "chunked",
        "dtype": "float32",
        "step": 12,
        "parameters": count,
        "status": "ok",
        "message": None,
        "documents_isolated": False,
    }
    assert first.data == second.data != run(trained, (32, 128), split="test")[0].data
    for row, length in ((first, 32), (second, 64)):
        found = dataclasses.asdict(row)
        assert {key: found[key] for key in wanted} == wanted
        assert (row.eval_length, row.stride) == (length, length)
        assert row.seconds > 0 and len(row.git_sha) >= 7 and len(row.window_losses) == row.windows
        assert row.bits_per_byte is None  # no tokenizer lies beside the files


@pytest.mark.parametrize("given", [{}, {"variant": {"decay": "all"}}])
def test_a_run_keeps_the_name_of_its_study_on_another_text(trained, text, tmp_path, given):
    named = tmp_path / "named"
    shutil.copytree(trained, named)
    with open(named / "config.yml", "a", encoding="utf-8") as stream:
        stream.write("variant: {decay: none}\n")
    config = tools.tiny(text, named, dataset="other", train_iters=12, **given)
    row = Evaluation(named, Request((32,)), config=config).row(32)
    assert (row.dataset, row.options) == ("other", {"variant": {"decay": "none"}})


def test_parts_of_a_split_have_fingerprints_of_their_own(trained):
    whole, part, shorter = (run(trained, (32,), max_tokens=n)[0] for n in (None, 400, 300))
    assert len({whole.data, part.data, shorter.data}) == 3
    assert (whole.tokens, part.tokens, shorter.tokens) == (672, 384, 288)


def test_a_refused_cell_is_a_row_and_the_others_carry_on(trained, tmp_path, capsys):
    output = tmp_path / "rows.jsonl"
    arguments = ["--checkpoint", str(trained), "--lengths", "32", "4096", "64"]
    assert cli.eval_main([*arguments, "--output", str(output)]) == 1
    rows = read_rows(output)
    assert [(row.eval_length, row.status) for row in rows] == [
        (32, "ok"),
        (4096, "failed"),
        (64, "ok"),
    ]
    assert "the text has 700 tokens, a window of 4096 needs 4097" in rows[1].message
    assert rows[1].loss is None and rows[1].perplexity is None and not rows[1].window_losses
    assert "4096: failed" in capsys.readouterr().out
    shorter = ["--checkpoint", str(trained), "--lengths", "32", "64", "--output", str(output)]
    assert cli.eval_main(shorter) == 0
    assert len(read_rows(output)) == 5
    assert cli.eval_main([*shorter, "--resume"]) == 0
    assert len(read_rows(output)) == 5


def test_a_loss_that_is_not_finite_is_a_failed_row(trained, monkeypatch):
    evaluation = Evaluation(trained, Request((32, 64)))
    original = evaluation.model.token_losses

    def losses(tokens, labels, **options):
        found = original(tokens, labels, **options)
        return found * float("inf") if tokens.shape[1] == 64 else found

    monkeypatch.setattr(evaluation.model, "token_losses", losses)
    good, bad = evaluation.run(None, quiet)
    assert good.status == "ok" and bad.status == "failed" and "not finite" in bad.message


def test_methods_with_a_table_are_refused_beyond_it(config):
    folder = train(config(pos_emb="learned", train_iters=2))
    good, bad = run(folder, (32, 64))
    assert good.status == "ok" and bad.status == "refused"
    assert "max_length=32" in bad.message


def test_a_refusal_is_an_answer_and_not_asked_again(config, tmp_path, capsys):
    folder, output = train(config(pos_emb="learned", train_iters=2)), tmp_path / "rows.jsonl"
    command = ["--checkpoint", str(folder), "--lengths", "32", "64", "--output", str(output)]
    for _ in range(2):
        assert cli.eval_main([*command, "--resume"]) == 0
    assert [row.status for row in read_rows(output)] == ["ok", "refused"]
    assert f"0 rows appended to {output}" in capsys.readouterr().out


def test_a_length_that_is_named_twice_is_scored_once(trained, tmp_path):
    output = tmp_path / "rows.jsonl"
    command = ["--checkpoint", str(trained), "--lengths", "64", "32", "64", "32"]
    assert cli.eval_main([*command, "--output", str(output)]) == 0
    assert [row.eval_length for row in read_rows(output)] == [64, 32]


def test_kernels_are_written_without_a_scoring(trained, tmp_path, capsys):
    file = tmp_path / "new" / "kernels.jsonl"
    command = ["--checkpoint", str(trained), "--only-kernels", str(file)]
    for _ in range(2):  # the second time in place of the first
        assert cli.eval_main(command) == 0
    kernels = read_kernels(file)
    assert [kernel.head for kernel in kernels] == [0, 1, 2, 3]
    assert [path.name for path in file.parent.iterdir()] == ["kernels.jsonl"]
    assert f"4 kernels written to {file}" in capsys.readouterr().out
    assert cli.eval_main([*command, "--lengths", "32"]) == 2
    assert "--only-kernels scores nothing: leave out --lengths" in capsys.readouterr().err
    # Beside a scoring with a window they are those of the training all the same.
    beside = tmp_path / "beside.jsonl"
    scoring = ["--lengths", "32", "--window", "8", "--output", str(tmp_path / "rows.jsonl")]
    assert cli.eval_main(["--checkpoint", str(trained), *scoring, "--kernels", str(beside)]) == 0
    assert read_rows(tmp_path / "rows.jsonl")[0].options == {"sliding_window_width": 8}
    assert read_kernels(beside) == kernels and kernels[0].options == {}


def test_a_method_without_kernels_leaves_an_empty_file(config, tmp_path):
    folder, file = train(config(pos_emb="rotary", train_iters=2)), tmp_path / "kernels.jsonl"
    assert cli.eval_main(["--checkpoint", str(folder), "--only-kernels", str(file)]) == 0
    assert file.read_bytes() == b"" and read_kernels(file) == []


def test_another_tokenizer_is_refused(trained, tmp_path):
    tools.write_text(tmp_path / "text", fingerprint="tok-b")
    other = tools.tiny(tmp_path / "text", trained)
    with pytest.raises(
        DataError, match="prepared with tokenizer tok-b, the model was trained with"
    ):
        Evaluation(trained, Request((32,)), config=other)


def test_text_with_more_entries_than_the_model(trained, tmp_path, text):
    from data_prep.indexed import write_indexed

    shutil.copytree(text, tmp_path / "text")
    documents = [np.arange(100)]
    write_indexed(tmp_path / "text/valid", documents, vocab_size=100, sidecar={}, overwrite=True)
    with pytest.raises(DataError, match="token 99 is outside the model's vocabulary of 64"):
        Evaluation(trained, Request((32,)), config=tools.tiny(tmp_path / "text", trained))
    # A damaged file of 32 bits: torch would leave label -100 out of the loss, and find no row for the token.
    write_indexed(tmp_path / "text/valid", documents, vocab_size=70000, sidecar={}, overwrite=True)
    (tmp_path / "text/valid.json").unlink()
    ids = np.arange(100, dtype=np.int32) % 50
    ids[99] = -100
    ids.tofile(tmp_path / "text/valid.bin")
    with pytest.raises(DataError, match="token -100 is outside the model's vocabulary of 64"):
        Evaluation(trained, Request((32,)), config=tools.tiny(tmp_path / "text", trained))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--protocol", "sliding"],
        ["--protocol", "last"],
        ["--stride", "8"],
        ["--last-k", "8"],
        ["--protocol", "else"],
        ["--set", "seed=1"],
        ["--lengths", "0"],
        ["--protocol", "sliding", "--stride", "-5"],
        ["--batch-size", "0"],
        ["--max-tokens", "0"],
        ["--attention", "chunkd"],
        ["--device", "cuda:7"],
        ["--device", "tpu"],
        ["--attention-eps", "1"],
    ],
)
def test_questions_without_an_answer_end_with_2(trained, arguments, capsys):
    try:
        code = cli.eval_main(["--checkpoint", str(trained), *arguments])
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and len(shown.err.splitlines()) == 1


def test_scoring_a_window_needs_no_more_than_its_tokens(trained):
    evaluation = Evaluation(trained, Request((32,)))
    windows = Plan("nonoverlap", 65, (32,)).windows(32)
    result = score(evaluation.model, evaluation.text.tokens[:65], windows)
    assert result.tokens == 64 and len(result.windows) == 2
