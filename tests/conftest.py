"""Fixtures that every test may use."""

from collections.abc import Iterator

import pytest

from tests.support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real gloo ranks, shared by the whole session; the first test that runs something on them starts them."""
    with Ranks() as pool:
        yield pool
