"""The early-token table against a text whose losses are known token by token."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest
from analysis_rows import fields, make
from scipy import stats

from megatron_patches.analysis.early import early_table, pairs
from megatron_patches.analysis.layout import Table
from megatron_patches.analysis.rows import Row, RowError, append_rows
from megatron_patches.analysis.tables import check_whole_windows, relative_table

ROOT = Path(__file__).resolve().parents[2]
TARGETS = 2048  # scored side by side; the text has 77 more
STRIDE = 128


def loss_at(target: int, context: int, use: float, seed: int) -> float:
    """Early tokens are hard; with ``use`` more than 0, the model also gains from all its context."""
    return (
        2.0 + math.exp(-context / 50) - use * math.log2(1 + context) + 0.2 * math.sin(target * seed)
    )


def cell(protocol: str, length: int, seed: int, use: float, **changes: object) -> Row:
    if protocol == "nonoverlap":
        spans = [(start, start, start + length) for start in range(0, TARGETS, length)]
    else:
        spans, end = [(0, 0, length)], length
        while end < TARGETS + 77:
            new = min(end + STRIDE, TARGETS + 77)
            spans.append((new - length, end, new))
            end = new
    means = [
        math.fsum(loss_at(t, t - begin, use, seed) for t in range(first, stop)) / (stop - first)
        for begin, first, stop in spans
    ]
    counts = [stop - first for _, first, stop in spans]
    loss = math.fsum(m * c for m, c in zip(means, counts, strict=True)) / sum(counts)
    scores = {"loss": loss, "perplexity": math.exp(loss), "window_losses": means}
    sizes = {"tokens": sum(counts), "windows": len(spans), "data": f"text, {protocol}"}
    stride = {"stride": length if protocol == "nonoverlap" else STRIDE}
    common = {
        "protocol": protocol,
        "eval_length": length,
        "seed": seed,
        "config_sha": f"run {seed}",
    }
    return Row(**fields(**{**common, **scores, **sizes, **stride, **changes}))


def both(use: float, seeds: tuple[int, ...] = (1, 2), **changes: object) -> list[Row]:
    return [
        cell(protocol, length, seed, use, **changes)
        for protocol in ("nonoverlap", "sliding")
        for length in (256, 512, 1024)
        for seed in seeds
    ]


def test_losses_are_compared_over_the_same_targets() -> None:
    found, alone = pairs(both(0.01))
    assert alone == [] and len(found) == 6
    for pair in found:
        # Sliding: every target beyond the first window has at least length - stride of context.
        direct = math.fsum(loss_at(t, t, 0.01, pair.seed) for t in range(pair.length))
        start, end = pair.length, pair.length + STRIDE
        while end <= TARGETS:
            direct += math.fsum(
                loss_at(t, t - (end - pair.length), 0.01, pair.seed) for t in range(start, end)
            )
            start, end = end, end + STRIDE
        assert start == TARGETS
        assert pair.sliding == pytest.approx(direct / TARGETS, rel=1e-12)
        side = [loss_at(t, t % pair.length, 0.01, pair.seed) for t in range(TARGETS)]
        assert pair.side_by_side == pytest.approx(math.fsum(side) / TARGETS, rel=1e-12)


def test_a_model_that_uses_no_more_context_gains_nothing_under_sliding() -> None:
    table = early_table(both(0.0))
    lines = dict(table.rows)
    assert list(lines) == ["alibi, 256", "alibi, 512", "alibi, 1024"]
    side, sliding, effect, gain, kept, share = lines["alibi, 1024"]
    # sum of exp(-c / 50) over all c is 50.5: side by side once a window, sliding once for the text.
    early = 1 / (1 - math.exp(-1 / 50))
    assert effect.mean == pytest.approx((early / 1024) - early / 2048, abs=1e-3)
    assert gain.mean == pytest.approx(
        early / 512 - early / 1024, abs=1e-4
    )  # base: 512, trained there
    assert kept.mean == pytest.approx(0, abs=2e-3) and share.mean == pytest.approx(1, abs=0.04)
    assert side.mean > sliding.mean and side.seeds == 2 and side.std is not None
    assert [cell.text for cell in lines["alibi, 512"]][3:] == ["–"] * 3
    assert lines["alibi, 256"][3].mean < 0  # shorter than where it was trained
    assert any("stride 128" in line for line in table.header)
    assert any(line.startswith("dataset books, protocol sliding") for line in table.header)


def test_a_model_that_uses_context_keeps_its_gain() -> None:
    shares = [dict(early_table(both(use)).rows)["alibi, 1024"][5].mean for use in (0.0, 0.02, 0.2)]
    assert shares[0] > shares[1] > shares[2] and shares[2] < 0.5


def test_one_seed_and_no_gain() -> None:
    table = early_table(both(-0.05, seeds=(3,)))  # longer windows make it worse
    cells = dict(table.rows)["alibi, 1024"]
    assert cells[5].text == "–" and cells[5].marks == ("[1]",)
    assert table.notes[0].startswith("[1] no gain side by side")
    assert cells[0].spread == ""


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda r: r.protocol == "sliding" and {"split": "test"},
            r"differ in: split \(valid, test\)",
        ),
        (lambda r: r.protocol == "sliding" and {"tokenizer": "x"}, "differ in: tokenizer"),
        (lambda r: r.protocol == "sliding" and {"step": 200}, "differ in: step"),
        (lambda r: r.protocol == "sliding" and {"train_length": 256}, "differ in: train_length"),
        (
            lambda r: (r.protocol, r.eval_length) == ("sliding", 512) and {"data": "other"},
            r"differ in: data",
        ),
        (lambda r: (r.protocol, r.eval_length) == ("sliding", 512) and {"stride": 64}, "stride"),
    ],
)
def test_unlike_protocols_never_meet(spoil, message: str) -> None:
    rows = [dataclasses.replace(r, **(spoil(r) or {})) for r in both(0.0)]
    with pytest.raises(RowError, match=message):
        early_table(rows)


def test_another_text_is_noticed() -> None:
    rows = both(0.0)
    other = [r for r in both(0.1) if r.protocol == "sliding"]
    with pytest.raises(RowError, match="the first window has loss .* not the same text or weights"):
        early_table([r for r in rows if r.protocol == "nonoverlap"] + other)
    longer = [
        dataclasses.replace(r, tokens=r.tokens + 2000, windows=r.windows,
                            window_losses=r.window_losses)
        if r.protocol == "sliding" else r
        for r in rows
    ]  # fmt: skip
    with pytest.raises(RowError, match="2048 tokens side by side and 4125 sliding"):
        early_table(longer)
    odd = [dataclasses.replace(r, stride=100) if r.protocol == "sliding" else r for r in rows]
    with pytest.raises(RowError, match="stride 100 does not divide the 1792 tokens"):
        early_table(odd)
    with pytest.raises(RowError, match="no rows of protocol sliding"):
        early_table([r for r in rows if r.protocol == "nonoverlap"])


def test_cells_of_one_protocol_only_are_named() -> None:
    rows = [r for r in both(0.0) if (r.protocol, r.eval_length) != ("sliding", 1024)]
    table = early_table(rows)
    assert [label for label, _ in table.rows] == ["alibi, 256", "alibi, 512"]
    assert "under one protocol only: alibi, seed 1, 1024; alibi, seed 2, 1024" in table.notes
    # Other weights under the same name are no pair.
    moved = [
        dataclasses.replace(r, config_sha="other") if r.protocol == "sliding" else r for r in rows
    ]
    with pytest.raises(RowError, match=r"alibi, seed 1: results of two configurations \(run 1 and"):
        early_table(moved)
    apart = [r for r in both(0.0) if (r.protocol == "sliding") is (r.eval_length == 512)]
    with pytest.raises(RowError, match="no cell was scored under both"):
        early_table(apart)


def test_two_configurations_are_no_two_seeds() -> None:
    """Whether they meet at one length, or one of them has the training length, one the others."""
    one, other = both(0.01, (1,)), both(0.05, (1,), config_sha="other run")
    with pytest.raises(RowError, match=r"alibi, seed 1: results of two configurations \(run 1 and"):
        early_table([*one, *other])
    mixed = [r for r in one if r.eval_length == 512] + [r for r in other if r.eval_length != 512]
    with pytest.raises(RowError, match="results of two configurations"):
        early_table(mixed)


def unscored(method: str, length: int, seed: int, **changes: object) -> list[Row]:
    """A cell that was refused under both protocols."""
    return [
        make(method, seed, length, None, **{"protocol": protocol, "data": f"text, {protocol}",
             "stride": STRIDE if protocol == "sliding" else length, **changes})
        for protocol in ("nonoverlap", "sliding")
    ]  # fmt: skip


def test_what_was_refused_or_failed_has_its_line() -> None:
    out = {"status": "failed", "message": "out of memory", "config_sha": "run 3"}
    rows = [
        *both(0.0, seeds=(1, 2)),
        *(r for r in both(0.0, seeds=(3,)) if r.eval_length == 512),
        *unscored("alibi", 1024, 3, **out),
        *unscored("learned", 1024, 1),
        *unscored("rotary", 256, 1, **out | {"config_sha": "rotary1"})[1:],
    ]
    table = early_table(rows)
    lines = dict(table.rows)
    notes = dict(note.split(" ", 1) for note in table.notes if note.startswith("["))
    assert "mean ± standard deviation (n - 1) over 3 seeds" in table.header
    assert [cell.text for cell in lines["learned, 1024"]] == ["refused"] * 2 + ["–"] * 4
    assert [notes[m] for m in lines["learned, 1024"][0].marks] == ["refused: cannot read 1024"]
    assert [cell.text for cell in lines["rotary, 256"]] == ["–", "failed", *"––––"]
    (mark,) = lines["alibi, 1024"][0].marks
    assert notes[mark] == "2 of 3 seeds; failed: out of memory"
    assert lines["alibi, 512"][0].marks == () and lines["alibi, 512"][0].seeds == 3
    (mark,) = lines["alibi, 256"][0].marks
    assert notes[mark] == "2 of 3 seeds"


def gains(by_block: tuple[float, ...], kept: float, seeds: tuple[int, ...] = (1,)) -> Table:
    """A model whose loss falls by ``by_block`` from 512 to 1024 in each block of 1024 tokens."""
    rows = []
    for seed in seeds:
        for length, share in ((512, 0.0), (1024, 1.0)):
            losses = [3.0 - share * gain for gain in by_block for _ in range(1024 // length)]
            tiled = {"tokens": 1024 * len(by_block), "data": "text, nonoverlap"}
            mean = math.fsum(losses) / len(losses)
            rows.append(_row(length, seed, losses, mean, stride=length, **tiled))
            # Steps of 128 from there on; a first window as side by side.
            first, steps = losses[0], (tiled["tokens"] - length) // STRIDE
            target = mean + share * (math.fsum(by_block) / len(by_block) - kept)
            # One window of the whole text leaves no steps.
            rest = (tiled["tokens"] * target - length * first) / max(1, steps * STRIDE)
            slid = {"protocol": "sliding", "stride": STRIDE, "tokens": tiled["tokens"]}
            total = (length * first + steps * STRIDE * rest) / tiled["tokens"]
            rows.append(
                _row(length, seed, [first, *[rest] * steps], total, data="text, sliding", **slid)
            )
    return early_table(rows)


def _row(length: int, seed: int, losses: list[float], loss: float, **changes: object) -> Row:
    own = {"eval_length": length, "seed": seed, "config_sha": f"run {seed}", "loss": loss}
    scores = {"perplexity": math.exp(loss), "window_losses": losses, "windows": len(losses)}
    return Row(**fields(**{**own, **scores, **changes}))


def test_a_share_of_a_gain_within_noise_is_not_printed() -> None:
    """One seed: the spread over the blocks of text decides, by the t-interval of their gains."""
    clear, noisy = (0.10, 0.12, 0.11, 0.09), (0.30, -0.20, 0.25, -0.15)
    assert stats.ttest_1samp(clear, 0).pvalue < 0.05 < stats.ttest_1samp(noisy, 0).pvalue
    shown = dict(gains(clear, 0.042).rows)["alibi, 1024"]
    assert shown[3].mean == pytest.approx(0.105) and shown[4].mean == pytest.approx(0.042)
    assert shown[5].text == "60%" and shown[5].mean == pytest.approx(0.6)
    table = gains(noisy, -0.025)
    assert dict(table.rows)["alibi, 1024"][3].mean == pytest.approx(0.05)
    assert dict(table.rows)["alibi, 1024"][5].text == "–"  # not 150%
    assert any("no gain side by side beyond its noise" in note for note in table.notes)
    alone = gains((0.1,), 0.1)
    assert dict(alone.rows)["alibi, 1024"][5].text == "–"
    assert any("one seed and one block of text the gain has no error" in n for n in alone.notes)
    two = dict(gains((0.1,), 0.1, (1, 2)).rows)["alibi, 1024"]
    assert two[5].text == "0%" and two[3].seeds == 2


def test_published_figures_stand_beside_whole_windows_only() -> None:
    from megatron_patches.analysis.published import read_published
    from megatron_patches.analysis.tables import published_rows

    trend = published_rows(read_published(ROOT / "results" / "published.csv"), "Table 3", "github")
    rows = [r for r in both(0.0) if r.protocol == "sliding"]
    relative_table(rows)
    with pytest.raises(RowError, match="these rows are of protocol sliding"):
        relative_table(rows, trend)
    check_whole_windows([make("alibi", 1, 512, 20.0, protocol="paper")])


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_rows(path, both(0.0))
    command = [sys.executable, "-W", "error", "scripts/tables.py", str(path), "--table"]
    done = subprocess.run([*command, "early"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "### Early-token effect, books" in done.stdout and "| alibi, 1024 |" in done.stdout
    # Rows of other protocols and training lengths in the file are no reason to refuse.
    last = {"protocol": "last", "last_k": 256, "tokens": 512}
    append_rows(path, [make("alibi", 1, 512, 20.0, windows=2, window_losses=[math.log(20.0)] * 2,
                            **last)])  # fmt: skip
    append_rows(path, both(0.0, (1,), train_length=256, config_sha="shorter"))
    more = subprocess.run([*command, "early"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (more.returncode, more.stdout.count("### Early-token")) == (0, 2), more.stderr
    apart = subprocess.run(
        [*command, "extrapolation"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert apart.returncode == 0 and apart.stdout.count("### Perplexity by") == 5
    beside = [*command, "table3", "--published-dataset", "github", "--where", "protocol=sliding"]
    refused = subprocess.run(beside, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "these rows are of protocol sliding" in refused.stderr
