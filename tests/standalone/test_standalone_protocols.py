"""What `sliding` and `--window` mean, against their definitions token by token in float64."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
import torch

from megatron_patches import positions
from megatron_patches.analysis.aggregate import collect, series_label
from megatron_patches.analysis.rows import read_rows
from megatron_patches.config import ConfigError
from megatron_patches.standalone import cli, load_model
from megatron_patches.standalone.evaluate import Evaluation, Request
from megatron_patches.standalone.scoring import score
from megatron_patches.standalone.train import train
from megatron_patches.standalone.windows import Plan


def target_loss(model, tokens, start: int, target: int) -> float:
    """Nats of token `target + 1` from tokens `start` to `target`, alone in a forward pass."""
    ids = torch.from_numpy(tokens[start : target + 2].astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None, :-1])[0, -1]
    return -logits.double().log_softmax(-1)[ids[-1]].item()


@pytest.fixture(scope="module")
def exact(trained):
    return load_model(trained, dtype=torch.float64)


@pytest.mark.parametrize(
    ("length", "stride", "count"),
    [
        *((16, 1, 17), (16, 1, 18), (16, 1, 60), (16, 3, 60), (16, 5, 33), (16, 15, 47)),
        *((16, 16, 49), (16, 16, 55), (7, 1, 30), (1, 1, 9)),
    ],
)
def test_every_target_has_the_past_that_sliding_promises(trained, exact, length, stride, count):
    tokens = Evaluation(trained, Request((32,))).text.tokens[:count]
    wanted = []
    for target in range(count - 1):
        # The first window, or the first of those that end at length + n * stride (or the text's end)
        # and reach this target.
        steps = max(0, math.ceil((target + 1 - length) / stride))
        end = min(length + steps * stride, count - 1)
        wanted.append(target_loss(exact, tokens, end - length, target))
    windows = Plan("sliding", count, (length,), stride).windows(length)
    found = score(exact, tokens, windows)
    assert found.tokens == count - 1
    assert found.loss == pytest.approx(np.mean(wanted), rel=1e-5)
    edges = np.cumsum([0, *found.counts])
    means = [np.mean(wanted[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    np.testing.assert_allclose(found.windows, means, rtol=1e-5)


def test_logits_exist_for_new_targets_only(trained, monkeypatch):
    model = load_model(trained)
    tokens = Evaluation(trained, Request((32,))).text.tokens
    made = []
    original = model.logits
    monkeypatch.setattr(model, "logits", lambda x: made.append(x.shape[:2].numel()) or original(x))
    windows = Plan("sliding", 200, (64,), 1).windows(64)
    score(model, tokens[:200], windows)
    assert sum(made) == 199


@pytest.mark.parametrize("method", positions.names())
def test_a_window_hides_what_is_farther_than_it(method, config):
    """With one layer, W keys before a query are all that its loss can depend on."""
    # Drawn distances not so wide that only the nearest keys count.
    near = {"position_options": {"span": 64}} if "span" in positions.options(method) else {}
    changes = {"num_layers": 1, "train_iters": 2, "max_position_embeddings": 64, **near}
    folder = train(config(pos_emb=method, **changes))
    width, length = 9, 40
    tokens = Evaluation(folder, Request((32,))).text.tokens
    windowed = load_model(folder, dtype=torch.float64, window=width)
    assert windowed.shape.window == width + 1  # NeoX's width leaves out the query's own key
    ids = torch.from_numpy(tokens[: length + 1].astype(np.int64))[None]
    found = windowed.token_losses(ids[:, :-1], ids[:, 1:])[0]
    whole = load_model(folder, dtype=torch.float64)
    method = whole.position_method
    if method.place == "embedding" or method.follows_length:  # where a token stands matters, too
        hidden = ids.clone()
        hidden[0, : length - width - 1] = 1 + hidden[0, : length - width - 1] % 7
        again = windowed.token_losses(hidden[:, :-1], hidden[:, 1:])[0]
        assert again[-1] == pytest.approx(found[-1].item(), rel=1e-6)
        hidden[0, length - width - 1] = 1 + hidden[0, length - width - 1] % 7
        again = windowed.token_losses(hidden[:, :-1], hidden[:, 1:])[0]
        assert abs(again[-1].item() - found[-1].item()) > 1e-7
        return
    wanted = [target_loss(whole, tokens, max(0, t - width), t) for t in range(length)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    plain = whole.token_losses(ids[:, :-1], ids[:, 1:])[0]
    assert (plain[: width + 1] - found[: width + 1]).abs().max() < 1e-6


@pytest.mark.parametrize("method", ["xpos", "kerple_log", "none"])
def test_blocks_hide_what_is_before_the_block_before(method, config):
    """With one layer, a loss depends on its block and the one before: a text that begins there gives it."""
    folder = train(config(pos_emb=method, num_layers=1, train_iters=2))
    block, length = 7, 40
    tokens = Evaluation(folder, Request((32,))).text.tokens
    blocked = load_model(folder, dtype=torch.float64, window=f"blockwise:{block}")
    assert blocked.shape.window == ("blockwise", block)
    ids = torch.from_numpy(tokens[: length + 1].astype(np.int64))[None]
    found = blocked.token_losses(ids[:, :-1], ids[:, 1:])[0]
    whole = load_model(folder, dtype=torch.float64)
    starts = [max(0, (t // block - 1) * block) for t in range(length)]
    wanted = [target_loss(whole, tokens, start, t) for t, start in enumerate(starts)]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for wrong in ("blockwise:0", "blockwise", "7", 0, True):
        with pytest.raises(
            ConfigError, match="must be a number of tokens, at least 1, or blockwise"
        ):
            load_model(folder, window=wrong)


@pytest.mark.parametrize("trained", [None, 4])
def test_a_blockwise_row_is_a_line_of_its_own(config, tmp_path, trained):
    folder = train(config(pos_emb="alibi", train_iters=2, sliding_window_width=trained))
    output = tmp_path / "rows.jsonl"
    command = ["--checkpoint", str(folder), "--lengths", "16", "64", "--protocol", "position"]
    for window in ("8", "blockwise:8", "blockwise:100"):
        for _ in range(2):
            words = ["--window", window, "--output", str(output), "--resume"]
            assert cli.eval_main([*command, *words]) == 0
    rows = read_rows(output)
    assert [row.options["sliding_window_width"] for row in rows[::2]] == [
        *(8, "blockwise:8", "blockwise:100"),
    ]
    assert len(rows) == 6 and series_label(rows[3]) == "alibi, window blockwise:8"
    assert len(collect(rows)) == 3 and len({row.loss for row in rows[1::2]}) == 3
    whole = load_model(folder, window=1000)
    assert whole.shape.window == 1001  # blocks replace the window that the model was trained with
    again = Evaluation(folder, Request((64,), "position", window=1000)).row(64)
    assert again.loss == pytest.approx(rows[5].loss, rel=1e-6)


@pytest.mark.parametrize("window", ["0", "blockwise:", "blockwise:-3", "8x"])
def test_windows_that_cannot_be(trained, window, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.eval_main(["--checkpoint", str(trained), "--window", window])
    assert stop.value.code == 2 and "or blockwise: and the tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [[], ["--protocol", "position"], ["--protocol", "paper", "--paper-windows", "6"]],
    ids=["nonoverlap", "position", "paper"],
)
def test_a_windowed_row_is_a_line_of_its_own(trained, tmp_path, words):
    output = tmp_path / "rows.jsonl"
    command = ["--checkpoint", str(trained), "--lengths", "16", "64", *words]
    for window in ([], ["--window", "16"], ["--window", "4"]):
        assert cli.eval_main([*command, *window, "--output", str(output), "--resume"]) == 0
        assert cli.eval_main([*command, *window, "--output", str(output), "--resume"]) == 0
    rows = read_rows(output)
    assert len(rows) == 6 and len({row.data for row in rows}) == 1
    assert [row.options for row in rows[::2]] == [
        {},
        {"sliding_window_width": 16},
        {"sliding_window_width": 4},
    ]
    assert len(collect(rows)) == 3 and "window 4" in series_label(rows[-1])
    by_window = {row.options.get("sliding_window_width"): row for row in rows[1::2]}
    short = {row.options.get("sliding_window_width"): row for row in rows[::2]}
    assert short[16].window_losses == pytest.approx(short[None].window_losses, rel=1e-6)
    assert len({by_window[width].loss for width in (None, 16, 4)}) == 3


def test_keys_of_the_configuration_are_used_with_its_protocol(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    keys = "eval_protocol: paper\neval_paper_windows: 5\neval_window: 4\n"
    config = folder / "config.yml"
    config.write_text(config.read_text() + keys)
    command = ["--checkpoint", str(folder), "--lengths", "16", "--output", str(tmp_path / "rows")]
    assert cli.eval_main(command) == 0
    assert cli.eval_main([*command, "--window", "7", "--protocol", "nonoverlap"]) == 0
    assert cli.eval_main([*command, "--paper-windows", "3"]) == 0
    rows = read_rows(tmp_path / "rows")
    assert [row.options["sliding_window_width"] for row in rows] == [4, 7, 4]
    assert [row.windows for row in rows] == [5, 43, 3]


def test_the_key_for_blocks(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    config = folder / "config.yml"
    config.write_text(config.read_text() + "eval_block: 5\n")
    command = ["--checkpoint", str(folder), "--lengths", "16", "--output", str(tmp_path / "rows")]
    assert cli.eval_main(command) == cli.eval_main([*command, "--window", "7"]) == 0
    rows = read_rows(tmp_path / "rows")
    assert [row.options["sliding_window_width"] for row in rows] == ["blockwise:5", 7]
    config.write_text(config.read_text() + "eval_window: 5\n")
    assert cli.eval_main(command) == 2


def test_settings_that_a_protocol_lacks(trained):
    with pytest.raises(ValueError, match="protocol sliding needs --stride"):
        Request((8,), "sliding")
    with pytest.raises(ValueError, match="--last-k belongs to protocol last"):
        Request((8,), "paper", last_k=3)
    with pytest.raises(ConfigError, match="lengths must be positive"):
        Evaluation(trained, Request((0,)))
