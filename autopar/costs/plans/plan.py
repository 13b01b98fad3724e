"""The Plan: every choice, what it is predicted to cost, and for which graph and mesh it was made.

A plan is plain JSON: it is saved, compared and loaded again without solving.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from autopar.console.units import format_bytes, format_seconds
from autopar.costs.hardware.reserved import NOTHING, Reserved
from autopar.costs.plans.answers import Repriced
from autopar.costs.plans.comparison import Comparison, comparison_of
from autopar.costs.plans.decision_rows import Instant, KeptWhole, MemoryUse, PlanRow, row_of
from autopar.costs.plans.schema import FORMAT, PIPELINE_FORMAT, PLAN, check_between, refusing
from autopar.costs.plans.strategy_names import implementations_of, is_saved, layout_named
from autopar.costs.plans.views import view
from autopar.costs.plans.workload import Workload, workload_of
from autopar.errors import PlanError
from autopar.files.reading import read_json, read_text
from autopar.files.replace import replace_text
from autopar.ir.sharding.layout import Layout
from autopar.ir.sharding.mesh import Mesh

if TYPE_CHECKING:
    from torch import nn

    from autopar.costs.plans.answers import ParallelizePlan, TensorParallelPlan, TorchtitanArguments, Verification
    from autopar.costs.plans.difference import Difference
    from autopar.costs.plans.explanation import Explanation
    from autopar.costs.timeline.values import Timeline
    from autopar.ir.sharding.annotation import Annotation


Offloaded = Literal["none", "optimizer", "activations", "both"]


class Context(Protocol):
    """Context that a plan was made from (`planning.settings.PlanContext`); the plan carries it without looking inside.

    Code that answers for a plan gets it by `planning.settings.context_of`.
    """

    @property
    def choices(self) -> tuple[int, ...]:
        """The number of the chosen strategy, per decision."""
        ...


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """A choice per decision with predictions. `print(plan)` is a table; `save` and `load` keep it as JSON.

    `step_seconds` is the predicted step, `seconds` the sum of costs that the solver has made least with the
    `host_seconds`, `bound` a proven lower bound of both, `peak_bytes` the predicted memory per device, `traffic` bytes
    per (collective, axis) and step in NCCL's convention.
    """

    mesh: Mesh
    """Axes with their sizes, and the hardware profile."""
    fingerprint: str
    """Hash of the graph that the plan is for."""
    choices: Mapping[str, str]
    """Decision → the name of its strategy."""
    descriptions: Mapping[str, str]
    """Decision → what it decides on, for the difference between two graphs."""
    rows: tuple[PlanRow, ...]
    """A row per decision, in the order of the graph."""
    seconds: float
    """Sum of the costs of all rows, which the solver minimizes."""
    bound: float
    """Seconds that every plan takes at least; 0 if no bound is known."""
    peak_bytes: int
    """Bytes of tensors per device at the peak."""
    traffic: Mapping[tuple[str, str], int]
    """Collective and axis → bytes of a step in NCCL's convention."""
    solver: str
    """Method that found the plan, such as "elimination"."""
    memory_limit: int | None = None
    """Bytes of a device that the plan keeps to, with what is `reserved`."""
    reserved: Reserved = NOTHING
    """Memory of a device besides tensors; nothing of a stage, which shares its device."""
    imbalance: float = 1.0
    """Ratio of the busiest device's expert rows to its equal share that is planned for."""
    unruled: Mapping[str, str] | None = None
    """Call that no rule fits → the reason; None if unknown."""
    kept_whole: tuple[KeptWhole, ...] = ()
    """The operations of `unruled` calls with their shares of the step, the longest first."""
    notes: tuple[str, ...] = ()
    """Remarks on the plan, in sentences."""
    memory: MemoryUse | None = None
    """Memory at the peak by kind, and over a step."""
    recompute: Mapping[str, str] = field(default_factory=dict)
    """Segment → "none", "selective", "full_save_collectives", "full" or "offload"; empty if the search needed none."""
    prefetch: int = 0
    """Number of layers ahead of their use that weights are gathered, forward and backward; 0 if none is gathered."""
    mode: str = "auto"
    """"auto", "semi_auto", or "manual": the plan is what annotations say, and nothing was searched."""
    reduce_each: bool = False
    """True if each micro-batch reduces the gradients of sharded weights (ZeRO-2), and not the step (ZeRO-1)."""
    zigzag_axes: tuple[str, ...] = ()
    """Axes that zigzag-shard positions if they split them: causal attention divides its queries over such."""
    offload: Offloaded = "none"
    """Data on the host.

    "optimizer" (state and master copies, for `autopar.optim.OffloadedAdamW`), "activations" (of the segments whose mode
    is "offload"), or "both".
    """
    host: Mapping[str, int] = field(default_factory=dict)
    """Kind of host memory ("optimizer", "master copies", "staging", "activations") → bytes of each device."""
    waits: Mapping[str, float] = field(default_factory=dict)
    """Kind of collectives of weights ("all_gather dp forward"; "others" are those not listed) → the share of them that
    the simulated step waits for, if costs count that in place of the rule of `costs.hardware.overlap`."""
    simulated: float = 0.0
    """Seconds of the step by its timeline, of one micro-batch as `seconds`; 0 if it has not been simulated."""
    host_seconds: float = 0.0
    """Seconds that hosts add to the sum of the rows, the same for all choices.

    They are the launches for which devices wait in the simulated step, less the lateness of hosts that rows price. They
    are below zero if hosts are so far ahead of their devices that these wait for little of that.
    """
    multiplier: float = 0.0
    """The price of memory, in seconds per byte, at which the bound is proven; see `verify`."""
    workload: Workload | None = field(default=None, compare=False)
    """The model, its inputs, and the computation of one step; None for a stage, whose pipeline has it."""
    symbols: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Symbol of the formulas ("batch", "sequence", …) → its value in this plan."""
    formulas: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Quantity ("seconds", "all_reduce", …) → sympy expression in the symbols, as text.

    Symbols and formulas follow from the choices; they are made on request, and when the plan is saved.
    """
    comparison: Comparison | None = field(default=None, compare=False, repr=False)
    """The candidates of `mesh="auto"`; None of a plan on a mesh that was given."""
    context: Context | None = field(default=None, compare=False, repr=False)
    """Context that the plan was made from, while it lives in the process that made it; not saved."""

    def __repr__(self) -> str:
        step, memory = format_seconds(self.step_seconds), format_bytes(self.peak_bytes)
        return f"Plan({self.mesh}, {len(self.rows)} decisions, {step} a step, {memory} per device)"

    def __str__(self) -> str:
        return view("Plan.__str__")(self)

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step: those of its timeline, or the sum of costs if it has not been simulated."""
        return self.simulated or self.seconds

    @property
    def device_seconds(self) -> float:
        """The sum of costs without `host_seconds`: what the search has made least."""
        return self.seconds - self.host_seconds

    @property
    def gap(self) -> float:
        """Relative distance between the plan and the proven bound; 0 means proven optimal."""
        return 0.0 if self.seconds <= self.bound else (self.seconds - self.bound) / self.seconds

    @property
    def reserved_bytes(self) -> int:
        """Predicted bytes of a device: tensors at the peak and what is reserved besides."""
        return self.reserved.on_device(self.peak_bytes)

    @property
    def offloads_optimizer(self) -> bool:
        """True if the optimizer's state is on the host, where `autopar.optim.OffloadedAdamW` has to step."""
        return self.offload in ("optimizer", "both")

    @property
    def host_bytes(self) -> int:
        """Predicted bytes of host memory for each device."""
        return sum(self.host.values())

    def is_saved(self, parameter: str) -> bool:
        """Return whether a sharded parameter (its placeholder) stays gathered for the backward."""
        return is_saved(self.choices.get(parameter, ""))

    @property
    def implementations(self) -> frozenset[str]:
        """The names of implementations that calls run by."""
        return implementations_of(self.choices.values())

    def layout_of(self, decision: str) -> Layout:
        """Return the layout of a decision that is no call: of a parameter, an input, an output or a shared reshard.

        Raises PlanError for a decision that the plan has not.
        """
        if decision not in self.choices:
            raise PlanError(f"the plan has no decision {decision!r}; see plan.choices.")
        return layout_named(self.choices[decision])

    def with_formulas(self) -> Plan:
        """Return the plan with its symbols and formulas, which are built on request."""
        return view("Plan.with_formulas")(self)

    def formula(self, name: str) -> Any:
        """Return the formula `name` ("seconds", "all_reduce", "all_reduce/tp", …) as a sympy expression.

        Its symbols are positive integers.

        Raises:
            PlanError: The plan has no such formula; the message lists the available names.
        """
        return view("Plan.formula")(self.with_formulas(), name)

    def reprice(self, **values: int) -> Repriced:
        """Return the predictions with other values of the plan's symbols (batch=…, sequence=…, dp=…), without a model.

        The choices stay, so that another plan may be better there. Raises PlanError for a symbol that the plan has
        not, or values that do not divide as it splits them.
        """
        return view("Plan.reprice")(self.with_formulas(), values)

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "context"}
        values["rows"] = [asdict(row) for row in self.rows]
        values["kept_whole"] = [asdict(each) for each in self.kept_whole]
        values["memory"] = None if self.memory is None else asdict(self.memory)
        values["reserved"] = self.reserved.to_json(self.peak_bytes)
        values["workload"] = None if self.workload is None else asdict(self.workload)
        values["comparison"] = None if self.comparison is None else self.comparison.to_json()
        values["mesh"] = {"axes": dict(self.mesh.axes), "hardware": self.mesh.hardware}
        values["traffic"] = [[collective, axis, count] for (collective, axis), count in sorted(self.traffic.items())]
        return json.dumps({"format": FORMAT, **values}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from JSON text; PlanError, which names the field, where the text is no plan."""
        with refusing("plan", "Plan.save"):
            values = read_json(text)
        if isinstance(values, dict) and PIPELINE_FORMAT in values:
            raise PlanError("this is the plan of a pipeline, with a plan per stage; read it with PipelinePlan.load.")
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise PlanError(f"not a plan of format {FORMAT}; give what Plan.save of this version wrote.")
        with refusing("plan", "Plan.save"):
            PLAN.check(values, "")
            return cls.of_values(values)

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Plan:
        """Return a plan from JSON that agrees with the schema PLAN; PlanError or MeshError if it contradicts itself."""
        values = {name: value for name, value in values.items() if name != "format"}
        values["mesh"] = Mesh(values["mesh"]["axes"], values["mesh"]["hardware"])
        check_between(values, values["mesh"])
        values["traffic"] = {(collective, axis): count for collective, axis, count in values["traffic"]}
        values["rows"] = tuple(map(row_of, values["rows"]))
        if values["memory"] is not None:
            timeline = tuple(Instant(**each) for each in values["memory"].get("timeline", ()))
            values["memory"] = MemoryUse(values["memory"]["parts"], timeline)
        values["reserved"] = Reserved.of_json(values.get("reserved"))
        values["reserved"].check_can_be_written(values["peak_bytes"])
        values["workload"] = workload_of(values.get("workload"))
        values["comparison"] = comparison_of(values.get("comparison"), values["mesh"].hardware)
        values["kept_whole"] = tuple(KeptWhole(**each) for each in values.get("kept_whole", ()))
        values["notes"], values["zigzag_axes"] = tuple(values["notes"]), tuple(values.get("zigzag_axes", ()))
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the plan, with its formulas, to a JSON file; if that fails (OSError), one that is there stays."""
        replace_text(path, self.with_formulas().to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a JSON file; PlanError where it cannot be read or is no plan."""
        with refusing(f"plan: {str(path)!r}", "Plan.save"):
            text = read_text(path)
        return cls.from_json(text)

    def to_html(self, path: str | Path) -> None:
        """Write the plan as one page that a browser opens without a network."""
        replace_text(path, view("Plan.to_html")(self))

    def to_trace(self, path: str | Path) -> None:
        """Write the predicted step as JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
        replace_text(path, view("Plan.to_trace")(self))

    def explain(self, name: str, alternatives: bool = True) -> Explanation[Plan]:
        """Explain a decision by name: its cost, the runner-up and the cost of the runner-up.

        The name is that of a module, a parameter or an operation, with `*` where it means one alone. `alternatives`
        adds what every other role on every axis would take; under a memory limit some are lower bounds. Raises
        InputError for a name that means none or several.
        """
        return view("Plan.explain")(self, name, alternatives)

    def timeline(self) -> Timeline:
        """Return the simulated timeline of the predicted step: it shows overlap, while `seconds` is a sum.

        With several micro-batches, it is that of one. Raises PlanError for a plan that was loaded.
        """
        return view("Plan.timeline")(self)

    def diff(self, other: Plan) -> Difference:
        """Return the differences from this plan to another one; `print` shows them as tables."""
        return view("Plan.diff")(self, other)

    def what_if(self, *specified: str | Annotation, **options: Any) -> Plan:
        """Return the plan with one more annotation on the model, as by `annotate(model, pattern, **options)`.

        >>> plan.what_if("layers.*.mlp.down_proj", tp="row")  # doctest: +SKIP
        """
        return view("Plan.what_if")(self, specified, options)

    def verify(self) -> Verification:
        """Check all that the plan claims, without solving; PlanError where a claim does not hold."""
        return view("Plan.verify")(self)

    def compared_with(self, *others: Any) -> Plan:
        """Return the plan with other plans next to its candidates, in its table and on its page.

        `others` are plans of the same model and batch, each a `Plan`, a `PipelinePlan`, or a `Contender`.
        """
        return view("Plan.compared_with")(self, others)

    def attach(self, model: nn.Module, example_inputs: tuple[Any, ...] | Mapping[str, Any], **options: Any) -> Plan:
        """Return a loaded plan with its model, so that its methods work; options as for `autopar.plan`."""
        return view("Plan.attach")(self, model, example_inputs, **options)

    def tp_plan(self, axis: str | None = None) -> TensorParallelPlan:
        """Return the plan as a `tp_plan` of Hugging Face, for one mesh axis, with what is lost.

        docs/how-to/other-systems.md shows its use. Raises PlanError where several axes split matrices and `axis` is
        not given, or for a plan that was loaded.
        """
        return view("Plan.tp_plan")(self, axis)

    def parallelize_plan(self, axis: str | None = None) -> ParallelizePlan:
        """Return the plan for torch's `parallelize_module` (one axis) and `fully_shard`; raises as `tp_plan`."""
        return view("Plan.parallelize_plan")(self, axis)

    def torchtitan_args(self) -> TorchtitanArguments:
        """Return the arguments of torchtitan that come nearest to the plan, with what is lost."""
        return view("Plan.torchtitan_args")(self)
