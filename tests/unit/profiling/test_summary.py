"""What operators cost by themselves, and the summary of a profile."""

from __future__ import annotations

from hvd_train.profiling.summary import Cost, costs, summary
from hvd_train.profiling.trace import Span


def test_an_operator_costs_what_it_does_itself() -> None:
    """What an operator calls is not counted twice, over several threads; where a GPU works, its kernels count."""
    spans = [
        Span("outer", 0, 10_000_000, "main"),
        Span("inner", 1_000_000, 4_000_000, "main"),
        Span("inner", 4_000_000, 6_000_000, "main"),
        Span("outer", 0, 1_000_000, "other"),
    ]
    assert costs(spans) == [Cost("outer", 6.0, 2), Cost("inner", 5.0, 2)]
    assert costs([*spans, Span("kernel", 0, 500_000, "GPU 0", on_gpu=True)]) == [Cost("kernel", 0.5, 1)]


def test_the_summary_says_what_the_exposed_reduction_waits_for() -> None:
    """Shares of what Horovod does count while the step waits, and once where tensors overlap."""
    milli = 1_000_000
    steps = [Span("step 7", 0, 100 * milli), Span("step 8", 100 * milli, 200 * milli)]
    phases = [
        Span("forward", 0, 80 * milli),
        Span("reduction", 80 * milli, 90 * milli),
        Span("reduction", 170 * milli, 200 * milli),
    ]
    horovod = [
        Span("ALLREDUCE", 70 * milli, 85 * milli, "bias"),
        Span("ALLREDUCE", 75 * milli, 85 * milli, "weight"),
        Span("NEGOTIATE_ALLREDUCE", 160 * milli, 185 * milli, "bias"),
    ]
    *lines, exposed = summary(steps, phases, [Cost("mm", 50.0, 4)], horovod)
    assert [" ".join(line.split()) for line in lines] == [
        "phase ms a step share",
        "forward 40.00 40.0%",
        "reduction 20.00 20.0%",
        "the 10 largest costs total ms share calls",
        "mm 50.00 25.0% 4",
    ]
    assert exposed.strip() == (
        "exposed reduction: 20.00 ms a step (20.0%), longest in step 8 (30.00 ms, until bias); "
        "meanwhile in Horovod: NEGOTIATE_ALLREDUCE 38%, ALLREDUCE 12%"
    )


def test_a_summary_of_one_rank_has_no_line_about_horovod() -> None:
    """Without a reduction nothing waits for one."""
    steps = [Span("step 1", 0, 10_000_000)]
    *_, exposed = summary(steps, [Span("forward", 0, 10_000_000)], [], [])
    assert exposed.strip() == "exposed reduction: 0.00 ms a step (0.0%)"
