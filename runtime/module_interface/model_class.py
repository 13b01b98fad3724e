"""The class of a compiled module: one of its own that is also the model's, as `fully_shard` makes one, too.

Methods and properties of the model find the compiled module as `self`, so that `self(batch)` in them runs the plan.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, TypeVar

from torch import nn

Compiled = TypeVar("Compiled", bound=nn.Module)


def also_of_the_class_of(model: nn.Module, compiled: type[Compiled]) -> type[Compiled]:
    """Return a class that does what `compiled` does, and else what the class of `model` does.

    Its instances keep the model that they show as `tree.root`. `forward` has the model's signature and type hints.
    """
    kind = type(model)
    namespace: dict[str, Any] = {
        name: _Kept(name, kind)
        for name in dir(kind)
        if not name.startswith("__") and not hasattr(compiled, name) and _is_data(name, model)
    }
    namespace |= {
        "__module__": compiled.__module__,
        "__doc__": compiled.__doc__,
        "__call__": nn.Module.__call__,  # a model's own __call__ is part of the captured program
        "_compiled": compiled,
        "forward": _with_signature(compiled.forward, model),
    }
    bases = (compiled,) if issubclass(compiled, kind) else (compiled, kind)
    return types.new_class(f"Parallel{kind.__name__}", bases, exec_body=lambda body: body.update(namespace))


class _Kept:
    """Data of the model's class: a module that was compiled has what its model has, which may be another value."""

    def __init__(self, name: str, kind: type) -> None:
        self._name, self._kind = name, kind

    def __get__(self, compiled: Any, owner: type | None = None) -> Any:
        return getattr(self._kind if compiled is None else compiled.tree.root, self._name)


def _is_data(name: str, model: nn.Module) -> bool:
    return name in vars(model) or not hasattr(inspect.getattr_static(type(model), name), "__get__")


def _with_signature(forward: Any, model: nn.Module) -> Any:
    """Return the same code as `forward`; `inspect.signature` and `typing.get_type_hints` of it tell what the model's
    has.
    """
    theirs = getattr(model.forward, "__func__", model.forward)
    shown = types.FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    vars(shown).update(vars(forward))
    shown.__kwdefaults__ = forward.__kwdefaults__
    signature = inspect.signature(model.forward)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    shown.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])  # type: ignore[attr-defined]
    shown.__wrapped__ = theirs  # type: ignore[attr-defined]  # whose globals have the names in type hints
    shown.__annotations__ = dict(getattr(theirs, "__annotations__", {}))
    shown.__doc__ = getattr(theirs, "__doc__", None) or forward.__doc__
    return shown
