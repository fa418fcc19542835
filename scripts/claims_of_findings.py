"""What the sentences of docs/findings.md say in numbers, for claims.py."""

from __future__ import annotations

import statistics

from claims import Claim
from claims_rows import (
    BACK,
    BLOCKS,
    BLOCKWISE,
    FAR,
    FIRST_TWO,
    LENGTHS,
    SEEDS,
    THIRD,
    above,
    again,
    at_most,
    farther,
    gain,
    interval,
    nats,
    others,
    ppl,
    published,
    right,
    rise,
    span,
    train_loss,
    with_window,
    words,
)

CLAIMS = (
    Claim(
        "ALiBi is {:.0%} behind KERPLE-log at the training length already, where the paper has it behind "
        "by no more than {:.0%} (at 8192 tokens {:.0%} here, {:.0f} to {:.0%} there)",
        lambda: (
            above("alibi", "kerple_log", 512),
            max(published(512)),
            above("alibi", "kerple_log", 8192),
            100 * min(published(8192)),
            max(published(8192)),
        ),
    ),
    Claim(
        "KERPLE-power is ahead of KERPLE-log by {:.2f} to {:.2f} nats a token and ALiBi behind it by "
        "{:.2f} to {:.2f}, at all lengths",
        lambda: (
            *span(-statistics.mean(nats("kerple_power", "kerple_log", n)) for n in LENGTHS),
            *span(statistics.mean(nats("alibi", "kerple_log", n)) for n in LENGTHS),
        ),
    ),
    Claim(
        "a loss of {:.2f} nats under sliding windows",
        lambda: (rise("rpe", 2048, "cpu_mini_early", sliding=True),),
    ),
    Claim(
        "What rotary loses is {} to {} times as much there",
        lambda: tuple(
            words(
                rise("rotary", n, "cpu_mini_early", sliding=True)
                / rise("rotary", n, "cpu_mini_early")
            )
            for n in (2048, 1024)
        ),
    ),
    Claim(
        "ALiBi and KERPLE-power do the same to {} nats",
        lambda: (
            at_most(
                (
                    x
                    for m in ("alibi", "kerple_power")
                    for n in (4096, FAR)
                    for x in with_window(m, n)
                ),
                4,
            ),
        ),
    ),
    Claim(
        "better with the window, by {:.3f} nats at 16384 ({:.3f} to {:.3f} over seeds), T5 by {:.2f}, "
        "rotary by more than a nat",
        lambda: (
            -statistics.mean(with_window("kerple_log")),
            *interval([-x for x in with_window("kerple_log")]),
            -statistics.mean(with_window("rpe")),
        ),
    ),
    Claim(
        "ALiBi and KERPLE-power stay within {:.1%} of where they were at 16,384 tokens; KERPLE-log rises by "
        "{:.1f} and {:.1%}",
        lambda: (
            at_most(
                [
                    *(farther(m, seed) for m in ("alibi", "kerple_power") for seed in SEEDS),
                    *map(farther, ("fox", "ggd_bam", "cable", "stick_breaking")),
                ],
                3,
            ),
            100 * farther("kerple_log", FIRST_TWO[0]),
            farther("kerple_log", FIRST_TWO[1]),
        ),
    ),
    Claim(
        "the one that has learned to copy (below), rises by {:.1%}. Scalable softmax rises by {:.1%}, "
        "Sandwich by {:.0%}, FIRE by {:.0%}, and CoPE by {:.0%}",
        lambda: [
            farther(method) for method in ("dape", "ggd_bam_ssmax", "sandwich", "fire", "cope")
        ],
    ),
    Claim(
        "have the loss of their first models there within {} nats, DAPE's within {} and CABLE's within {}",
        lambda: (
            at_most(again(but=("dape", "cable")), 4),
            at_most(again("dape"), 3),
            at_most(again("cable"), 3),
        ),
    ),
    Claim(
        "ends within {:.1%} of it",
        lambda: (above(f"rotary, {BLOCKWISE}", "alibi", FAR, *BLOCKS),),
    ),
    Claim(
        "KERPLE-log does {:.1%} better with it at 16,384 tokens",
        lambda: (-above(f"kerple_log, {BLOCKWISE}", "kerple_log", FAR, *BLOCKS),),
    ),
    Claim(
        "level with KERPLE-power with two seeds ({:.1%} below it and {:.1%} above, at 16,384 tokens) and "
        "{:.0%} below it with the third",
        lambda: [
            sign * above("dape", "kerple_power", FAR, seed=seed)
            for sign, seed in zip((-1, 1, -1), SEEDS, strict=True)
        ],
    ),
    Claim(
        "the training loss falls once more, from {:.1f} to {:.1f} between steps 1,450 and 1,540",
        lambda: [train_loss("dape", THIRD, step) for step in (1450, 1540)],
    ),
    Claim(
        "FoX ends {:.1%} and GGD-BAM {:.1%} above",
        lambda: [above(method, "kerple_power", FAR) for method in ("fox", "ggd_bam")],
    ),
    Claim(
        "ahead of KERPLE-log in every seed, by {:.2f} to {:.2f} nats at 16,384 tokens",
        lambda: span(-x for x in nats("fox", "kerple_log", FAR)),
    ),
    Claim(
        "GGD-BAM starts as ALiBi does and leaves it {:.0%} behind",
        lambda: (-above("ggd_bam", "alibi", FAR),),
    ),
    Claim(
        "Scalable softmax makes it worse with two seeds, by {:.0%} at 512 tokens and {:.0%} at 16,384, and "
        "with the third {:.0%} better at 512 tokens",
        lambda: (
            *(
                statistics.mean(above("ggd_bam_ssmax", "ggd_bam", n, seed=s) for s in FIRST_TWO)
                for n in (512, FAR)
            ),
            -above("ggd_bam_ssmax", "ggd_bam", 512, seed=THIRD),
        ),
    ),
    Claim(
        "then rises, by {:.0%} at 16,384 tokens",
        lambda: (ppl("fire", FAR) / ppl("fire", 512) - 1,),
    ),
    Claim(
        "Rotary with drawn places is {:.0%} worse at 512 tokens than without",
        lambda: (above("randomised_rotary", "rotary", 512),),
    ),
    Claim(
        "is {:.0%} worse with drawn distances",
        lambda: (above("randomised_kerple_log", "kerple_log", 512),),
    ),
    Claim(
        "takes {:.1f} nats off the loss of each token in its training length, of random tokens as of text. "
        "Of the others scalable softmax gains {:.1f}, and none more than {}",
        lambda: (
            gain("dape", "random", 512, THIRD),
            gain("ggd_bam_ssmax", "random", 512, THIRD),
            at_most(
                (
                    gain(method, source, 512, THIRD)
                    for method in others("dape", "ggd_bam_ssmax")
                    for source in ("random", "text")
                ),
                2,
            ),
        ),
    ),
    Claim(
        "from {:.2f} nats at 512 tokens to {:.2f} at 4,096",
        lambda: [gain("dape", "random", n, THIRD, BACK) for n in (512, 4096)],
    ),
    Claim(
        "of random tokens {:.0f} in 100 are the likeliest, of the digits of a passkey one in {}",
        lambda: (
            100 * right("dape", "random", 512, THIRD),
            words(1 / right("dape", "digits", 512, THIRD)),
        ),
    ),
    Claim(
        "The third run of scalable softmax, {:.0%} better than the other two at 512 tokens, has learned some "
        "of the same: {} times the gain of FoX",
        lambda: (
            1
            - ppl("ggd_bam_ssmax", 512, seed=THIRD)
            / statistics.mean(ppl("ggd_bam_ssmax", 512, seed=seed) for seed in FIRST_TWO),
            words(gain("ggd_bam_ssmax", "random", 512, THIRD) / gain("fox", "random", 512, THIRD)),
        ),
    ),
)

# Numbers that are no results: settings of the study, lengths and seeds, places in papers.
CONSTANTS = (
    r"\b(128|256|512|1,?024|2,?048|4,?096|8,?192|16,?384|65,?536)\b",
    r"\b131,072 held-out tokens",
    r"\b123[456]\b",
    r"0\.86M parameters \(3 layers, 128 wide, 4 heads\), a BPE of 1024 entries, 2,000 steps of 2,048 tokens",
    r"Adam at 3e-3",
    r"Table 3 shows at 162M parameters",
    r"\b32 times the training length",
    r"leave out 0\b",
    r"Figures 5 and 7",
    r"reach 1,536 tokens back",
    r"a difference under 0",
    r"beyond 32,695 tokens",
    r"stretched by 8\b",
    r"the interval over them holds 0\b",
    r"a stretch of 24 tokens [^.]* first 8 tokens, and the other 16",
    r"fallen by more than 2\b",
)
