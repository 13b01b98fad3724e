"""A plan's formulas as sympy expressions, and the plan at another batch, sequence, depth or mesh, without a model.

The cost of a collective is looked up again if an axis has another size, as that may take it over other links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from autopar.costs.hardware.collectives import lateness, pieces
from autopar.costs.hardware.load import load
from autopar.costs.hardware.overlap import GATHERING
from autopar.costs.hardware.profile import Hardware
from autopar.costs.plans.answers import Repriced
from autopar.costs.plans.expressions import EXACT, Numbers, evaluate
from autopar.costs.plans.formula_names import (
    COLLECTIVES,
    FIXED,
    LAST_HOST,
    MEMORY,
    SIDES,
    is_rate,
    public,
    rate_of,
    rates,
    whole_texts,
)
from autopar.errors import PlanError
from autopar.files.schema import MAX_WHOLE
from autopar.ir.sharding.mesh import Mesh
from autopar.planning.settings import context_of
from autopar.views.formulas.symbols import axis_symbols

if TYPE_CHECKING:
    from autopar.costs.plans.plan import Plan


def rate(collective: str, axis: str, mesh: Mesh, hardware: Hardware) -> str:
    """Return the seconds of a collective in `bytes`: the least of its pieces; of LAST_HOST those for which ranks
    wait.
    """
    if collective == LAST_HOST:
        return repr(lateness(mesh, axis, hardware))
    return _least_of(pieces(collective, mesh, axis, hardware), "bytes")


def exposed_share(collective: str, axis: str, together: int, passes: int, mesh: Mesh, hardware: Hardware) -> str:
    """Return `Message.exposed` in terms of the moved `part` of parameters and of hidden computing (`OVERLAPPED`)."""
    computing, latency, size = SIDES[collective == GATHERING]
    found = pieces(collective, mesh, axis, hardware)
    if not any(map(any, found)):
        return "1"
    moving = f"{passes}/{together}*num_weights*{_least_of(found, f'({together}*part*{size}/num_weights)')}"
    exposed = f"1 - ({computing}/{mesh.num_devices} + {latency})/({moving})"
    return f"Max({hardware.communication_share!r}, {exposed})"


def _least_of(found: Sequence[tuple[float, float]], num_bytes: str) -> str:
    texts = [f"{latency!r} + {seconds_per_byte!r}*{num_bytes}" for latency, seconds_per_byte in found]
    return f"({texts[0]})" if len(texts) == 1 else f"Min({', '.join(texts)})"


def formula(plan: Plan, name: str) -> Any:
    """Return the formula of this name as a sympy expression in positive integer symbols.

    The times of collectives are those on the plan's links, even if the expression has an axis's size as a symbol.

    Raises:
        PlanError: The plan has no such formula; the message lists the available names.
    """
    _check_formulas(plan)
    if not isinstance(name, str) or name not in public(plan.formulas):
        raise PlanError(f"the plan has no formula {name!r}; it has {_list(public(plan.formulas))}.")
    import sympy  # only who asks for an expression waits for it

    symbols = {each: sympy.Symbol(each, positive=True, integer=True) for each in plan.symbols}
    functions = {"Max": sympy.Max, "Min": sympy.Min, "ceiling": sympy.ceiling, "floor": sympy.floor}
    numbers = Numbers(lambda value: sympy.Integer(value) if isinstance(value, int) else sympy.Float(value), functions)
    return evaluate(plan.formulas[name], symbols, numbers.with_functions(rates(plan.formulas, symbols, numbers)))


def reprice(plan: Plan, values: Mapping[str, int]) -> Repriced:
    """Return the plan with other values of its symbols.

    Raises PlanError for a symbol that the plan has not or that cannot vary, and for values at which it does not fit.
    """
    _check_formulas(plan)
    _check(plan, values)
    at = {**plan.symbols, **values}
    exact = {name: Fraction(value) for name, value in at.items()}
    _check_whole(plan, exact)
    formulas = {**plan.formulas, **_new_rates(plan, at)}
    numbers = EXACT.with_functions(rates(formulas, exact, EXACT))
    found = {name: evaluate(formulas[name], exact, numbers) for name in public(formulas)}
    moved = [name.partition("/")[::2] for name in found if name.partition("/")[0] in COLLECTIVES and "/" in name]
    return Repriced(
        symbols=at,
        seconds=float(found["seconds"]),
        flops=float(found["flops"]),
        traffic={(collective, axis): int(found[f"{collective}/{axis}"]) for collective, axis in moved},
        memory={
            name: int(value) for name, value in found.items() if name.endswith("_bytes") or name.startswith(MEMORY)
        },
    )


def _check_formulas(plan: Plan) -> None:
    if not plan.formulas:
        raise PlanError("the plan was saved without formulas; make it again from its model.")


def _check(plan: Plan, values: Mapping[str, int]) -> None:
    axes = axis_symbols(plan.mesh)
    for name, value in values.items():
        if f"{FIXED}{name}" in plan.formulas:
            reason = plan.formulas[f"{FIXED}{name}"]
            raise PlanError(f"the model cannot take another {name}: {reason}. Change the model and plan again.")
        if name not in plan.symbols:
            raise PlanError(f"the plan has no symbol {name!r}; it has {_list(plan.symbols)}. Plan again for others.")
        least = 2 if name in axes else 1
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_WHOLE:
            raise PlanError(f"{name}={value!r}; give a whole number of at least {least}, at most {MAX_WHOLE}.")


def _check_whole(plan: Plan, at: Mapping[str, Fraction]) -> None:
    sizes = {part: evaluate(part, at) for part in whole_texts(plan.formulas)}
    wrong = [f"{part} = {size}" for part, size in sizes.items() if size.denominator != 1 or size < 1]
    if wrong:
        given = ", ".join(f"{name}={value}" for name, value in at.items())
        raise PlanError(
            f"the plan does not fit {given}: {_list(wrong[:4], quote=False)} must be whole; "
            "give sizes that divide, or plan again."
        )


def _new_rates(plan: Plan, at: Mapping[str, int]) -> dict[str, str]:
    """Return the times of collectives on a mesh with these axis sizes."""
    symbols = axis_symbols(plan.mesh)
    mesh = Mesh({axis: at.get(symbol, 1) for symbol, axis in symbols.items()}, plan.mesh.hardware)
    if mesh.sizes == plan.mesh.sizes:
        return {}
    names = [name for name in plan.formulas if is_rate(name)]
    hardware = context_of(plan).space.hardware if plan.context is not None else load(plan.mesh.hardware)
    if any(_rate_of(name, plan.mesh, hardware) != plan.formulas[name] for name in names):
        raise PlanError(
            f"the plan was priced on other hardware than the profile {plan.mesh.hardware!r}, which is not in its file; "
            "plan again for other axis sizes, or give sizes of dims and layers alone."
        )
    return {name: _rate_of(name, mesh, hardware) for name in names}


def _rate_of(name: str, mesh: Mesh, hardware: Hardware) -> str:
    collective, axis, together, passes = rate_of(name)
    if together:
        return exposed_share(collective, axis, together, passes, mesh, hardware)
    return rate(collective, axis, mesh, hardware)


def _list(names: Mapping[str, object] | Sequence[str], quote: bool = True) -> str:
    return ", ".join(repr(name) if quote else name for name in names)
