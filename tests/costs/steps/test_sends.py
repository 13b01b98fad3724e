"""Sends of a stage and its collectives slow each other where they cross the same link."""

from __future__ import annotations

import pytest

from autopar.costs.hardware.collectives import message_ports, message_seconds
from autopar.costs.hardware.profile import Hardware, Link
from autopar.costs.steps.sends import (
    MicrobatchSeconds,
    ReductionSeconds,
    Send,
    overlapped_with_sends,
    reduced_overlapped,
)
from autopar.costs.timeline.values import COMPUTE, Task
from autopar.ir.sharding.mesh import Mesh

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
    assert overlapped_with_sends(_tasks(), 0.0, Send(), Send()) == MicrobatchSeconds(6.0, 8.0, 0.0, 0.0)


def test_a_send_and_a_collective_over_one_card_slow_each_other() -> None:
    # The gradient overlaps with the gather; the output with the matmul for three seconds, then with the reduction.
    found = overlapped_with_sends(_tasks(), 0.0, Send(5.0, CARD), Send(1.0, CARD))
    assert found == MicrobatchSeconds(7.0, 10.0, 7.0, 2.0)


def test_sends_over_another_link_slow_nothing() -> None:
    found = overlapped_with_sends(_tasks((("nvlink", 1.0),)), 0.0, Send(5.0, CARD), Send(1.0, CARD))
    assert found == MicrobatchSeconds(6.0, 8.0, 5.0, 1.0)


def test_what_is_sent_takes_nothing_of_the_device() -> None:
    assert overlapped_with_sends(_tasks(()), 0.0, Send(9.0), Send(9.0)).forward == 6.0
    product = [Task("mm", COMPUTE, 2.0)]
    alone, overlapped = (overlapped_with_sends(product, 0.5, Send(), each) for each in (Send(), Send(1.0, CARD)))
    assert alone.forward == overlapped.forward


def test_a_message_loads_the_links_that_it_crosses_but_for_its_latency() -> None:
    near, far = Link("node", 4, 0.0, 1e9), Link("wire", None, 0.5, 1e8)
    hardware = Hardware("two links", {"float32": 1e12}, 1e12, 10**9, 0.0, (near, far))
    between, within = Mesh({"pp": 2, "tp": 4}), Mesh({"pp": 2, "tp": 2})
    assert message_seconds(10**8, between, "pp", hardware) == pytest.approx(1.5)
    assert message_ports(10**8, between, "pp", hardware) == (("wire", pytest.approx(2 / 3)),)
    assert message_ports(10**8, within, "pp", hardware) == (("node", pytest.approx(1.0)),)
    assert message_ports(10**8, Mesh({"pp": 1, "tp": 4}), "pp", hardware) == ()


def _last(links: tuple[tuple[str, float], ...] = CARD) -> list[Task]:
    """A product; backward two products, behind each of which a reduction of sums is left running."""
    return [
        Task("mm", COMPUTE, 4.0),
        Task("mm", COMPUTE, 4.0, "backward"),
        Task("reduce_scatter", "dp", 3.0, "backward", after=(1,), links=links, of_sums=True),
        Task("mm", COMPUTE, 4.0, "backward"),
        Task("reduce_scatter", "dp", 3.0, "backward", after=(3,), links=links, of_sums=True),
    ]


def test_a_backward_hides_all_reductions_but_those_behind_its_last_product() -> None:
    assert reduced_overlapped(_last(), 0.0, Send(), Send()) == ReductionSeconds(behind=3.0, alone=6.0)


def test_reductions_slow_the_backward_by_their_share_of_the_device() -> None:
    # The first overlaps with the second matmul and takes half of the device from it for as long.
    assert reduced_overlapped(_last(), 0.5, Send(), Send()) == ReductionSeconds(1.5, behind=3.0, alone=6.0)


def test_reductions_and_sends_over_one_card_slow_each_other() -> None:
    # The output travels up to the ninth second, and the first reduction is half as fast for one. The last gradient
    # travels with the second reduction.
    found = reduced_overlapped(_last(), 0.0, Send(5.0, CARD), Send(2.0, CARD))
    assert found == ReductionSeconds(slowing_send=2.0, behind=5.0, alone=6.0)
    other = reduced_overlapped(_last((("nvlink", 1.0),)), 0.0, Send(5.0, CARD), Send(2.0, CARD))
    assert other == ReductionSeconds(behind=3.0, alone=6.0)


def test_gradients_of_weights_made_apart_hide_reductions_behind_their_own_products_alone() -> None:
    # Each product takes one second: the second reduction waits for the first, which ends two seconds later.
    found = reduced_overlapped(_last(), 0.0, Send(5.0, CARD), Send(), of_weights=0.25)
    assert found == ReductionSeconds(behind=5.0, alone=6.0)


def test_exchanges_wait_for_reductions_unless_gradients_of_weights_are_made_apart() -> None:
    # Tokens are exchanged on the communicator of the reductions. Made apart, gradients of weights need no exchange.
    exchange = Task("all_to_all", "dp", 1.0, "backward", after=(3,), links=CARD)
    tasks = [*_last(), exchange, Task("mm", COMPUTE, 4.0, "backward", after=(5,))]
    assert reduced_overlapped(tasks, 0.0, Send(), Send()).slowing == 3.0
    assert reduced_overlapped(tasks, 0.0, Send(), Send(), of_weights=0.25).slowing == 0.0


def test_without_reductions_nothing_is_slowed() -> None:
    assert reduced_overlapped(_tasks(), 0.5, Send(5.0, CARD), Send(5.0, CARD)) == ReductionSeconds()
