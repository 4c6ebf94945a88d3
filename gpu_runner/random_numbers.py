"""The random number of a token: a hash of (seed, choice, position), so that no state has to be kept or moved.

A sequence that is resumed, moved to another runner or run beside others draws the same numbers. The hash is
the finaliser of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA
2014), applied once per word.
"""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(word: int) -> int:
    word = (word + _GOLDEN) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. `position` is the token's index in the choice's output."""
    return (_mix(_mix(_mix(seed & _MASK) ^ choice) ^ position) >> 11) * 2.0**-53
