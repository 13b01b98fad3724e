"""One walk over a program that lays out its space of plans.

A tensor moved to one layout for several consumers is moved once, in the cost and in the graph: its consumers hang on a
hub. Consumers that are the same operation (query, key and value) share a second hub when others stand beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import fx

from autopar.candidates import Menu, call_menu, padded_factors, split_layouts, whole_menu
from autopar.cost import is_view, local_elements, optimizer_seconds, parameter_bytes
from autopar.hardware import Hardware
from autopar.layout import Layout, replicated
from autopar.mesh import Mesh
from autopar.operation import Call
from autopar.program import Program, TensorInfo, tensor_inputs
from autopar.reshard import Tensor
from autopar.rule import ROLE_OF_FACTOR
from autopar.saved import saved_by
from autopar.space import Decision, Roles, Space, Wire, carries_pin, is_call, source_of

AUXILIARY_ELEMENTS = 2**24  # masks, positions and labels up to this size are computed whole on every device


@dataclass(frozen=True, slots=True)
class _Use:
    """One consumption of a tensor: which decision consumes it, where, and what kind of operation that is."""

    decision: int
    position: int
    kind: object


def build_space(
    program: Program,
    mesh: Mesh,
    hardware: Hardware,
    whole_outputs: bool = False,
    input_layouts: Mapping[str, Layout] | None = None,
) -> Space:
    """Lay out every decision and wire.

    `whole_outputs` pins the user's outputs to be equal everywhere; `input_layouts` (placeholder → layout) says which
    inputs arrive split, the others are equal everywhere: to take a slice of those costs nothing.
    """
    return _Builder(program, mesh, hardware, whole_outputs, input_layouts or {}).build()


class _Builder:
    """The state of one pass over the graph: what is known of each tensor so far."""

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        hardware: Hardware,
        whole_outputs: bool,
        input_layouts: Mapping[str, Layout],
    ) -> None:
        self.program = program
        self.input_layouts = input_layouts
        self.whole_outputs = whole_outputs
        self.parameters = frozenset(program.parameters.values())
        self.space = Space(program, mesh, hardware)
        self.padded: dict[tuple[str, int], frozenset[int]] = {}
        self.infos: dict[tuple[str, int], TensorInfo] = {}
        self.uses: dict[tuple[str, int], list[_Use]] = defaultdict(list)
        self.learned: set[str] = set(self.parameters)
        """Names of nodes whose value depends on a parameter."""

    def build(self) -> Space:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif is_call(node):
                self._call(node)
        self._outputs()
        for key, uses in self.uses.items():
            self._wire(key, uses)
        return self.space

    def _placeholder(self, node: fx.Node) -> None:
        info = node.meta["tensor"]
        if not isinstance(info, TensorInfo):
            return
        self.infos[node.name, 0] = info
        parameter = node.name in self.parameters
        is_input = node.name in self.program.inputs
        mesh, hardware = self.space.mesh, self.space.hardware
        self.padded[node.name, 0] = frozenset(range(len(info.shape))) if parameter else frozenset()
        roles = _input_roles(info) if is_input else (None,) * len(info.shape)
        self.space.dim_roles[node.name, 0] = roles
        if parameter:
            layouts = split_layouts(info, mesh, padded=True)
            num_bytes = np.array([parameter_bytes(info, each, mesh.sizes) for each in layouts])
            seconds = np.array([optimizer_seconds(info, each, mesh.sizes, hardware) for each in layouts])
            menu, kind = whole_menu(layouts, seconds), "parameter"
        else:
            layouts = (self.input_layouts.get(node.name, replicated(mesh.ndim)),)
            num_bytes = np.zeros(len(layouts), dtype=np.int64)
            menu, kind = whole_menu(layouts), "input" if is_input else "buffer"
        self.space.add(Decision(node.name, kind, menu, num_bytes, node, _roles_by_placement(roles)))

    def _call(self, node: fx.Node) -> None:
        sources = [source_of(argument) for argument in tensor_inputs(node)]
        keys = [(source.name, position) for source, position in sources]
        menu = call_menu(node, [self.padded[key] for key in keys], self.space.mesh, self.space.hardware)
        if any(name in self.learned for name, _ in keys):
            self.learned.add(node.name)
        elif not carries_pin(node):
            menu = _auxiliary(menu)
        assert menu.call is not None and menu.bound is not None and menu.op is not None
        roles = _factor_roles(menu, [self.space.dim_roles[key] for key in keys])
        paddable = padded_factors(menu.op, menu.bound, [self.padded[key] for key in keys])
        for position, (term, info) in enumerate(zip(menu.bound.rule.outputs, menu.call.outputs, strict=True)):
            self.infos[node.name, position] = info
            self.padded[node.name, position] = frozenset(d for d, names in enumerate(term.dims) if names[0] in paddable)
            self.space.dim_roles[node.name, position] = tuple(roles.get(names[0]) for names in term.dims)
        decision = self.space.add(Decision(node.name, "call", menu, self._saved_bytes(node, menu), node, roles))
        for position, key in enumerate(keys):
            self.uses[key].append(_Use(decision, position, (node.target, position)))

    def _saved_bytes(self, node: fx.Node, menu: Menu) -> np.ndarray:
        """Bytes of the call's outputs that the backward needs, per strategy, in the layout the call gives them."""
        call = menu.call
        assert call is not None
        kept = _kept_outputs(node, call)
        sizes = self.space.mesh.sizes
        return np.array(
            [
                sum(
                    local_elements(info, layout, sizes) * info.dtype.itemsize
                    for i, (info, layout) in enumerate(zip(call.outputs, strategy.outputs, strict=True))
                    if i in kept
                )
                for strategy in menu.strategies
            ],
            dtype=np.int64,
        )

    def _outputs(self) -> None:
        """One sink per tensor the graph returns: scalars, mutated buffers and whole outputs are equal everywhere."""
        mesh = self.space.mesh
        for number, value in enumerate(self.program.output):
            if not isinstance(value, fx.Node):
                continue
            source, position = source_of(value)
            info = self.infos[source.name, position]
            free = number < self.program.num_outputs and info.shape and not self.whole_outputs
            layouts = split_layouts(info, mesh) if free else (replicated(mesh.ndim),)
            roles = _roles_by_placement(self.space.dim_roles[source.name, position])
            bytes_ = np.zeros(len(layouts), dtype=np.int64)
            decision = self.space.add(Decision(f"output:{number}", "output", whole_menu(layouts), bytes_, value, roles))
            self.uses[source.name, position].append(_Use(decision, 0, ("output", number)))

    def _wire(self, key: tuple[str, int], uses: list[_Use]) -> None:
        """Connect a tensor with its consumers, through hubs where there are several."""
        name, position = key
        info = self.infos[key]
        parameter = self.space.decisions[self.space.index[name]].kind == "parameter"
        regather = parameter and len(uses) == 1 and _backward_needs(self.space.decisions[self.space.index[name]].node)
        tensor = Tensor(info.shape, info.dtype, info.requires_grad, self.padded[key], parameter, regather)
        source = (self.space.index[name], position)
        only = self.space.decisions[source[0]].menu.strategies
        free = (
            not info.requires_grad and len(only) == 1 and only[0].outputs[position] == replicated(self.space.mesh.ndim)
        )
        if len(uses) == 1 or free:  # to slice what is equal everywhere costs nothing, however often
            for use in uses:
                self._connect(source, use, tensor)
            return
        suffix = f":{position}" if position else ""
        hub = self._hub(f"{name}{suffix}/hub", source, uses, tensor)
        groups: dict[object, list[_Use]] = defaultdict(list)
        for use in uses:
            groups[use.kind].append(use)
        for number, group in enumerate(groups.values()):
            if len(group) > 1 and len(groups) > 1:
                inner = self._hub(f"{name}{suffix}/hub{number + 1}", (hub, 0), group, tensor)
                for use in group:
                    self._connect((inner, 0), use, tensor)
            else:
                for use in group:
                    self._connect((hub, 0), use, tensor)

    def _hub(self, name: str, source: tuple[int, int], uses: list[_Use], tensor: Tensor) -> int:
        """A decision on the layout that a tensor takes before it goes on to several consumers."""
        decisions = self.space.decisions
        wanted = [s.outputs[source[1]] for s in decisions[source[0]].menu.strategies]
        for use in uses:
            wanted.extend(s.inputs[use.position] for s in decisions[use.decision].menu.strategies)
        layouts = tuple(dict.fromkeys(layout for layout in wanted if tensor.allows(layout, self.space.mesh.sizes)))
        origin = decisions[source[0]]
        bytes_ = np.zeros(len(layouts), dtype=np.int64)
        hub = self.space.add(Decision(name, "hub", whole_menu(layouts), bytes_, origin.node, {}))
        self.space.connect(Wire(source[0], source[1], hub, 0, tensor))
        return hub

    def _connect(self, source: tuple[int, int], use: _Use, tensor: Tensor) -> None:
        self.space.connect(Wire(source[0], source[1], use.decision, use.position, tensor))


def _backward_needs(parameter: fx.Node) -> bool:
    """Whether some call keeps the parameter, or a view of it, for its backward."""
    for user in parameter.users:
        if not is_call(user):
            continue
        if is_view(Call.of(user)) and _backward_needs(user):
            return True
        if any(argument is parameter and i in saved_by(user).inputs for i, argument in enumerate(tensor_inputs(user))):
            return True
    return False


def _auxiliary(menu: Menu) -> Menu:
    """The menu of a call that depends on no parameter (a mask, positions, shifted labels): whole, unless it is large.

    Such calls feed every layer; deciding on them would tie all layers together for next to no time.
    """
    assert menu.call is not None
    if sum(info.num_elements for info in menu.call.outputs) > AUXILIARY_ELEMENTS:
        return menu
    number = next(i for i, s in enumerate(menu.strategies) if all(choice == "-" for choice in s.choices))
    return Menu(
        (menu.strategies[number],), menu.seconds[number : number + 1], menu.call, menu.op, menu.bound, menu.reason
    )


def _kept_outputs(node: fx.Node, call: Call) -> set[int]:
    """Outputs of the call that it or a consumer keeps for the backward; a view counts where its memory was made."""
    if is_view(call):
        return set()
    kept = set(saved_by(node).outputs)
    for value in [node, *(user for user in node.users if not is_call(user) and user.op == "call_function")]:
        if _backward_needs(value):
            kept.add(source_of(value)[1])
    return kept


def _input_roles(info: TensorInfo) -> Roles:
    """Dim 0 of an input is data; dim 1 of token ids (batch, sequence) and of embedded tokens is sequence."""
    rank = len(info.shape)
    tokens = (rank == 2 and not info.dtype.is_floating_point) or rank == 3
    return tuple("data" if dim == 0 else "sequence" if dim == 1 and tokens else None for dim in range(rank))


def _factor_roles(menu: Menu, dim_roles: list[Roles]) -> dict[str, str]:
    """Roles of a call's factors: by their name (o, k, x), else that of the first input dim they stand on."""
    assert menu.bound is not None
    found: dict[str, str] = {}
    for factor in menu.bound.splittable:
        if factor in ROLE_OF_FACTOR:
            found[factor] = ROLE_OF_FACTOR[factor]
            continue
        for term, roles in zip(menu.bound.rule.inputs, dim_roles, strict=True):
            dim = term.dim_of(factor)
            role = roles[dim] if dim is not None else None
            if role:
                found[factor] = role
                break
    return found


def _roles_by_placement(roles: Roles) -> dict[str, str]:
    named = {f"S({dim})": role for dim, role in enumerate(roles) if role}
    return {"I": "replicated", "R": "replicated", "P": "partial", **named}
