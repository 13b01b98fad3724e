"""Plans stored in a folder, so that a repeated request is not solved again.

The name of a plan's file is a key: a hash of all that the plan is made from. These are the decisions with their
candidate strategies and costs (which follow from the program, the rules and the hardware), the mesh, the request, the
layouts in which parameters are stored already, and autopar's own code. So a plan that is found is the plan that would
be made. It is looked at before it is used all the same: a file that is damaged, or not one of ours, is planned over.

The first rank alone reads and writes. Files are replaced at once (`autopar.files.replace`), so that processes that
write the same one do not meet.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

import autopar.runtime
import autopar.strategies
from autopar.compiler.tiles import Spaces, plan_as_memory_asks, tiles_of
from autopar.costs.memory.model import MemoryModel
from autopar.costs.plans.plan import Plan
from autopar.costs.space.call_candidates import Candidates
from autopar.costs.space.space import Space
from autopar.errors import AutoparError, warn_user
from autopar.files.reading import read_json, read_text
from autopar.files.replace import replace_text
from autopar.files.schema import Malformed, Record, Text, Whole
from autopar.ir.program.calls import module_of
from autopar.ir.program.program import Program
from autopar.ir.sharding.layout import Layout
from autopar.planning.best_plan import warn_of_plan
from autopar.planning.memory_limit.least_stored import least_stored
from autopar.planning.offload import of_whole, plan_as_offload_asks
from autopar.planning.pipeline.plan import PipelinePlan
from autopar.planning.pipeline.planner import plan_pipeline, stage_space
from autopar.planning.pipeline.request import PipelineRequest
from autopar.planning.pipeline.stages.blocks import blocks_of
from autopar.planning.pipeline.stages.splitting import split
from autopar.planning.record import choices_of
from autopar.planning.request import PlanRequest

VARIABLE = "AUTOPAR_PLAN_CACHE"
"""The environment variable that names the folder where no argument does."""
FORMAT = 1
_ENTRY = Record({"cached_plan": Whole(FORMAT, FORMAT), "key": Text(), "sha256": Text(), "plan": Text(2**27)})

Made = TypeVar("Made", Plan, PipelinePlan)


@dataclass(frozen=True, slots=True)
class PlanCache:
    """A folder of plans; None keeps nothing."""

    folder: Path | None = None

    @classmethod
    def of(cls, specified: str | os.PathLike[str] | None) -> PlanCache:
        """Return the user-specified folder, or that of the environment."""
        found = specified or os.environ.get(VARIABLE)
        return cls(Path(found) if found else None)

    def plan(
        self, request: PlanRequest, space: Space, spaces: Spaces, storage: Mapping[str, Layout] | None = None
    ) -> Plan:
        """Return the plan of `_planned`, read from the folder if it is there; a plan that was read has no context."""

        def check(plan: Plan) -> None:
            tiles = tiles_of(plan, space.program, request.tiles, space.mesh)
            fitting = (space if tiles == request.tiles else spaces(tiles)).with_zigzag_axes(plan.zigzag_axes)
            warn_of_plan(request, plan, fitting, choices_of(plan, fitting), stored=bool(storage))

        key = _key(_of_space(space), _of_request(request), storage or {}) if self.folder else ""
        with request.settings.explaining():
            found = self._read(key, Plan.from_json, check)
            return self._kept(key, _planned(request, space, spaces, storage)) if found is None else found

    def pipeline_plan(self, request: PipelineRequest) -> PipelinePlan:
        """Return the plan of `plan_pipeline`, read from the folder if it is there."""

        def check(plan: PipelinePlan) -> None:
            blocks = blocks_of(request.program, plan.schedule.num_stages)
            for program, stage in zip(split(request.program, blocks, plan.starts), plan.stages, strict=True):
                stage_space(request, program, stage.plan)

        key = ""
        if self.folder:
            whole = request.space(request.program, {})
            named = {each.name: getattr(request, each.name) for each in fields(request)}
            specified = {name: each for name, each in named.items() if name not in ("program", "wanted")}
            key = _key(_of_space(whole), _of_request(request.wanted), specified)
        found = self._read(key, PipelinePlan.from_json, check)
        return self._kept(key, plan_pipeline(request)) if found is None else found

    def _read(self, key: str, read: Callable[[str], Made], check: Callable[[Made], None]) -> Made | None:
        """Return the plan of a key; None if there is none, with a warning if its file holds no plan that fits."""
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            entry = read_json(read_text(path))
            _ENTRY.check(entry, "")
            text = entry["plan"]
            if entry["key"] != key or entry["sha256"] != hashlib.sha256(text.encode()).hexdigest():
                raise Malformed("it was changed since it was written")
            found = read(text)
            check(found)
        except (Malformed, AutoparError) as error:
            warn_user(f"{path} is no plan for this ({error}); it is planned anew and replaced.")
            return None
        return found

    def _kept(self, key: str, made: Made) -> Made:
        """Return a plan, written to the folder."""
        path = self._path(key)
        if path is None:
            return made
        text = made.to_json()
        entry = {"cached_plan": FORMAT, "key": key, "sha256": hashlib.sha256(text.encode()).hexdigest(), "plan": text}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps(entry))
        except OSError as error:
            warn_user(f"the plan cannot be kept in {path} ({error}); it is used all the same.")
        return made

    def _path(self, key: str) -> Path | None:
        return None if self.folder is None else self.folder / f"{key}.json"


def _planned(request: PlanRequest, space: Space, spaces: Spaces, storage: Mapping[str, Layout] | None) -> Plan:
    """Return the best plan, in tiles if memory requires them, and with state on the host if requested."""

    def priced(given: Space, requested: PlanRequest) -> Space:
        """Return the space for an optimizer that offloads, or does not, as requested."""
        offloads = requested.offloads_optimizer
        if offloads == (given.optimizer.offload is not None):
            return given
        num_devices = given.mesh.num_devices
        return given.with_optimizer(
            requested.offloading(given.hardware, num_devices) if offloads else requested.optimizer
        )

    def plan_for(requested: PlanRequest) -> Plan:
        return plan_as_memory_asks(
            requested, priced(space, requested), lambda tiles: priced(spaces(tiles), requested), storage
        )

    return plan_as_offload_asks(request, of_whole(plan_for, lambda: least_stored(MemoryModel(space))))


def _key(*parts: Any) -> str:
    """Return a name for all that plans are made from, equal in every process."""
    text = json.dumps([_code(), torch.__version__, *map(_plain, parts)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _of_space(space: Space) -> list[Any]:
    """Return all of a space that its plans depend on: program, mesh, hardware, and decisions with their costs."""
    digests: dict[int, str] = {}
    decisions = []
    for each in space.decisions:
        if id(each.candidates) not in digests:
            digests[id(each.candidates)] = _digest_of(each.candidates)
        decisions.append(
            (each.name, each.kind, digests[id(each.candidates)], module_of(each.node), sorted(each.roles.items()))
        )
    return [space.program.fingerprint, _of_program(space.program), space.mesh, space.hardware, decisions]


def _digest_of(candidates: Candidates) -> str:
    digest = hashlib.sha256("\n".join(map(str, candidates.strategies)).encode())
    for seconds in (candidates.seconds, candidates.forward_seconds):
        digest.update(seconds.tobytes())
    return digest.hexdigest()


def _of_program(program: Program) -> list[Any]:
    """Return the properties of a program, besides its graph, that a plan depends on."""
    return [program.parameters, program.buffers, program.assumed, program.tileable, program.mlp_tileable]


def _of_request(request: PlanRequest) -> PlanRequest:
    """Return the request without what its plan does not depend on, with sizes in bytes however they were written.

    The space has the profile, under whatever name it was given.
    """
    settings = request.settings
    memory = replace(settings.memory.limited(settings.limit), host_limit=settings.memory.host_limit_bytes)
    search = replace(settings.search, cache=None, max_axes=None)
    return replace(request, hardware=None, warm_start=None, settings=replace(settings, memory=memory, search=search))


def _plain(value: Any) -> Any:
    """Return a value as JSON that is equal for equal values."""
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, *((each.name, _plain(getattr(value, each.name))) for each in fields(value))]
    if isinstance(value, Mapping):
        return sorted(([_plain(name), _plain(each)] for name, each in value.items()), key=repr)
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=repr)
    if isinstance(value, list | tuple) and not isinstance(value, Layout):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@cache
def _code() -> str:
    """Return a hash of autopar itself, so that another version plans anew."""
    digest = hashlib.sha256()
    for file in _files((autopar.__path__, autopar.strategies.__path__, autopar.runtime.__path__)):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _files(packages: Iterable[Sequence[str]]) -> Iterator[Path]:
    for folder in (Path(each) for paths in packages for each in paths):
        yield from sorted(each for each in folder.rglob("*") if each.suffix in (".py", ".json"))
