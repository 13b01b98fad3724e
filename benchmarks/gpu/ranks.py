"""Training on 2 and 4 ranks that share the device, each case compared with one process on it.

Ranks move tensors of the device by gloo, through the host: the values are those of a real run, the speed is not. A case
that fails or is wrong is a row of its own, and those after it go on: on other ranks, if it has ended these.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

import autopar
from autopar.errors import AutoparError
from autopar.runtime.ranks.launch import World, on_ranks
from benchmarks.gpu.setting import Draft, Finding, Row, Setting
from benchmarks.gpu.staged import stage_messages
from benchmarks.transformer_model import Size, batch, transformer
from tests.support.expert_families import WITH_EXPERTS
from tests.support.families import FAMILIES
from tests.support.options import by_flag

STEPS = 4
CLOSE = 1e-3
"""Greatest difference of a loss from that of one process, relative to it: kernels round otherwise in parts."""
OWN = "transformer"
"""A model that returns its loss, as `train_step` needs it."""
SIZE = Size(4, 64, 4, 128, 16, 8)
KNOWN = {**FAMILIES, **WITH_EXPERTS}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a mesh and options."""

    name: str
    axes: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    family: str = OWN
    role: Mapping[str, Any] = field(default_factory=dict)
    """Roles of "*experts*" over axes."""
    offloaded: bool = False
    """True if the optimizer steps on the host."""
    resumes_as: str = ""
    """Preset as which the second half of the steps goes on, from a checkpoint of the first."""


def _presets(axes: Mapping[str, int], *names: str) -> tuple[Case, ...]:
    return tuple(Case(name, axes, {"strategy": name}) for name in names)


def _pipeline(axes: Mapping[str, int], schedule: str) -> Case:
    return Case(f"{schedule} on {dict(axes)}", axes, {"schedule": schedule, "microbatches": 4})


TWO: Sequence[Case] = (
    *_presets({"dp": 2}, "data_parallel", "zero3"),
    *_presets({"tp": 2}, "megatron"),
    Case("experts over ranks", {"ep": 2}, family="mixtral", role={"ep": "expert"}),
    Case("checkpoint of zero3 as data_parallel", {"dp": 2}, {"strategy": "zero3"}, resumes_as="data_parallel"),
    Case("optimizer on the host", {"dp": 2}, {"strategy": "zero3", "offload": "optimizer"}, offloaded=True),
    Case("activations on the host", {"dp": 2}, {"strategy": "zero3", "offload": "activations"}),
    *_presets({"tp": 2}, "megatron_sequence"),
    Case(
        "zero3 in micro-batches, recomputed", {"dp": 2}, {"strategy": "zero3", "microbatches": 2, "recompute": "full"}
    ),
    *_presets({"sp": 2}, "ulysses", "context_parallel"),
)
"""Cases on 2 ranks in order of importance."""
PIPELINES: Sequence[Case] = tuple(
    _pipeline({"pp": 2}, name) for name in ("1f1b", "interleaved_1f1b", "gpipe", "zbv", "dualpipev")
)
FOUR: Sequence[Case] = (
    *_presets({"dp": 2, "tp": 2}, "fsdp_megatron"),
    _pipeline({"pp": 2, "dp": 2}, "1f1b"),
    *_presets({"dp": 2, "fsdp": 2}, "hsdp"),
    Case("experts over ranks", {"dp": 2, "ep": 2}, family="mixtral", role={"ep": "expert"}),
    Case("a plan of the solver", {"dp": 2, "tp": 2}),
    *_presets({"dp": 4}, "zero3"),
    *_presets({"tp": 4}, "megatron"),
    _pipeline({"pp": 4}, "1f1b"),
)
OF_FAMILIES: Sequence[Case] = tuple(
    Case(name, {"dp": 2}, {"strategy": "zero3"}, name)
    for name in ("llama", "gpt2", "bert", "t5", "vit", "resnet", "lora")
)


def trained_as_one(cases: Sequence[Case], num_ranks: int) -> Callable[[Setting, Draft], Finding]:
    """Return the measurement of cases on so many ranks; of those that the draft lacks."""

    def measure(setting: Setting, draft: Draft) -> Finding:
        while left := cases[len(draft.read().rows) :]:
            try:
                on_ranks(World(num_ranks), _run, (left, setting.device, draft))
            except Exception as error:  # of the first case that has no row by now
                before = len(draft.read().rows)
                name = cases[before].name if before < len(cases) else "end"
                draft.add(Row(name, f"{type(error).__name__}: {error}"[-600:], "no error", False))
        return draft.read()

    return measure


def _run(cases: Sequence[Case], device: str, draft: Draft) -> None:
    """Run the cases on this rank, and write down what is found after each."""
    stage_messages()
    if device == "cuda":
        torch.cuda.set_device(0)
    for case in cases:
        mesh = init_device_mesh(device, tuple(case.axes.values()), mesh_dim_names=tuple(case.axes))
        try:
            pairs = zip(_losses(case, mesh), _losses(case, None, device), strict=True)
            apart = max(abs(found - expected) / abs(expected) for found, expected in pairs)
            row = Row(case.name, f"losses {apart:.1e} apart", f"≤ {CLOSE:g}", apart <= CLOSE)
        except AutoparError as error:  # which all ranks raise
            row = Row(case.name, f"{type(error).__name__}: {error}"[:300], "no error", False)
        if torch.distributed.get_rank() == 0:
            draft.add(row)


def _losses(case: Case, mesh: DeviceMesh | None, device: str = "") -> list[float]:
    """Return the losses of some steps on ranks, or of one process."""
    device = device if mesh is None else mesh.device_type
    model = _model(case).to(device)
    trained: Any = model if mesh is None else _compiled(case, model, mesh, case.options)
    optimizer, losses = _optimizer(case, trained, mesh is not None), []
    for number in range(STEPS):
        if number == STEPS // 2 and case.resumes_as and mesh is not None:
            trained = _resumed(case, trained, mesh)
            optimizer = _optimizer(case, trained, True)
        args, kwargs = _batch(case, number, device)
        if mesh is not None and case.family == OWN:
            loss = trained.train_step(*args)
        else:
            loss = trained(*args, **kwargs)
            loss = loss if case.family == OWN else KNOWN[case.family].loss(loss)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _model(case: Case) -> nn.Module:
    if case.family != OWN:
        return KNOWN[case.family].build()
    torch.manual_seed(0)
    return transformer(SIZE)


def _batch(case: Case, number: int, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if case.family != OWN:
        found = KNOWN[case.family].inputs(number)
    else:
        torch.manual_seed(number)
        found = batch(SIZE), {}
    return pytree.tree_map_only(Tensor, lambda x: x.to(device), found)


def _compiled(case: Case, model: nn.Module, mesh: DeviceMesh, options: Mapping[str, Any]) -> Any:
    if case.role:
        autopar.annotate(model, "*experts*", **case.role)
    args, kwargs = _batch(case, 0, mesh.device_type)
    return autopar.compile(model, mesh, kwargs or args, **by_flag(**options))


def _optimizer(case: Case, model: nn.Module, on_ranks: bool) -> torch.optim.Optimizer:
    learning = [each for each in model.parameters() if each.requires_grad]
    if case.resumes_as:  # without state, which a checkpoint would have to have
        return torch.optim.SGD(learning, lr=0.1)
    kind = autopar.optim.OffloadedAdamW if case.offloaded and on_ranks else torch.optim.AdamW
    return kind(learning, lr=1e-3, eps=1e-4)


def _resumed(case: Case, model: nn.Module, mesh: DeviceMesh) -> Any:
    """Return another module that has read a checkpoint of the first."""
    folder = Path(tempfile.gettempdir(), f"autopar-gpu-checkpoint-{torch.distributed.get_world_size()}")
    save({"model": model.state_dict()}, checkpoint_id=folder)
    other = _compiled(case, _model(case).to(mesh.device_type), mesh, {**case.options, "strategy": case.resumes_as})
    state = {"model": other.state_dict()}
    load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        with suppress(OSError):
            for each in folder.iterdir():
                each.unlink()
            folder.rmdir()
    return other
