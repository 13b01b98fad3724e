"""A captured program compared with the model it was captured from: outputs, gradients and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from autopar.capture.assumptions import Assumption
from autopar.capture.export import capture
from autopar.capture.static.arguments import with_static
from autopar.ir.program.program import Program


def run(
    program: Program,
    parameters: Mapping[str, Tensor],
    buffers: dict[str, Tensor],
    flat_inputs: Sequence[Any],
) -> Any:
    """Run a program as it is, on one device: the user's outputs; mutated buffers are written into `buffers`."""
    values: dict[str, Any] = {
        **{placeholder: parameters[name] for name, placeholder in program.parameters.items()},
        **{
            placeholder: buffers[name].clone() if name in program.mutations else buffers[name]
            for name, placeholder in program.buffers.items()
        },
        **program.constants,
        **{name: leaf for name, leaf in zip(program.inputs, flat_inputs, strict=True) if name is not None},
    }
    module = fx.GraphModule(nn.Module(), program.graph)
    outputs = module(*(values[name] for name in program.placeholders()))
    with torch.no_grad():
        for name, value in zip(program.mutations, outputs[program.num_outputs :], strict=True):
            buffers[name].copy_(value)
    return pytree.tree_unflatten(list(outputs[: program.num_outputs]), program.out_spec)


def assert_as_eager(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] = lambda output: output.square().mean(),
    tolerance: float = 1e-6,
    assume: Sequence[Assumption] = (),
    static: Sequence[str] = (),
    **options: Any,
) -> Program:
    """Capture the model, train one step with the program and with the model itself, and compare everything.

    `static` names the arguments whose values are constants of the program; `options` are those of `capture`.
    """
    kwargs = dict(kwargs or {})
    expected = copy.deepcopy(model)
    for module in expected.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False  # type: ignore[union-attr]
    program = capture(model, *with_static((args, kwargs), static, model.forward), assume=assume, **options)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    output = run(program, parameters, buffers, pytree.tree_leaves((args, kwargs)))
    loss(output).backward()
    expected_output = expected(*args, **kwargs)
    loss(expected_output).backward()
    assert type(output) is type(expected_output)
    torch.testing.assert_close(
        pytree.tree_leaves(output), pytree.tree_leaves(expected_output), rtol=tolerance, atol=tolerance
    )
    for name, parameter in expected.named_parameters():
        assert (parameter.grad is None) == (parameters[name].grad is None), name
        torch.testing.assert_close(parameters[name].grad, parameter.grad, rtol=tolerance, atol=tolerance, msg=name)
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(buffers[name], buffer, rtol=tolerance, atol=tolerance, msg=name)
    return program


def calls(program: Program, *targets: Any) -> list[fx.Node]:
    """The calls of a program, or those of some operations."""
    found = [node for node in program.graph.nodes if node.op == "call_function"]
    return [node for node in found if not targets or node.target in targets]
