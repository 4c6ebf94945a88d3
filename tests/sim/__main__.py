"""`python -m tests.sim --seed N`: replays one seed, or runs many."""

import argparse
import sys
import time
from collections import Counter

from tests.sim.simulate import SimulationError, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--steps", type=int, default=5000, help="messages per seed")
    parser.add_argument("--audit-every", type=int, default=1, help="messages between two full audits")
    parser.add_argument("--verbose", action="store_true", help="print every event")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    failed = 0
    began = time.monotonic()
    for seed in range(options.seed, options.seed + options.seeds):
        try:
            total += simulate(seed, options.steps, options.audit_every, options.verbose)
        except SimulationError as error:
            failed += 1
            print(error)
    for name, count in sorted(total.items()):
        print(f"{count:10} {name}")
    print(f"{options.seeds - failed} of {options.seeds} seeds in {time.monotonic() - began:.1f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
