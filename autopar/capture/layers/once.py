"""Equal layers are traced once: a layer that an earlier one of the same list equals becomes one call of the graph.

The first is traced as any module is, and its calls are kept as a body; another becomes a call of LAYER, in whose place
the body is put when the graph is inlined. That is done only where nothing could tell the two traces apart: the inputs
have the same form, the layers are equal but for plain attributes that the first forward has not read, and that forward
has left nothing in Python, reached no branch on values and stored no function or hook.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from autopar.capture.inlining.layers import LAYER, Body
from autopar.capture.layers.equal import Comparison, form_of, state_of, ties
from autopar.capture.layers.template import Template, template_of
from autopar.capture.python.cone import node_of
from autopar.capture.python.recorder import Recorder
from autopar.ir.program.python_state import ATOMS

FEWEST = 3
"""Layers of one class in a list, at least."""
MOST_KINDS = 4
"""Templates kept for one list, class and form of inputs; a layer that equals none of these is traced."""


@dataclass(slots=True, eq=False)
class EqualLayers:
    """The layers of one trace."""

    recorder: Recorder
    noticed: Callable[[], object]
    """Callable that counts what the trace records outside its graph; a layer that changes that gets no template."""
    bodies: list[Body] = field(default_factory=list)
    """Bodies of traced layers, by the number that calls of LAYER carry."""
    _lists: dict[int, int] = field(default_factory=dict)
    """The id of a layer's list, by the layer's."""
    _templates: dict[Hashable, list[Template]] = field(default_factory=dict)

    @contextlib.contextmanager
    def once(self, traced: nn.Module) -> Iterator[None]:
        """Trace what is equal once, inside."""
        for module in traced.modules():
            if isinstance(module, nn.ModuleList | nn.Sequential):
                kinds = Counter(map(type, module))
                self._lists.update({id(layer): id(module) for layer in module if kinds[type(layer)] >= FEWEST})
        call = nn.Module._call_impl

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in self._lists:
                return call(module, *args, **kwargs)
            return self._called(call, module, args, kwargs)

        with mock.patch.object(nn.Module, "_call_impl", called) if self._lists else contextlib.nullcontext():
            yield

    def _called(self, call: Callable[..., Any], layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the result of the layer, either traced as usual or as one call of LAYER in the graph."""
        mode = proxy_tensor.get_proxy_mode()
        tracer: Any = None if mode is None else mode.tracer
        leaves, spec = pytree.tree_flatten((args, kwargs))
        path = _path_in(tracer)
        if path is None or not all(isinstance(leaf, (*ATOMS, Tensor)) for leaf in leaves):
            return call(layer, *args, **kwargs)
        with self._unobserved():
            given = [*state_of(layer), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
            form = tuple(form_of(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
            known = self._templates.setdefault(
                (self._lists[id(layer)], type(layer), spec, form, id(tracer), _global_modes()), []
            )
            nodes = [node_of(tensor) for tensor in given]
            found = next((each for each in known if None not in nodes and self._equals(each, layer, given)), None)
        if found is not None:
            with self.recorder.aside():
                return self._repeated(found, given, tracer)
        if None in nodes or len(known) >= MOST_KINDS:
            return call(layer, *args, **kwargs)
        last, held, noticed = tracer.graph._root.prev, self.recorder.held(), self.noticed()
        returned = call(layer, *args, **kwargs)
        with self._unobserved():
            if noticed == self.noticed() and not self.recorder.changed_since(held):
                region = _nodes_after(last, tracer.graph)
                made = template_of(layer, path, given, nodes, returned, region)
                if made is not None:
                    known.append(made)
                    self.bodies.append(made.body)
        return returned

    @contextlib.contextmanager
    def _unobserved(self) -> Iterator[None]:
        """Exclude inspection of modules and tensors inside the block from the recorded forward."""
        with self.recorder.aside(), torch._C.DisableTorchFunction():
            yield

    def _equals(self, template: Template, layer: nn.Module, given: Sequence[Tensor]) -> bool:
        """Return whether a trace of `layer` would equal the template's; record the template's Python reads for it if
        so.
        """
        comparison = Comparison()
        if ties(given) != template.ties or not comparison.equal(template.layer, layer):
            return False
        if any(self.recorder.has_read(module, name) for module, name in comparison.differing):
            return False
        self.recorder.read_alike(comparison.pairs)
        return True

    def _repeated(self, template: Template, given: Sequence[Tensor], tracer: Any) -> Any:
        """Return the result of the layer as one call of LAYER in the graph."""
        fake = detect_fake_mode(list(given))
        assert fake is not None, "what is traced has no values"
        with proxy_tensor.disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), fake, torch.enable_grad():
            made = [form.made() for form in template.forms]
        slots: Any = [proxy_tensor.get_proxy_slot(given[index], tracer) for index in template.read]
        number = next(number for number, body in enumerate(self.bodies) if body is template.body)
        proxy = tracer.create_proxy("call_function", LAYER, (number, *(slot.proxy for slot in slots)), {})
        proxy_tensor.track_tensor_tree(made, proxy, constant=None, tracer=tracer)
        return template.returned(given, made)


def _global_modes() -> tuple[Hashable, ...]:
    """Return the global PyTorch modes that a trace depends on: gradients, autocast and default dtype."""
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), *autocast, torch.get_default_dtype()


def _nodes_after(last: fx.Node, graph: fx.Graph) -> list[fx.Node]:
    found, node = [], last.next
    while node is not graph._root:
        found.append(node)
        node = node.next
    return found


def _path_in(tracer: Any) -> str | None:
    """Return the path of the module being called; None if the tracer does not tell it or it may be ambiguous."""
    stack = getattr(tracer, "module_stack", None)
    return None if not stack or getattr(tracer, "enable_attr_proxy", False) else next(reversed(stack.values()))[0]
