"""The per-rank graph as code a person can read: sections per module, layouts as comments, collectives by name."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.ir.program.recompute_segments import OFFLOAD
from autopar.runtime.recompute.marks import role_of

INDENT = "    "
COMMENT_COLUMN = 88


def readable_code(module: fx.GraphModule, axes: Sequence[str]) -> str:
    """Return the code of a rewritten graph; comments give the layout of each value over the mesh axes `axes`."""
    graph = module.graph
    lines = [
        f"# layouts over the mesh axes ({', '.join(axes)}):",
        "# S(d) split, Z(d) zigzag-sharded, I equal, R equal with a partial gradient, P partial",
        "def forward(",
    ]
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(_commented(f"{INDENT}{node.name},", node))
    lines.append("):")
    calls = (node for node in graph.nodes if node.op == "call_function")
    for section, nodes in itertools.groupby(calls, lambda node: node.meta.get("module")):
        found = list(nodes)
        lines += ["", f"{INDENT}# {section or 'model'}{_recomputed(found)}"]
        for node in found:
            arguments = [*map(_text, node.args), *(f"{key}={_text(value)}" for key, value in node.kwargs.items())]
            lines.append(_commented(f"{INDENT}{node.name} = {_target(node)}({', '.join(arguments)})", node))
    lines += ["", f"{INDENT}return {_text(graph.output_node().args[0])}"]
    return "\n".join(lines)


def _recomputed(section: Sequence[fx.Node]) -> str:
    """Describe how the calls of a section are recomputed in the backward, or that their saved tensors are on the
    host.
    """
    modes = {role.mode for node in section if (role := role_of(node)) is not None}
    if modes == {OFFLOAD}:
        return " (saved on the host)"
    return f" (recomputed: {', '.join(sorted(modes))})" if modes else ""


def _commented(line: str, node: fx.Node) -> str:
    layout = node.meta.get("layout")
    return f"{line:<{COMMENT_COLUMN}}  # {layout}" if layout is not None else line


def _target(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[-1]}"
    assert callable(target)
    return target.__name__


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, (tuple, list)):
        inner = ", ".join(map(_text, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(each)}" for key, each in value.items()) + "}"
    return str(value) if isinstance(value, torch.dtype | torch.device) else repr(value)
