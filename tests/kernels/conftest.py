"""The backends under test."""

import pytest

from kernels.backends import Ops, load


@pytest.fixture(scope="session")
def reference() -> Ops:
    """The definition, in checked mode: it also vouches for the inputs of every test."""
    return load("reference", checked=True)


@pytest.fixture(scope="session")
def cpu() -> Ops:
    return load("cpu", checked=True)
