"""Choosing a token by one uniform number: inverse CDF, in token-id order, over what is kept of the whole.

Kept are, in this order: min_p (at least that share of the likeliest's probability), top_k (the k
likeliest), top_p (the fewest of the likeliest that hold that share of what is left by then). Of equal
probabilities the lower id counts as likelier. Instead of sorting the vocabulary, probabilities are counted
into bins by their leading bits (positive floats order as their bits do), and only the bin in which the cut
falls is sorted. The result is exact.
"""

from typing import Any

import numpy as np
from numba import njit

SHIFT = 18  # drops 18 of 23 mantissa bits: 32 bins per power of two
BINS = (0x3F800000 >> SHIFT) + 2  # probabilities are at most 1, give or take the last bit

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
DoubleArray = np.ndarray[Any, np.dtype[np.float64]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


@njit(cache=True, nogil=True)
def _cut(
    probs: FloatArray, floor: float, counts: IntArray, masses: DoubleArray, most: int, share: float
) -> tuple[float, int, float]:
    """Last kept (probability, id) and the kept mass, going down until `most` tokens or a mass of `share`.

    (0, size) if all that reach the floor are kept.
    """
    count, mass, bin_ = 0, 0.0, BINS
    while bin_ > 0:
        bin_ -= 1
        if counts[bin_] == 0:
            continue
        if count + counts[bin_] >= most or mass + masses[bin_] >= share:
            break
        count += counts[bin_]
        mass += masses[bin_]
    bits = probs.view(np.int32)
    ids = np.empty(max(counts[bin_], 1), np.int64)
    found = 0
    for token in range(probs.size):
        if bits[token] >> SHIFT == bin_ and probs[token] >= floor:
            ids[found] = token
            found += 1
    if not found:
        return 0.0, probs.size, mass
    ids = ids[:found]
    order = np.argsort(-probs[ids], kind="mergesort")  # stable: equal ones stay in id order
    last = 0
    for place in order:
        last = ids[place]
        count += 1
        mass += probs[last]
        if count >= most or mass >= share:
            break
    return probs[last], last, mass


@njit(cache=True, nogil=True)
def _choose(probs: FloatArray, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    floor: Any = np.float32(probs.max() * min_p)
    edge, edge_id, mass = 0.0, probs.size, 0.0
    limited = 0 < top_k < probs.size
    if limited or top_p < 1.0:
        counts, masses = np.zeros(BINS, np.int64), np.zeros(BINS, np.float64)
        bits = probs.view(np.int32)
        for token in range(probs.size):
            if probs[token] >= floor:
                bin_ = bits[token] >> SHIFT
                counts[bin_] += 1
                masses[bin_] += probs[token]
        most = top_k if limited else probs.size
        kept = masses.sum()
        if limited:
            edge, edge_id, kept = _cut(probs, floor, counts, masses, most, np.inf)
        mass = kept
        if top_p < 1.0:
            edge, edge_id, mass = _cut(probs, floor, counts, masses, most, kept * top_p)
    else:
        for token in range(probs.size):
            if probs[token] >= floor:
                mass += probs[token]
    goal, reached, last = uniform * mass, 0.0, 0
    edge = max(edge, floor)
    for token in range(probs.size):
        prob = probs[token]
        if prob > edge or (prob == edge and token <= edge_id and prob > 0.0):
            reached += prob
            last = token
            if reached > goal:
                break
    return last


@njit(cache=True, nogil=True)
def choose_rows(
    probs: FloatArray,
    top_k: IntArray,
    top_p: DoubleArray,
    min_p: DoubleArray,
    uniforms: DoubleArray,
    tokens: IntArray,
) -> None:
    """One token per row of `probs` `[rows, vocab]` into `tokens`; top_k 0, top_p 1, min_p 0 keep all."""
    for row in range(probs.shape[0]):
        tokens[row] = _choose(probs[row], top_k[row], top_p[row], min_p[row], uniforms[row])
