"""Which targets a protocol scores, against counting them one by one."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_patches.standalone.windows import Plan, Window, batches


def targets(windows: list[Window]) -> Counter[int]:
    """How often each target of the text is scored."""
    return Counter(
        window.start + position
        for window in windows
        for position in range(window.score_from, window.length)
    )


def assert_inside(windows: list[Window], tokens: int) -> None:
    for window in windows:
        assert window.start >= 0 and window.start + window.length + 1 <= tokens
        assert 0 <= window.score_from < window.length
        assert window.scored == window.length - window.score_from


@pytest.mark.parametrize("stride", [512, 256, 100, 1])
@pytest.mark.parametrize("tokens", [513, 514, 640, 768, 769, 1025, 1100])
def test_sliding_scores_every_target_once(tokens, stride):
    plan = Plan("sliding", tokens, (512, 256 if stride <= 256 else 512), stride)
    for length in plan.lengths:
        windows = plan.windows(length)
        assert_inside(windows, tokens)
        assert targets(windows) == Counter(range(tokens - 1))
        # The first window has no past; later ones give each target at least length - stride of it.
        assert all(window.score_from >= length - stride for window in windows[1:])
        assert windows[0] == Window(0, length, 0) and plan.stride_at(length) == stride


@pytest.mark.parametrize("tokens", [65, 200, 1025, 1100])
@pytest.mark.parametrize("last_k", [1, 16, 32])
@pytest.mark.parametrize("stride", [None, 32, 40, 64])
def test_last_scores_the_same_targets_at_all_lengths(tokens, last_k, stride):
    plan = Plan("last", tokens, (32, 64, 48), stride, last_k)
    found = [targets(plan.windows(length)) for length in plan.lengths]
    assert found[0] == found[1] == found[2] and set(found[0].values()) == {1}
    for length in plan.lengths:
        assert_inside(plan.windows(length), tokens)
        assert len(plan.windows(length)) == (tokens - 1 - 64) // (stride or 64) + 1
        assert all(window.scored == last_k for window in plan.windows(length))


@pytest.mark.parametrize("protocol", ["nonoverlap", "position"])
@pytest.mark.parametrize("tokens", [1025, 1026, 2048, 5000])
def test_windows_side_by_side_score_the_same_targets(protocol, tokens):
    plan = Plan(protocol, tokens, (64, 128, 1024))
    wanted = Counter(range((tokens - 1) // 1024 * 1024))
    for length in plan.lengths:
        assert_inside(plan.windows(length), tokens)
        assert targets(plan.windows(length)) == wanted
        assert plan.stride_at(length) == length


def test_a_length_that_does_not_divide_scores_a_little_less():
    plan = Plan("nonoverlap", 2049, (1024, 100))
    assert targets(plan.windows(100)) == Counter(range(2000))


def test_lengths_that_the_text_cannot_fill():
    plan = Plan("nonoverlap", 300, (64, 256, 512))
    assert plan.longest == 256
    assert targets(plan.windows(64)) == targets(plan.windows(256)) == Counter(range(256))
    with pytest.raises(ValueError, match="the text has 300 tokens, a window of 512 needs 513"):
        plan.windows(512)
    assert len(Plan("nonoverlap", 257, (256,)).windows(256)) == 1
    with pytest.raises(ValueError, match="has 256 tokens"):
        Plan("nonoverlap", 256, (256,)).windows(256)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sliding", 100, (8,)), "needs --stride"),
        (("last", 100, (8,)), "needs --last-k"),
        (
            ("nonoverlap", 100, (8,), 4),
            "--stride belongs to protocol sliding, last, not to nono",
        ),
        (("position", 100, (8,), 4), "--stride belongs to protocol sliding, last, not to pos"),
        (("paper", 100, (8,)), "draws its windows"),
        (("sliding", 100, (8,), 4, 2), "--last-k belongs to protocol last"),
        (("last", 100, (8,), 3, 4), "--stride 3 is less than --last-k 4.* more than once"),
        (("other", 100, (8,)), "'other' is none of"),
        (("nonoverlap", 100, ()), "lengths must be positive"),
        (("nonoverlap", 100, (8, 0)), "lengths must be positive"),
    ],
)
def test_questions_without_an_answer(arguments, message):
    with pytest.raises(ValueError, match=message):
        Plan(*arguments)


def test_strides_and_ends_that_skip_targets():
    with pytest.raises(ValueError, match="--stride 16 would skip targets of windows of 8"):
        Plan("sliding", 100, (8,), 16).windows(8)
    with pytest.raises(ValueError, match="--last-k 9 is more than the window of 8"):
        Plan("last", 100, (8, 32), None, 9).windows(8)


def test_batches_keep_order_and_start():
    windows = Plan("sliding", 100, (32,), 10).windows(32)
    groups = list(batches(windows, 3))
    assert [window for group in groups for window in group] == windows
    assert all(len(group) <= 3 for group in groups) and len(groups[0]) == 1
    assert all(len({window.score_from for window in group}) == 1 for group in groups)
