"""Sends of a stage and its collectives slow each other where they cross the same link."""

from __future__ import annotations

import pytest

from autopar.hardware.collectives import message_ports, message_seconds
from autopar.hardware.profile import Hardware, Link
from autopar.sharding.mesh import Mesh
from autopar.steps.sends import MicrobatchSeconds, Send, beside_sends
from autopar.timeline.values import COMPUTE, Task

CARD = (("card", 1.0),)


def _tasks(links: tuple[tuple[str, float], ...] = CARD) -> list[Task]:
    """A gather that is waited for, and a product; backward a product, and a reduction that is waited for."""
    return [
        Task("all_gather", "dp", 4.0, links=links),
        Task("mm", COMPUTE, 2.0, after=(0,)),
        Task("mm", COMPUTE, 3.0, "backward"),
        Task("reduce_scatter", "dp", 4.0, "backward", after=(2,), links=links),
        Task("sum", COMPUTE, 1.0, "backward", after=(3,)),
    ]


def test_without_sends_a_micro_batch_takes_what_its_tasks_take() -> None:
    assert beside_sends(_tasks(), 0.0, Send(), Send()) == MicrobatchSeconds(6.0, 8.0, 0.0, 0.0)


def test_a_send_and_a_collective_over_one_card_slow_each_other() -> None:
    # The gradient travels beside the gather; the output beside the product for three seconds, then the reduction.
    found = beside_sends(_tasks(), 0.0, Send(5.0, CARD), Send(1.0, CARD))
    assert found == MicrobatchSeconds(7.0, 10.0, 7.0, 2.0)


def test_sends_over_another_link_slow_nothing() -> None:
    found = beside_sends(_tasks((("nvlink", 1.0),)), 0.0, Send(5.0, CARD), Send(1.0, CARD))
    assert found == MicrobatchSeconds(6.0, 8.0, 5.0, 1.0)


def test_what_is_sent_takes_nothing_of_the_device() -> None:
    assert beside_sends(_tasks(()), 0.0, Send(9.0), Send(9.0)).forward == 6.0
    product = [Task("mm", COMPUTE, 2.0)]
    alone, beside = (beside_sends(product, 0.5, Send(), each) for each in (Send(), Send(1.0, CARD)))
    assert alone.forward == beside.forward


def test_a_message_loads_the_links_that_it_crosses_but_for_its_latency() -> None:
    near, far = Link("node", 4, 0.0, 1e9), Link("wire", None, 0.5, 1e8)
    hardware = Hardware("two links", {"float32": 1e12}, 1e12, 10**9, 0.0, (near, far))
    between, within = Mesh({"pp": 2, "tp": 4}), Mesh({"pp": 2, "tp": 2})
    assert message_seconds(10**8, between, "pp", hardware) == pytest.approx(1.5)
    assert message_ports(10**8, between, "pp", hardware) == (("wire", pytest.approx(2 / 3)),)
    assert message_ports(10**8, within, "pp", hardware) == (("node", pytest.approx(1.0)),)
    assert message_ports(10**8, Mesh({"pp": 1, "tp": 4}), "pp", hardware) == ()
