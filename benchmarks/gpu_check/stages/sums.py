"""Whether sums over the ranks are right. With a wrong one nothing else is worth a look: it ends the whole check."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.gpu_check.findings import Failed, Finding, Seen, checked
from benchmarks.gpu_check.site import Site

SIZES = ("5", "10007", "3000017")  # odd, so that tensors in a buffer begin at odd places


def checks(site: Site) -> Iterator[Finding]:
    """Sum on every number of ranks that the other stages train with."""
    for ranks in site.worlds():
        yield checked(f"{ranks} rank{'s' * (ranks > 1)}", partial(right, site, ranks))


def right(site: Site, ranks: int) -> Seen:
    """Check that all ranks have the exact sums and averages."""
    sizes = ("5", "1003", "70001") if site.short else SIZES
    seen = site.job("sums", ranks, *sizes, limit_s=180)
    wrong = [text for one in seen for text in one["wrong"]]
    if wrong:
        raise Failed(f"{len(wrong)} wrong, the first: {wrong[0]}")
    if len(seen) != ranks:
        raise Failed(f"{len(seen)} of {ranks} ranks have answered")
    tried = seen[0]["tried"]
    return f"{tried} tensors of fp16, bf16 and fp32 in groups, exact on every rank, batched copies on and off", {}
