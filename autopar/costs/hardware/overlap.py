"""Overlap of parameter communication with computation, as far as it is known before there is a plan.

Weights are gathered ahead of their use, overlapped with the forward, and again overlapped with the backward; gradient
reductions overlap with the backward. Each of n devices of a mesh computes 1/n of the program. If other axes divide a
parameter, each device moves only a part of it, and likewise for the other parameters. So over an axis

    computing = seconds of the pass on one device / n      moving = such a part of all weights, or gradients, over it

are the seconds that hide and the seconds that are hidden. A running collective takes the `communication_share` of a
device. So moving costs this share of its seconds, and any time by which it outlasts computing:

    exposed share = max(communication_share, 1 - computing / moving)

where `moving` assumes parameters of average size. No computation overlaps with the weights of the first layer: the
forward waits for them, and their gradients are the last of the backward. If a weight is gathered over several axes, one
after another, only the first gather is issued ahead; the others are exposed. So is every reduction but the last.

The rule considers one axis at a time. Several axes may gather and reduce under the same computation, or share a link.
The rule is then replaced by the shares that the simulated step waits for (`OverlappedWork.waited`, see
`planning.simulated`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GATHERING = "all_gather"
OTHERS = "others"
"""The kind of all collectives of weights whose own kind has no share."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Computation of the whole program in one pass on one device, and the parameter bytes moved alongside it."""

    seconds: float = 0.0
    """Seconds of the computation that devices divide among them."""
    latency: float = 0.0
    """Seconds that its calls take at least, on each of the devices."""
    num_bytes: int = 0
    """Bytes of all weights as they are gathered, or of their gradients as they are summed."""


@dataclass(frozen=True, slots=True)
class OverlappedWork:
    """The forward that weights' all-gathers overlap with, and the backward that gradients' reductions overlap with."""

    forward: Pass = Pass()
    backward: Pass = Pass()
    num_weights: int = 0
    waited: tuple[tuple[str, float], ...] = ()
    """Shares of collectives that a simulated step waits for, by `kind_of` them, in place of the rule."""

    @property
    def of_gathers(self) -> OverlappedWork:
        """The same for gathers alone: reductions overlap with nothing."""
        waited = tuple(each for each in self.waited if each[0].startswith((GATHERING, OTHERS)))
        return replace(self, backward=Pass(), waited=waited)


def kind_of(collective: str, axis: str, backward: bool) -> str:
    """Return the name of collectives of one kind, over one axis, in one pass.

    Example:
        >>> kind_of("all_gather", "dp_tp", False)
        'all_gather dp_tp forward'
    """
    return f"{collective} {axis} {'backward' if backward else 'forward'}"


NOTHING = OverlappedWork()


@dataclass(frozen=True, slots=True)
class Message:
    """The message that carries a parameter with others, and the program that it overlaps with."""

    num_parameters: int
    weight_bytes: int = 1
    """Bytes of the whole parameter as it is gathered; `gradient_bytes` are those of its gradient as it is summed."""
    gradient_bytes: int = 1
    passes: int = 1
    """Number of times that parameters move in the backward.

    It is 2 if weights are gathered again while gradients are reduced.
    """
    overlapped: OverlappedWork = NOTHING

    def overlaps(self, collective: str) -> bool:
        """Return whether computing overlaps with a collective of the message."""
        return self._side(collective) != Pass()

    def average(self, collective: str, num_bytes: float) -> float:
        """Return the bytes that move of a parameter of average size where `num_bytes` of this one do."""
        gathers = collective == GATHERING
        whole = self.weight_bytes if gathers else self.gradient_bytes
        part = num_bytes / whole if whole else 0.0  # a parameter may have no elements
        return part * self._side(collective).num_bytes / max(1, self.overlapped.num_weights)

    def exposed(self, collective: str, moving_each: float, num_devices: int, least: float) -> float:
        """Return the share of a collective's seconds that computing does not hide, at least `least`.

        `moving_each` are the seconds in a message that a parameter of average size takes.
        """
        side = self._side(collective)
        moving = moving_each * self.overlapped.num_weights * (1 if collective == GATHERING else self.passes)
        computing = side.seconds / num_devices + side.latency
        return max(least, 1 - computing / moving) if moving else 1.0

    def waited(self, kind: str) -> float | None:
        """Return the share of a kind of collectives that a simulated step waits for; None if it has none of it."""
        shares = dict(self.overlapped.waited)
        return shares.get(kind, shares.get(OTHERS))

    def _side(self, collective: str) -> Pass:
        return self.overlapped.forward if collective == GATHERING else self.overlapped.backward
