"""A batch that is given in parts trains as the whole batch does on one process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import autopar
from autopar.ir.sharding.mesh import Mesh
from tests.support.optimizing import losses_of
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import Ranks, mesh

BATCH, HIDDEN = 16, 12


class Net(nn.Module):
    """Scales samples by a vector of the hidden size, and weights their errors by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(4)))

    def forward(self, x_BH: Tensor, y_B: Tensor, scale_H: Tensor, weight: Tensor, power: int = 2) -> dict[str, Tensor]:
        out_BH = self.layers(x_BH * scale_H)
        return {"out": out_BH, "loss": weight * (out_BH.sum(1) - y_B).pow(power).mean()}


def batch(step: int, size: int = BATCH) -> dict[str, Any]:
    torch.manual_seed(step)
    x_BH, y_B = torch.randn(size, HIDDEN), torch.randn(size)
    return {"x_BH": x_BH, "y_B": y_B, "scale_H": torch.rand(HIDDEN), "weight": torch.tensor(0.5)}


def part(whole: dict[str, Any], number: int, count: int) -> dict[str, Any]:
    """Return a rank's part of a batch, as a DataLoader with a DistributedSampler gives it, but in order."""
    return {**whole, **{name: whole[name].chunk(count)[number] for name in ("x_BH", "y_B")}}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def alone(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of training on one process."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return losses_of(optimizer, range(steps), lambda step: model(**batch(step))["loss"]), dict(model.state_dict())


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def trained(shape: tuple[int, ...], names: tuple[str, ...], inputs: Any, options: dict[str, Any]) -> Any:
    """Losses and parameters of training on parts of the batch, how they arrive by the plan, and an evaluation.

    Of the evaluation it is the outputs of this rank's part, of how many parts, and its number.
    """
    on = mesh(shape, names)
    axes = [name for name in names if name != "pp"] if inputs == "local" else inputs
    count, number = 1, 0
    for name in [axes] if isinstance(axes, str) else axes:
        count, number = count * on[name].size(), number * on[name].size() + on.get_local_rank(name)
    model = autopar.compile(
        net(),
        on,
        part(batch(0), number, count),
        inputs=inputs,
        hardware=SLOW_DEVICES,
        **by_flag(check_inputs=True, **options),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        given = part(batch(step), number, count)
        if "microbatches" in options:
            loss = model.train_step(**given)
        else:
            loss = model(**given)["loss"]
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        out = model.eval()(**part(batch(9), number, count))["out"].clone()
    arriving = {} if "pp" in names else {name: model.plan.choices[name] for name in ("x_bh", "y_b", "scale_h")}
    state = {name: whole(value) for name, value in model.state_dict().items()}
    return losses, state, arriving, (out, count, number)


CASES = {
    "local": ((2, 2), ("dp", "tp"), "local", {}, ("S(0) S(0)", "I I")),
    "one axis": ((2, 2), ("dp", "tp"), "dp", {}, ("S(0) I", "I I")),
    "the inner axis": ((2, 2), ("dp", "tp"), ("tp",), {"strategy": "zero3"}, ("I S(0)", "I I")),
    "micro-batches": ((2,), ("dp",), "local", {"microbatches": 2, "strategy": "zero3"}, ("S(0)", "I")),
    "pipeline": ((2, 2), ("pp", "dp"), "local", {"microbatches": 2, "schedule": "gpipe"}, None),
    "pipeline on one device": ((2,), ("pp",), "local", {"microbatches": 2, "schedule": "1f1b"}, None),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", CASES)
def test_parts_of_the_batch_train_as_the_whole_batch_on_one_process(ranks: Ranks, name: str) -> None:
    shape, names, inputs, options, layouts = CASES[name]
    losses, state = alone(3)
    model = net()
    model.load_state_dict(state)
    out = model(**batch(9))["out"]
    owned: set[str] = set()
    world = 4 if len(shape) == 2 else 2
    for found, parameters, arriving, (found_out, *place) in ranks.run(
        trained, shape, names, inputs, options, world_size=world
    ):
        torch.testing.assert_close(found, losses)
        torch.testing.assert_close(found_out, out.detach().chunk(place[0])[place[1]])
        for key, value in parameters.items():
            torch.testing.assert_close(value, state[key], msg=key)
        owned |= parameters.keys()
        if layouts is not None:
            assert arriving == {"x_bh": layouts[0], "y_b": layouts[0], "scale_h": layouts[1]}
    assert owned == state.keys()


@pytest.mark.parametrize("inputs", ["local", "dp"])
def test_a_plan_for_parts_needs_no_devices(ranks: Ranks, inputs: str) -> None:
    offline = autopar.plan(
        net(), Mesh({"dp": 2}), part(batch(0), 0, 2), inputs=inputs, hardware=SLOW_DEVICES, microbatches=2
    )
    assert offline.choices["x_bh"] == "S(0)"
    attached = autopar.Plan.from_json(offline.to_json()).attach(
        net(), part(batch(0), 1, 2), inputs=inputs, hardware=SLOW_DEVICES, microbatches=2
    )
    assert attached.verify().ok
    first, second = ranks.run(_plan_on_ranks, inputs)
    assert first == second == offline.choices


def _plan_on_ranks(inputs: str) -> dict[str, str]:
    on = mesh((2,), ("dp",))
    model = autopar.compile(net(), on, part(batch(0), 0, 2), inputs=inputs, hardware=SLOW_DEVICES, microbatches=2)
    return dict(model.plan.choices)


def _square_batch() -> float:
    """Return the loss of a batch with as many samples as features.

    A vector of features would be taken for a part, so it is given as a replicated DTensor.
    """
    on = mesh((2,), ("dp",))
    model = autopar.compile(net(), on, inputs="local", hardware=SLOW_DEVICES)
    given = part(batch(0, 2 * HIDDEN), on.get_local_rank(), 2)
    scale_H = DTensor.from_local(given["scale_H"], on, [Replicate()])
    return model(**{**given, "scale_H": scale_H})["loss"].item()


def test_what_has_the_size_of_a_part_by_chance_is_given_as_a_replicated_dtensor(ranks: Ranks) -> None:
    expected = net()(**batch(0, 2 * HIDDEN))["loss"].item()
    assert ranks.run(_square_batch) == pytest.approx([expected] * 2)


def _refusals() -> list[str]:
    on, found = mesh((2, 2), ("dp", "tp")), []
    rank = on.get_rank()

    def called(inputs: Any, number: int, count: int, rows: int | None = None) -> None:
        model = autopar.compile(net(), on, inputs=inputs, hardware=SLOW_DEVICES)
        given = part(batch(0), number, count)
        model(**{**given, **{name: given[name][:rows] for name in ("x_BH", "y_B")}})

    for refused in (
        lambda: autopar.compile(net(), on, inputs="pp"),
        lambda: autopar.compile(net(), on, inputs=("dp", "dp")),
        lambda: autopar.compile(net(), on, inputs=3),  # pyright: ignore[reportArgumentType]
        lambda: called("local", rank, 4, 3 if rank == 3 else None),  # the last part is smaller
        lambda: called("dp", rank, 4),  # four parts where there are two
        lambda: called("whole", rank, 4),
    ):
        try:
            refused()
            found.append("nothing was raised")
        except autopar.InputError as error:
            found.append(str(error))
    return found


REFUSALS = (
    r"inputs='pp'; give \"whole\" .*, \"local\" .*, or the axes over which ranks have different parts, of dp, tp\.",
    r"inputs=\('dp', 'dp'\); give",
    r"inputs=3; give",
    r".*x_BH: float32\[16, 12\] as S\(0\), S\(0\).*float32\[12, 12\].*Only numbers of samples differ.*drop_last=True",
    r".*rank \d with other values of x_BH, y_B than rank \d\. .*inputs=\"local\"",
    r".*rank \d with other values of x_BH, y_B than rank \d\. .*inputs=\"local\"",
)


def test_parts_that_do_not_fit_are_refused_on_every_rank(ranks: Ranks) -> None:
    for found in ranks.run(_refusals, world_size=4):
        for text, pattern in zip(found, REFUSALS, strict=True):
            assert re.match(pattern, text), text
