"""Every test of the fuzzer runs on one thread, without warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """DTensor warns of every gather that simulated ranks make."""
    logging.disable(logging.WARNING)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    logging.disable(logging.NOTSET)
