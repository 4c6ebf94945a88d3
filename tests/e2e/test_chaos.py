"""A short stretch of chaos; the long one is `python -m tests.e2e.chaos --rounds 5`."""

import time

from tests.e2e.chaos import chaos_round


def test_streams_are_complete_whoever_is_killed() -> None:
    seed = int(time.time())
    assert chaos_round(12.0, 6, seed) == [], (
        f"again: python -m tests.e2e.chaos --seconds 12 --streams 6 --seed {seed}"
    )
