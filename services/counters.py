"""Counters and histograms of all frontends of a pool directory: one small mapped file per frontend.

A frontend adds to its own file; whichever of them answers `/metrics` adds up all files, so the figures are
the same on each. A frontend that is killed leaves its file, and its successor of the same name goes on with
it, so counters do not fall; a clean end removes it. A file is `[schema digest: 16 bytes][float64 …]`; one
of another schema is not read.
"""

import hashlib
import mmap
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HEADER: Final = 16


@dataclass(frozen=True)
class CounterSpec:
    """A counter; `values` are the values of its one label, or a single "" where it has none."""

    name: str
    help: str
    label: str = ""
    values: tuple[str, ...] = ("",)

    @property
    def width(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class HistogramSpec:
    """A histogram; `buckets` are upper bounds, the last one (+Inf) is implied. Slots: one per bucket, +Inf,
    sum.
    """

    name: str
    help: str
    buckets: tuple[float, ...]

    @property
    def width(self) -> int:
        return len(self.buckets) + 2


Spec = CounterSpec | HistogramSpec


class CounterFile:
    """The mapped file of the frontend `name` in `directory` (made where absent, mode 0700)."""

    def __init__(self, directory: Path, name: str, specs: Sequence[Spec]) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._path = directory / f"{name}.counters"
        self._digest = hashlib.sha256(repr(tuple(specs)).encode()).digest()[:_HEADER]
        self.start: dict[str, int] = {}
        size = 0
        for spec in specs:
            self.start[spec.name] = size
            size += spec.width
        self._bytes = _HEADER + 8 * size
        self._map = self._open()
        self._values = memoryview(self._map)[_HEADER:].cast("d")

    def _open(self) -> mmap.mmap:
        data = self._path.read_bytes() if self._path.exists() else b""
        if len(data) != self._bytes or data[:_HEADER] != self._digest:
            fresh = self._path.with_suffix(".new")
            fresh.write_bytes(self._digest + bytes(self._bytes - _HEADER))
            fresh.rename(self._path)
        with self._path.open("r+b") as file:
            return mmap.mmap(file.fileno(), self._bytes)

    def add(self, slot: int, amount: float) -> None:
        self._values[slot] += amount

    def observe(self, spec: HistogramSpec, value: float, times: int = 1) -> None:
        """Count `value` `times` times."""
        start = self.start[spec.name]
        self._values[start + bisect_left(spec.buckets, value)] += times
        self._values[start + len(spec.buckets) + 1] += value * times

    def totals(self) -> list[float]:
        """The sum over all frontends' files, slot by slot."""
        totals = list(self._values)
        for path in self._directory.glob("*.counters"):
            if path == self._path:
                continue
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                continue
            if len(data) == self._bytes and data[:_HEADER] == self._digest:
                totals = [
                    mine + other
                    for mine, other in zip(totals, memoryview(data)[_HEADER:].cast("d"), strict=True)
                ]
        return totals

    def close(self) -> None:
        """Remove the file: a clean end leaves nothing."""
        self._values.release()
        self._map.close()
        self._path.unlink(missing_ok=True)
