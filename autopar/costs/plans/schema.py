"""Schema of a plan's JSON: a table of its fields, and the conditions between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from autopar.costs.plans.comparison import COMPARISON
from autopar.costs.plans.expressions import MAX_CHARACTERS
from autopar.costs.plans.formula_names import check_formulas
from autopar.costs.plans.workload import WORKLOAD
from autopar.errors import AutoparError, PlanError
from autopar.files.schema import Flag, ListOf, Malformed, Maybe, OneOf, Real, Record, Row, Table, Text, Whole
from autopar.ir.sharding.mesh import MAX_AXES, Mesh

FORMAT = 2
PIPELINE_FORMAT = "pipeline format"
"""The field that plans of pipelines have in place of "format"."""
TEXT, SECONDS, BYTES = Text(), Real(0), Whole(0)
MESH = Record({"axes": Table(Whole(1, 10**9), least=1, most=MAX_AXES), "hardware": TEXT})
MOVED = Row((TEXT, TEXT, BYTES, SECONDS, Flag()))
ROW = Record(
    {"name": TEXT, "kind": TEXT, "module": TEXT, "operation": TEXT, "roles": ListOf(TEXT, most=MAX_AXES)}
    | {"layout": TEXT, "seconds": SECONDS, "transfers": ListOf(MOVED)},
    optional={"forward_seconds": SECONDS, "backward_seconds": SECONDS, "recompute_seconds": SECONDS}
    | {"saved_bytes": BYTES, "stored_bytes": BYTES, "segment": TEXT, "pinned": Flag()},
)
MEMORY = Record(
    {"parts": Table(BYTES)},
    optional={"timeline": ListOf(Record({"name": TEXT, "backward": Flag(), "num_bytes": BYTES}))},
)
KEPT_WHOLE = Record(
    {"operation": TEXT, "reason": TEXT, "calls": Whole(1), "first": TEXT, "module": TEXT, "seconds": SECONDS}
    | {"seconds_share": Real(0), "num_bytes": BYTES},
    optional={"flops_share": Maybe(Real(0))},
)
RESERVED = Record(
    {"bytes": BYTES, "allocator_factor": Real(1), "context_bytes": BYTES}
    | {"communicator_bytes": BYTES, "workspace_bytes": BYTES},
    optional={"graph_bytes": BYTES},
)
"""Memory of a device besides tensors, with the bytes of both."""
PLAN = Record(
    {
        "format": Whole(FORMAT, FORMAT),
        "mesh": MESH,
        "fingerprint": TEXT,
        "choices": Table(TEXT),
        "descriptions": Table(TEXT),
        "rows": ListOf(ROW),
        "seconds": SECONDS,
        "bound": SECONDS,
        "peak_bytes": BYTES,
        "traffic": ListOf(Row((TEXT, TEXT, BYTES))),
        "solver": TEXT,
        "notes": ListOf(TEXT),
        "memory": Maybe(MEMORY),
    },
    optional={
        "memory_limit": Maybe(BYTES),
        "reserved": RESERVED,
        "imbalance": Real(1),
        "unruled": Maybe(Table(TEXT)),
        "kept_whole": ListOf(KEPT_WHOLE),
        "recompute": Table(OneOf(("none", "selective", "full_save_collectives", "full", "offload"))),
        "prefetch": Whole(0, 2),
        "mode": OneOf(("auto", "semi_auto", "manual")),
        "reduce_each": Flag(),
        "zigzag_axes": ListOf(TEXT),
        "offload": OneOf(("none", "optimizer", "activations", "both")),
        "host": Table(BYTES),
        "waits": Table(SECONDS),
        "simulated": SECONDS,
        "host_seconds": Real(),
        "multiplier": SECONDS,
        "workload": Maybe(WORKLOAD),
        "comparison": Maybe(COMPARISON),
        "symbols": Table(Whole(1), most=1000),
        "formulas": Table(Text(MAX_CHARACTERS), most=1000),
    },
)
"""The fields of format 2."""


@contextmanager
def refusing(what: str, writer: str) -> Iterator[None]:
    """Turn errors inside the block into a PlanError that says what the file is not, and what writes such files."""
    try:
        yield
    except (Malformed, AutoparError) as error:
        raise PlanError(f"not a {what}: {error}; give what {writer} wrote.") from error


def check_between(values: Mapping[str, Any], mesh: Mesh) -> None:
    """Raise PlanError for what cannot hold together: rows of another number of axes, formulas without a value."""
    for number, row in enumerate(values["rows"]):
        if len(row["roles"]) != mesh.ndim:
            raise PlanError(f"rows[{number}].roles has {len(row['roles'])} words for the {mesh.ndim} axes of the mesh")
        placements = row["layout"].split()
        if len(placements) != mesh.ndim and (placements or row["kind"] == "parameter"):
            raise PlanError(f"rows[{number}].layout is {row['layout']!r} for the {mesh.ndim} axes of the mesh")
    check_formulas(values.get("formulas", {}), values.get("symbols", {}), mesh)
