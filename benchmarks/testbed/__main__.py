"""The experiments on two hosts and a slow link.  `make bench` runs them all; what is done is not done again.

sudo python -m benchmarks.testbed [agreement] [nonuniform] [slow-rank] [host-lost] [--turns 5] ...
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.testbed import agreement, host_lost, nonuniform, slow_rank
from benchmarks.testbed.measure import NUM_TURNS
from benchmarks.testbed.progress import Progress
from benchmarks.testbed.report import write_agreement, write_nonuniform, write_slow_rank
from specs.errors import PlaitError

EXPERIMENTS = ("agreement", "nonuniform", "slow-rank", "host-lost")
RESULTS = Path(__file__).resolve().parents[1] / "results"


def main() -> None:
    """Run what is named, all without a name; tables go to the screen and to benchmarks/results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.testbed", description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="*", metavar="experiment", help=", ".join(EXPERIMENTS))
    parser.add_argument("--turns", type=int, default=NUM_TURNS, help="times that every plan is run")
    parser.add_argument("--ranks", default="2,4", help="for agreement: ranks over the two hosts")
    parser.add_argument("--rates", default="0.2,1,5,none", help="for agreement: Gbit/s of the hosts' cables")
    parser.add_argument("--out", type=Path, default=Path("build/testbed"), help="profiles, plans, logs, every step")
    parser.add_argument("--results", type=Path, default=RESULTS, help="tables and pictures")
    options = parser.parse_args()
    unknown = set(options.experiments) - set(EXPERIMENTS)
    if unknown:
        parser.error(f"unknown experiment {sorted(unknown)[0]!r}; there are {', '.join(EXPERIMENTS)}")
    wanted = options.experiments or EXPERIMENTS
    out, progress = options.out.resolve(), Progress()
    options.results.mkdir(parents=True, exist_ok=True)
    if "agreement" in wanted:
        cases = [
            agreement.Case(int(ranks), None if rate == "none" else float(rate))
            for ranks in options.ranks.split(",")
            for rate in options.rates.split(",")
        ]
        found = [
            agreement.run_case(
                case, out / case.name.replace(" ", "-").replace("/", "p"), progress, num_turns=options.turns
            )
            for case in cases
        ]
        print(write_agreement(found, options.results))
    if "nonuniform" in wanted:
        outcomes = [
            nonuniform.run_case(case, out / case.name.replace(" ", "-"), progress, num_turns=options.turns)
            for case in nonuniform.cases()
        ]
        print(write_nonuniform(outcomes, options.results))
    if "slow-rank" in wanted:
        print(write_slow_rank(slow_rank.run(out / "slow-rank", progress, num_turns=options.turns), options.results))
    if "host-lost" in wanted:
        print(host_lost.run(out / "host-lost", options.results, progress, num_turns=options.turns))


if __name__ == "__main__":
    try:
        main()
    except PlaitError as error:
        print(f"testbed: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("testbed: interrupted; the hosts are removed, what was measured is kept.", file=sys.stderr)
        sys.exit(130)
