"""The tasks of a step are those that a rank issues: its collectives in their order, and what overlaps with each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.costs.plans.plan import Plan
from autopar.costs.steps.step import last_microbatch_tasks, microbatch_tasks, step_tasks
from autopar.costs.timeline.values import COMPUTE, Task
from autopar.planning.settings import context_of
from autopar.runtime.collectives.mesh_axes import gathering_groups
from autopar.tools.benchmarking.meters import INPUT_IS_A_PART, OPERATIONS
from tests.runtime.rewrite.test_prefetch import HALF, WIDTH, Stack
from tests.support.divided_experts import Form, batches, with_experts
from tests.support.options import by_flag
from tests.support.parity import FAMILIES, SLOW_DEVICES
from tests.support.simulation.fake_mesh import fake_mesh


class Issued(NamedTuple):
    """A collective of a step."""

    name: str
    stream: str
    num_bytes: int
    overlapped: int
    """Number of other collectives that are issued before this one is waited for."""


@dataclass(slots=True)
class _Running:
    name: str
    stream: str
    num_bytes: int
    result: Tensor
    number: int
    waited_at: int | None = None


@dataclass
class _Recorder(TorchDispatchMode):
    """Every collective that is dispatched, and when it is waited for."""

    streams: dict[str, str]
    """Name of a group → the stream that it is."""
    sizes: dict[str, int]
    found: list[_Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = f"{func.namespace}.{func._opname}"
        if name in OPERATIONS:
            num_bytes = args[0].nbytes * (self.sizes[args[-1]] if name.startswith(INPUT_IS_A_PART) else 1)
            collective, _ = OPERATIONS[name]
            self.found.append(_Running(collective, self.streams[args[-1]], num_bytes, result, len(self.found)))
        elif func._opname == "wait_tensor":
            storage = args[0].untyped_storage()._cdata
            for each in self.found:
                if each.waited_at is None and each.result.untyped_storage()._cdata == storage:
                    each.waited_at = len(self.found)
        return result

    def issued(self) -> list[Issued]:
        return [
            Issued(each.name, each.stream, each.num_bytes, (each.waited_at or len(self.found)) - each.number - 1)
            for each in self.found
        ]


def _run(model: str, axes: dict[str, int], options: dict[str, Any]) -> tuple[Plan, list[Issued]]:
    """The plan of a model, and what the second step of its rank issues, of a micro-batch or as many as it has."""
    torch.manual_seed(0)
    with fake_mesh(axes) as mesh:
        if model == "stack":
            module, args, kwargs = Stack(), (torch.ones(8, WIDTH),), {}
        elif model == "experts":  # each token goes to all of them, so that ranks have equally many rows
            form = Form(top_k=4, shared="after", num_layers=2)
            module, args, kwargs = with_experts(form), (), batches(1)[0]
        else:
            family = FAMILIES[model]
            module, (args, kwargs) = family.build(), family.inputs(0)
        compiled = autopar.compile(module, mesh, args or kwargs, hardware=SLOW_DEVICES, **by_flag(**options))
        groups: dict[str, str] = {mesh.get_group(name).group_name: name for name in axes}
        groups[dist.group.WORLD.group_name] = "_".join(axes)  # type: ignore[union-attr]
        sizes: dict[str, int] = {mesh.get_group(name).group_name: size for name, size in axes.items()}
        sizes[dist.group.WORLD.group_name] = mesh.size()  # type: ignore[union-attr]
        for name, group in gathering_groups(mesh, dict.fromkeys((*axes, "_".join(axes)))).items():
            groups[group], sizes[group] = f"{name}, weights", axes.get(name, mesh.size())
        for _ in range(2):
            recorder = _Recorder(groups, sizes)
            with recorder:
                if "microbatches" in options:
                    compiled.train_step(*args, **kwargs)
                    continue
                output = compiled(*args, **kwargs)
                (output if isinstance(output, Tensor) else output.loss).backward()
        return compiled.plan, recorder.issued()  # type: ignore[return-value]


def _planned(tasks: Sequence[Task]) -> list[Issued]:
    collectives = [number for number, task in enumerate(tasks) if task.stream != COMPUTE]
    found = []
    for place, number in enumerate(collectives):
        users = (n for n, task in enumerate(tasks) if number in task.after)
        before = next(users, len(tasks))
        later = sum(number < each < before for each in collectives[place + 1 :])
        task = tasks[number]
        found.append(Issued(task.name, task.stream, task.num_bytes, later))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "axes", "options"),
    [
        ("stack", {"dp": 4}, {"strategy": "data_parallel"}),
        ("stack", {"dp": 4}, {"strategy": "zero3", "prefetch": 0}),
        ("stack", {"dp": 4}, {"strategy": "zero3", "prefetch": 1}),
        ("stack", {"dp": 4}, {"strategy": "zero3", "prefetch": 2}),
        ("stack", {"dp": 2, "tp": 2}, {"strategy": "zero3", "prefetch": 1}),
        ("stack", {"dp": 2, "tp": 2}, {"strategy": "hsdp", "prefetch": 2}),
        ("stack", {"dp": 4}, {"strategy": "zero3", "prefetch": 1, "precision": "bf16-mixed"}),
        ("stack", {"dp": 4}, {"strategy": "zero3", "prefetch": 1, "precision": HALF}),
        ("llama", {"dp": 2, "tp": 2}, {"strategy": "fsdp_megatron", "prefetch": 1, "recompute": "full"}),
        ("gpt2", {"dp": 2, "tp": 2}, {"strategy": "megatron_sequence"}),
        ("llama", {"dp": 2, "tp": 2}, {"strategy": "fsdp+sp", "recompute": "selective"}),
        ("gpt2", {"tp": 2}, {"strategy": "megatron_sequence", "recompute": "full"}),
        ("gpt2", {"dp": 2}, {"strategy": "zero3", "prefetch": 2, "recompute": "selective"}),
        ("experts", {"ep": 2}, {"strategy": "expert_data"}),
        ("experts", {"ep": 2}, {"strategy": "expert_data", "recompute": "full"}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_collectives_are_issued_and_waited_for_as_a_rank_does(
    model: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    plan, issued = _run(model, axes, options)
    context = context_of(plan)
    assert issued
    assert _planned(step_tasks(context.memory_model, context.choices, plan.recompute)) == issued


@pytest.mark.parametrize("options", [{"prefetch": 1}, {"recompute": "full"}], ids=str)
def test_rows_of_experts_travel_next_to_collectives_of_weights_as_on_a_rank(options: dict[str, Any]) -> None:
    plan, issued = _run("experts", {"dp": 2, "ep": 2}, {"strategy": "fsdp+ep", **options})
    context = context_of(plan)
    planned = _planned(step_tasks(context.memory_model, context.choices, plan.recompute))
    exchanges = [each for each in issued if each.name == "all_to_all"]
    assert [each for each in planned if each.name == "all_to_all"] == exchanges
    assert any(each.overlapped for each in exchanges)


@pytest.mark.sample(2)
@pytest.mark.filterwarnings("ignore:zero1")
@pytest.mark.parametrize(
    ("model", "axes", "options"),
    [
        ("stack", {"dp": 2, "tp": 2}, {"strategy": "zero1"}),
        ("stack", {"dp": 4}, {"strategy": "zero2"}),
        ("stack", {"dp": 4}, {"strategy": "data_parallel"}),
        ("stack", {"dp": 4}, {"strategy": "zero3", "prefetch": 1}),
        ("stack", {"dp": 2, "tp": 2}, {"strategy": "hsdp", "prefetch": 1}),
        ("llama", {"dp": 2}, {"strategy": "zero1", "recompute": "full"}),
        ("llama", {"dp": 2}, {"strategy": "zero1", "precision": "bf16-mixed"}),
        ("llama", {"dp": 2}, {"strategy": "zero2", "precision": "bf16-mixed"}),
        ("llama", {"dp": 2, "tp": 2}, {"strategy": "zero1+megatron"}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_micro_batches_reduce_next_to_their_last_backward_as_a_rank_does(
    model: str, axes: dict[str, int], options: dict[str, Any]
) -> None:
    plan, issued = _run(model, axes, {**options, "microbatches": 2})
    context = context_of(plan)
    given = context.memory_model, context.choices, plan.recompute
    last = last_microbatch_tasks(*given)
    planned = [*_planned(microbatch_tasks(*given)), *_planned(last)]
    gathered, run = issued[: len(issued) - len(planned)], issued[len(issued) - len(planned) :]
    if options["strategy"] == "hsdp":  # when what a backward has reduced is reduced further, its engine decides
        run, planned = ([each._replace(overlapped=0) for each in given] for given in (run, planned))
    assert run == planned
    assert {each.name for each in gathered} <= {"all_gather"}, "weights that the step gathers before"
    assert any(each.of_sums for each in last) == (options["strategy"] != "zero2"), "there each reduces all itself"
