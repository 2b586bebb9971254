"""Where unlike degrees pay and where they do not: one planned example for each case, with its number.

    python -m benchmarks.where_it_pays [--time-limit 30] [NAME ...]

Only what comes on top of uneven stages and recomputation per module is credited to unlike degrees.  Costs are those of
shipped device data (estimates).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from benchmarks.where_it_pays.cases import CASES, show_caps, show_case
from benchmarks.where_it_pays.damaged import show_damaged, show_replicas
from benchmarks.where_it_pays.encoders import PAIRS, show_pair
from benchmarks.where_it_pays.last_stage import show_last_stage


def examples() -> dict[str, Callable[[float], None]]:
    """By name, what shows an example within so many seconds a search."""
    found: dict[str, Callable[[float], None]] = {case.name: partial(show_case, case) for case in CASES}
    found |= {pair.name: partial(show_pair, pair) for pair in PAIRS}
    return {
        **found,
        "last-stage": show_last_stage,
        "damaged-domain": lambda _: show_damaged(),
        "reduced-replicas": show_replicas,
        "caps": show_caps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = examples()
    parser.add_argument("names", nargs="*", help=f"default: all of {', '.join(known)}")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds per search")
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(known))
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}")
    for name in given.names or known:
        known[name](given.time_limit)


if __name__ == "__main__":
    main()
