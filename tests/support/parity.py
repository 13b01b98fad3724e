"""Training of one family, on one process and on many ranks, so that tests can hold one against the other.

What is compared: the loss of every step, every parameter's gradient after the first, the parameters and buffers after
the last, and the bytes of every collective of the first step against the plan.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from autopar.capture.export import Traced, trace
from autopar.costs.hardware.profile import Hardware, Link
from tests.support.expert_families import WITH_EXPERTS
from tests.support.families import FAMILIES
from tests.support.further_families import FURTHER
from tests.support.loss_alone import LOSS_ALONE
from tests.support.options import by_flag
from tests.support.ranks import Ranks, mesh

STEPS = 5
MODELS = FAMILIES | FURTHER | WITH_EXPERTS | LOSS_ALONE
SLOW_DEVICES = Hardware("slow devices, fast links", {"float32": 1e8}, 1e8, 10**9, 0.0, (Link("wire", None, 0.0, 1e12),))
"""Tiny models are best not split at all on real hardware; here everything pays that divides the work."""


@dataclass(frozen=True, slots=True)
class Case:
    """One way to train a family: the mesh, the annotations (pattern, keywords) and the options of `compile`."""

    family: str
    mesh: tuple[int, ...]
    annotations: tuple[tuple[str, dict[str, Any]], ...] = ()
    options: dict[str, Any] = field(default_factory=lambda: {"hardware": SLOW_DEVICES})
    dtype: torch.dtype = torch.float32
    steps: int = STEPS
    micro_steps: int = 1
    frozen: tuple[str, ...] = ()
    """Patterns in parameter names whose parameters are frozen."""
    dropout: float = 0.0
    masked: bool = False
    """True if the inputs include an attention mask, as padded texts do."""

    @property
    def axes(self) -> tuple[str, ...]:
        return ("dp", "tp", "depth")[: len(self.mesh)] if len(self.mesh) > 1 else ("dp",)

    @property
    def graph(self) -> tuple[Any, ...]:
        """Settings on which the captured graph depends."""
        return self.family, self.dtype, self.frozen, self.dropout, self.masked

    def __str__(self) -> str:
        shape = "x".join(map(str, self.mesh))
        specified = "+".join(f"{p}:{','.join(f'{k}={v}' for k, v in keys.items())}" for p, keys in self.annotations)
        return f"{self.family}-{shape}-{specified or 'auto'}"


@dataclass(slots=True)
class Training:
    """Results of a training run, all as whole tensors."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    counted: dict[tuple[str, str], int]
    predicted: dict[tuple[str, str], int]
    roles: set[tuple[str, str, str]] = field(default_factory=set)
    """(kind of decision, axis, role or placement) of everything in the plan."""


def build(case: Case) -> nn.Module:
    """The model of a case, equal on every call."""
    family = MODELS[case.family]
    model = family.build(dropout=case.dropout) if case.dropout else family.build()
    for name, parameter in model.named_parameters():
        if any(part in name for part in case.frozen):
            parameter.requires_grad_(False)
    return model.to(case.dtype)


def inputs(case: Case, step: int, micro: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The global batch of a micro-step, floats in the case's dtype."""
    args, kwargs = MODELS[case.family].inputs(step * case.micro_steps + micro)
    cast = lambda x: x.to(case.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
    kwargs = {name: cast(value) for name, value in kwargs.items()}
    if case.masked:
        mask_BS = torch.ones_like(kwargs["input_ids"])
        mask_BS[0, -3:] = 0
        kwargs["attention_mask"] = mask_BS
    return tuple(map(cast, args)), kwargs


def whole(value: Any) -> Tensor | None:
    """A whole, detached copy of a tensor or DTensor."""
    if value is None:
        return None
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone()


def assert_same_gradients(found: nn.Module, expected: nn.Module, **tolerances: Any) -> None:
    """Compare the gradients of a model, or of a rank's stages of one, with those of the model on one process."""
    theirs = dict(expected.named_parameters())
    for name, parameter in found.named_parameters():
        ours, other = whole(parameter.grad), whole(theirs[name].grad)
        torch.testing.assert_close(ours, other, **tolerances, msg=lambda text, n=name: f"{n}: {text}")


def train(case: Case, model: nn.Module, traffic: Any = None) -> Training:
    """Train a model, compiled or not, on the batches of the case."""
    loss_of = MODELS[case.family].loss
    # A larger eps than usual: gradients that are zero up to rounding must not become whole steps.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)
    found = Training([], {}, {}, {}, {}, {})
    for step in range(case.steps):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(case.micro_steps):
            args, kwargs = inputs(case, step, micro)

            def forward_backward(args: Any = args, kwargs: Any = kwargs) -> float:
                loss = loss_of(model(*args, **kwargs)) / case.micro_steps
                loss.backward()
                return float(whole(loss))  # type: ignore[arg-type]

            if traffic is not None and step == micro == 0:
                with traffic() as record:
                    total += forward_backward()
                found.counted = dict(record.num_bytes)
            else:
                total += forward_backward()
        found.losses.append(total)
        if step == 0:
            found.gradients = {name: whole(p.grad) for name, p in model.named_parameters() if p.requires_grad}
        optimizer.step()
    found.parameters = {name: whole(p) for name, p in model.named_parameters()}  # type: ignore[misc]
    found.buffers = {name: whole(b) for name, b in model.named_buffers()}  # type: ignore[misc]
    return found


@functools.lru_cache(maxsize=8)
def train_alone(
    family: str,
    dtype: torch.dtype,
    frozen: tuple[str, ...],
    dropout: float,
    masked: bool,
    steps: int,
    micro_steps: int,
) -> Training:
    """Train on one process; the same for all cases that differ only in how they are split."""
    kind: dict[str, Any] = {"dtype": dtype, "frozen": frozen, "dropout": dropout, "masked": masked}
    case = Case(family, (1,), steps=steps, micro_steps=micro_steps, **kind)
    torch.manual_seed(0)
    return train(case, build(case))


_traced: dict[tuple[Any, ...], Traced] = {}


def traced_once(graph: tuple[Any, ...]) -> Any:
    """`trace`, run once per rank and kind of graph: it takes most of a case's time and knows nothing of the mesh."""

    def find(model: nn.Module, *args: Any, **options: Any) -> Traced:
        key = (*graph, model.training, str(sorted(options.items())))
        if key not in _traced:
            _traced[key] = trace(model, *args, **options)
        return _traced[key]

    return mock.patch("autopar.planning.request.trace", find)


def parallel(case: Case) -> Training:
    """Train the case on the ranks of this process group (runs on every rank)."""
    import autopar
    from autopar.runtime.collectives.mesh_axes import record_traffic

    model = build(case)
    for pattern, keywords in case.annotations:
        autopar.annotate(model, pattern, **keywords)
    args, kwargs = inputs(case, 0, 0)
    example: Any = kwargs if kwargs else args
    with traced_once(case.graph):
        compiled = autopar.compile(model, mesh(case.mesh, case.axes), example, **by_flag(**case.options))
        found = train(case, compiled, record_traffic)
    found.predicted = dict(compiled.plan.traffic)
    rows = compiled.plan.rows
    found.roles = {(row.kind, axis, role) for row in rows for axis, role in zip(case.axes, row.roles, strict=True)}
    return found


def check(ranks: Ranks, case: Case, rtol: float = 1e-4, atol: float = 1e-5, floor: float = 0.05) -> list[Training]:
    """Train the case on real ranks and hold every rank against one process; see `compare`."""
    expected = train_alone(*case.graph, case.steps, case.micro_steps)
    found = ranks.run(parallel, case, world_size=int(torch.tensor(case.mesh).prod()), timeout=180)
    for training in found:
        compare(training, expected, rtol, atol, floor)
    return found


def check_rounding(ranks: Ranks, case: Case) -> list[Training]:
    """Train a case of low precision on real ranks: no further from float32 than twice what one process is.

    One process rounds as well, and by how much depends on the model: it is the measure of what rounding explains.
    """
    precise = train_alone(
        case.family, torch.float32, case.frozen, case.dropout, case.masked, case.steps, case.micro_steps
    )
    alone = distance(train_alone(*case.graph, case.steps, case.micro_steps), precise)
    found = ranks.run(parallel, case, world_size=int(torch.tensor(case.mesh).prod()), timeout=180)
    for training in found:
        for kind, far in distance(training, precise).items():
            assert far <= 2 * alone[kind], f"{kind}: {far:.3g} from float32, one process {alone[kind]:.3g}"
    return found


def distance(found: Training, precise: Training) -> dict[str, float]:
    """Return the root mean square distance of losses, gradients and parameters from a precise run.

    Each is relative to the root mean square of the precise run.
    """

    def apart(ours: dict[str, Tensor | None], theirs: dict[str, Tensor | None]) -> float:
        pairs = [(ours[name], value) for name, value in theirs.items() if value is not None]
        errors = sum(float((a.float() - b).square().sum()) for a, b in pairs if a is not None)
        return (errors / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5

    losses = ({str(i): torch.tensor(loss) for i, loss in enumerate(each.losses)} for each in (found, precise))
    return {
        "losses": apart(*losses),  # type: ignore[arg-type]
        "gradients": apart(found.gradients, precise.gradients),
        "parameters": apart(found.parameters, precise.parameters),  # type: ignore[arg-type]
    }


def compare(found: Training, expected: Training, rtol: float, atol: float, floor: float) -> None:
    """Raise AssertionError naming what differs.

    `atol` is in units of a tensor's largest entry, where that is at least `floor`.
    """
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(expected.losses), rtol=rtol, atol=atol)
    assert found.gradients.keys() == expected.gradients.keys()
    for kind in ("gradients", "parameters", "buffers"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys(), f"{kind}: {ours.keys() ^ theirs.keys()}"
        for name, value in theirs.items():
            if value is None or ours[name] is None:
                assert value is ours[name], f"{kind} of {name}: one is None"
                continue
            scale = max(float(value.abs().max()), floor) if value.numel() else 1.0
            torch.testing.assert_close(
                ours[name], value, rtol=rtol, atol=atol * scale, msg=lambda m, n=name, k=kind: f"{k} of {n}: {m}"
            )
    moved = {key: count for key, count in found.predicted.items() if count}
    assert found.counted == moved, f"counted {found.counted}, predicted {moved}"
