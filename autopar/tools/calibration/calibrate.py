"""`autopar calibrate`: measure the machine at hand and write its hardware profile.

    autopar calibrate box.json --ranks 4                                               starts gloo ranks on this host
    torchrun --nproc-per-node 8 … --no-python autopar calibrate box.json --device cuda    uses the ranks that are there
    autopar calibrate box.json --device cuda --ranks 1 --links h100      measures one device; takes links of h100

Under torchrun every axis of the mesh (by default nodes × devices of a node) is measured, and gives the numbers of the
link that its groups run over, inside a node or between nodes. The same code measures NCCL with `device="cuda"`;
collectives have been measured with gloo only, one device alone on an H200, too.
"""

from __future__ import annotations

import datetime
import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.console.units import format_bytes
from autopar.costs.hardware.collectives import Level, levels_of, steps_and_share
from autopar.costs.hardware.load import links_of, load, parse
from autopar.costs.hardware.profile import Link, Protocol
from autopar.errors import AutoparError, InputError
from autopar.ir.sharding.mesh import Mesh, joined_name
from autopar.runtime.collectives.mesh_axes import axis_of, join_axes, use_mesh
from autopar.runtime.ranks.launch import BACKENDS, RankError, World, on_ranks
from autopar.tools.calibration.computing import Profile, Stamp, computing, device_name
from autopar.tools.calibration.fit import WORTH, Fit, Sample, fit, relative_error
from autopar.tools.calibration.timing import CUDA, FEW_BYTES, Effort, Timer

PROTOCOLS = {1: ("messages",), 2: ("small messages", "large messages")}
IN_NODE, BETWEEN_NODES = "in a node", "between nodes"


class CalibrationError(AutoparError, RuntimeError):
    """A rank failed while it measured; the message is that of the rank."""


@dataclass(frozen=True, slots=True)
class _Level:
    """Measurements of one link: samples by collective, and their fit."""

    name: str
    axes: str
    samples: Mapping[str, list[Sample]]
    fit: Fit
    few: Protocol | None
    """Protocol of an all-reduce of a few numbers, if that is clearly faster than the fit; otherwise None."""

    def protocols(self, names: Sequence[str]) -> tuple[Protocol, ...]:
        """Return the protocols of the link, those of the fit by these names."""
        return (*self.fit.protocols(names), *([] if self.few is None else [self.few]))


def calibrate(
    mesh: Mesh | int = 2,
    device: str = "cpu",
    effort: Effort | None = None,
    name: str | None = None,
    links: str | None = None,
) -> Profile:
    """Return the profile of this machine, as `costs.hardware.load` reads it from a JSON file; the same on every rank.

    With a process group, or under torchrun, the ranks that are there measure the axes of `mesh` (an int: nodes ×
    devices); else `mesh` says how many ranks to start here. One rank has no link to measure: those, and what hides
    behind computing, are those of the profile `links` (a name or a path), and say so. Raises InputError where that
    cannot be measured, PlanError where `links` is no profile, CalibrationError where a rank fails.
    """
    check(mesh, device, links)
    effort, name = effort or (CUDA if device == "cuda" else Effort()), name or device
    if dist.is_initialized():
        return _measured(mesh, device, effort, name, links)
    if not is_launched():
        return _on_own_ranks(mesh, device, effort, name, links)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKENDS[device])
    try:
        return _measured(mesh, device, effort, name, links)
    finally:
        dist.destroy_process_group()


def measured_anew(profile: Profile, device: str, effort: Effort) -> Profile:
    """Return a measured profile with what one device computes measured again, on the ranks that call this; its links
    stay.

    A machine is not as fast at all times: who shares it, and how warm it is, changes over minutes.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    own = computing(Timer(torch.device(device), effort), _stamp(device), local_ranks)
    return _of_first_rank({**profile, **own}, device)


def is_launched() -> bool:
    """Return whether torchrun started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def check(mesh: Mesh | int, device: str, links: str | None = None) -> None:
    """Raise InputError for a device or a number of ranks with which nothing can be measured."""
    if device not in BACKENDS:
        raise InputError(f"device {device!r} is not known; calibrate measures {' or '.join(map(repr, BACKENDS))}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' is not available here; use device 'cpu', or a machine and a torch with CUDA.")
    ranks = mesh if isinstance(mesh, int) else mesh.num_devices
    if dist.is_initialized():
        ranks = dist.get_world_size()
    elif is_launched():
        ranks = int(os.environ["WORLD_SIZE"])
    elif device == "cuda" and ranks > torch.cuda.device_count():
        raise InputError(f"{ranks} ranks need as many devices, found {torch.cuda.device_count()}; ask for fewer ranks.")
    if ranks < 1 or (ranks < 2 and links is None):
        raise InputError(
            f"{ranks} rank has no collective to measure; use at least 2 ranks, or torchrun, or give one rank the links "
            "of a known profile (links='h100', --links h100)."
        )
    if ranks > 1 and links is not None:
        raise InputError(f"links={links!r} with {ranks} ranks, which measure their links; leave it out, or use 1 rank.")
    if links is not None:
        load(links)
    if isinstance(mesh, Mesh) and mesh.num_devices != ranks:
        raise InputError(
            f"the mesh {mesh} has {mesh.num_devices} devices, but there are {ranks} ranks; make them equal."
        )


def _on_own_ranks(mesh: Mesh | int, device: str, effort: Effort, name: str, links: str | None) -> Profile:
    """Start ranks on this host, measure, and end them."""
    ranks = mesh if isinstance(mesh, int) else mesh.num_devices
    try:
        return on_ranks(World(ranks, device), _measured, (mesh, device, effort, name, links))
    except RankError as error:
        raise CalibrationError(str(error)) from None


def _measured(mesh: Mesh | int, device: str, effort: Effort, name: str, links: str | None) -> Profile:
    """Measure a profile on the running process group."""
    ranks, stamp = dist.get_world_size(), _stamp(device)
    timer = Timer(torch.device(device), effort)
    if links is not None:
        return {"name": name, **computing(timer, stamp, 1), **links_of(links)}
    node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if isinstance(mesh, int):
        mesh = Mesh({"node": ranks // node, "device": node})
    axes = _axes_by_place(mesh, node)
    device_mesh = init_device_mesh(device, mesh.sizes, mesh_dim_names=mesh.names)
    with use_mesh(device_mesh, join_axes(device_mesh, mesh.joined)):
        levels = [_level(place, found, mesh, timer) for place, found in axes.items()]
    # A collective over several links uses one protocol: all links list the same.
    protocols = max((PROTOCOLS[len(level.fit.lines)] for level in levels), key=len)
    innermost = next(axis for axis in reversed(mesh.names) if mesh.size(axis) > 1)
    taken = stamp.number(
        1 - timer.hidden_share(device_mesh.get_group(innermost)),
        f"all_reduce of {format_bytes(effort.message_bytes[-1])} overlapped with matmuls that take as long",
    )
    profile = {
        "name": name,
        **computing(timer, stamp, min(node, ranks)),
        "links": [
            _link(level, f"{BACKENDS[device]} {level.name}", protocols, stamp, None if level is levels[-1] else node)
            for level in levels
        ],
        "communication_share": taken,
    }
    return _of_first_rank(profile, device)


def _stamp(device: str) -> Stamp:
    """Return the origin of measurements: device, number of ranks, load and date.

    The load is read before measuring; later it includes the ranks' own.
    """
    ranks, load_before, today = dist.get_world_size(), os.getloadavg()[0], datetime.date.today().isoformat()
    return Stamp(
        f"measured: {device_name(device)}, {ranks} rank{'s' * (ranks > 1)} (load {load_before:.1f}), {today}, "
        "autopar calibrate"
    )


def _of_first_rank(profile: Profile, device: str) -> Profile:
    """Return the profile as the first rank has it, whose memory and load count; checked."""
    answer = [profile]
    dist.broadcast_object_list(answer, device=torch.device(device))
    parse(answer[0])
    return answer[0]


def _axes_by_place(mesh: Mesh, node: int) -> dict[str, dict[str, Level]]:
    """Return the axes, and joined ones, whose groups lie inside a node, and those that have one member in each node."""
    places = (Link(IN_NODE, node, 0.0, 1.0), Link(BETWEEN_NODES, None, 0.0, 1.0))
    found: dict[str, dict[str, Level]] = {place.name: {} for place in places}
    for axis in mesh.names:
        levels = levels_of(places, mesh, axis)
        if len(levels) > 1:
            raise InputError(
                f"axis {axis!r} of {mesh} lies on both sides of a node of {node} devices; give it as two axes, one "
                f"inside a node and one between nodes."
            )
        for level in levels:
            found[level.link.name][axis] = level
    for name in mesh.joined:
        levels = levels_of(places, mesh, name)
        if len(levels) == 1:
            found[levels[0].link.name][name] = levels[0]
    return {place: axes for place, axes in found.items() if axes}


def _level(place: str, axes: Mapping[str, Level], mesh: Mesh, timer: Timer) -> _Level:
    """Measure the collectives of every axis that runs over one link, and fit them together (in `use_mesh`)."""
    samples: dict[str, list[Sample]] = defaultdict(list)
    few = []
    for axis, level in axes.items():
        others, size = _other_axes(mesh, axis), axis_of(axis).size
        measured = timer.collectives(axis_of(axis), None if others is None else axis_of(others))
        for (collective, num_bytes), seconds in measured.items():
            if num_bytes == FEW_BYTES:
                steps, share = steps_and_share(collective, "tree", level, size)
                few.append(Sample(steps, share * num_bytes, seconds, collective))
                continue
            steps, share = steps_and_share(collective, "ring", level, size)
            samples[collective].append(Sample(steps, share * num_bytes, seconds, collective))
    sizes = " and ".join(f"{axis}={level.outer}" for axis, level in axes.items())
    found = fit([sample for each in samples.values() for sample in each])
    return _Level(place, sizes, samples, found, few_numbers(few, samples["all_reduce"], found))


def _other_axes(mesh: Mesh, axis: str) -> str | None:
    """Return the other axes of more than one rank, given this one or these joined ones; None if there are none."""
    taken = mesh.positions(axis)
    left = [position for position, size in enumerate(mesh.sizes) if size > 1 and position not in taken]
    name = joined_name(mesh.names, left)
    return name if len(left) == 1 or name in mesh.joined else None


def few_numbers(few: Sequence[Sample], samples: Sequence[Sample], found: Fit) -> Protocol | None:
    """Return a tree that takes the seconds of all-reduces of a few numbers, and those of the fit before its least
    message.

    None where they are not clearly faster than that message. The fit's factors for all-reduces are taken out of it.
    """
    least = min(samples, key=lambda sample: sample.num_bytes)
    steps, num_bytes = few[0].steps, few[0].num_bytes
    fast, slow = steps * statistics.fmean(sample.seconds / sample.steps for sample in few), found.seconds(least)
    if fast > WORTH * slow:
        return None
    most = found.bytes_per_s * found.efficiencies.get("all_reduce", 1.0)
    bytes_per_s = min(most, (least.num_bytes - num_bytes) / (slow - fast))
    step_s = max(0.0, fast - num_bytes / bytes_per_s) / steps
    slower = found.latencies.get("all_reduce", 1.0)
    return Protocol("few numbers", "tree", 0.0, step_s / slower, bytes_per_s / most)


def _link(level: _Level, name: str, protocols: Sequence[str], stamp: Stamp, devices: int | None) -> Profile:
    """Return the JSON of a link, with the deviation of each collective from the fit."""
    how = f"fit of {', '.join(level.samples)} over {level.axes}, {level.name}"
    return {
        "name": name,
        "devices": None if devices is None else {"value": devices, "source": f"{stamp.text}: ranks of one node"},
        "bytes_per_s": stamp.number(level.fit.bytes_per_s, f"{how}, sent per rank"),
        "protocols": [
            {
                "name": protocol.name,
                "algorithm": protocol.algorithm,
                "base_latency_s": stamp.number(protocol.base_latency_s, how),
                "step_latency_s": stamp.number(protocol.step_latency_s, how),
                "efficiency": stamp.number(protocol.efficiency, how),
            }
            for protocol in level.protocols(protocols)
        ],
        "efficiencies": {
            collective: stamp.number(level.fit.efficiencies.get(collective, 1.0), how) for collective in level.samples
        },
        "latencies": {
            collective: stamp.number(level.fit.latencies.get(collective, 1.0), how) for collective in level.samples
        },
        "fit_error": {
            collective: stamp.number(
                relative_error(level.fit.seconds, samples), f"root mean square of {len(samples)} relative errors"
            )
            for collective, samples in level.samples.items()
        },
    }
