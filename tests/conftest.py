"""Fixtures that every test may use, and which cases of a test the normal run takes."""

import gc
import hashlib
import os
from collections import defaultdict
from collections.abc import Iterator

import hypothesis
import pytest

from tests.support.ranks import Ranks, spare_the_collector

os.environ["COLUMNS"] = "120"  # tables are as wide as the terminal


hypothesis.settings.register_profile("unhurried", deadline=None)  # an example takes longer on a busy machine
hypothesis.settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real gloo ranks, shared by the whole session; the first test that runs something on them starts them."""
    with Ranks() as pool:
        yield pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases beyond the `sample` of their test as slow: those that are kept are spread, and always the same."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") is not None and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_one_test in cases.values():
        sample = of_one_test[0].get_closest_marker("sample")
        assert sample is not None
        for item in sorted(of_one_test, key=_digest)[sample.args[0] :]:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    gc.collect()
    spare_the_collector()


def _digest(item: pytest.Item) -> bytes:
    return hashlib.blake2b(item.nodeid.encode(), digest_size=8).digest()
