"""One served stack (float32, two runners, two frontends) for the tests that do not break it."""

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server


@pytest.fixture(scope="package")
def served() -> Iterator[Server]:
    with Server(runners=2, frontends=2) as server:
        yield server
