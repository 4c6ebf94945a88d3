"""Scratch memory for kernels, kept from call to call so that no call pays for fresh pages."""

import threading

import torch

FIRST_SIZE = 4096  # bytes; holds the counters of the small kernels


class Workspace(threading.local):
    """One buffer per calling thread; it grows to the largest size that was asked for and stays."""

    def __init__(self) -> None:
        self.grow(FIRST_SIZE)

    def grow(self, size: int) -> None:
        """Make room for at least `size` bytes, on a 64-byte boundary; what was there is lost."""
        self.buffer = torch.empty(size + 63, dtype=torch.uint8)
        self.address = (self.buffer.data_ptr() + 63) // 64 * 64
        self.place = self.address, size  # both at once: looking up a thread's own costs


WORKSPACE = Workspace()
