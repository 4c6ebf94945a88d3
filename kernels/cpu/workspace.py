"""Scratch memory for kernels, kept from call to call so that no call pays for fresh pages."""

import threading

import torch


class Workspace(threading.local):
    """One buffer per calling thread; it grows to the largest size that was asked for and stays."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.address = 0
        self.size = 0

    def grow(self, size: int) -> None:
        """Make room for at least `size` bytes, on a 64-byte boundary; what was there is lost."""
        self.buffer = torch.empty(size + 63, dtype=torch.uint8)
        self.address = (self.buffer.data_ptr() + 63) // 64 * 64
        self.size = size


WORKSPACE = Workspace()
