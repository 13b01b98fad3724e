"""Errors that autopar raises for users.

Every message says what was found, what was needed and what to do.
"""

from __future__ import annotations

import sys
import warnings


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose."""


class MeshError(AutoparError, ValueError):
    """A mesh, an axis name or a world size that does not fit."""


class PipelineError(AutoparError, ValueError):
    """Stages, micro-batches or a schedule that do not fit the model or the mesh."""


class PeerError(AutoparError, RuntimeError):
    """Another rank raised or died in this call of the model, or was given other options; the message says which."""


class LayoutError(AutoparError, ValueError):
    """A layout that a tensor cannot have."""


class RuleError(AutoparError, ValueError):
    """A rule that cannot be parsed or does not fit the shapes of its operation."""


class CaptureError(AutoparError, RuntimeError):
    """A model that cannot be captured faithfully."""


class AnnotationError(AutoparError, ValueError):
    """An annotation that matches nothing, does not divide or contradicts another."""


class StrategyError(AnnotationError):
    """A preset that is not known, or that a model or a mesh has no place for."""


class PlanError(AutoparError, ValueError):
    """A plan that belongs to another model or mesh, or a problem without any plan."""


class InfeasibleError(PlanError):
    """No choice of layouts satisfies the pins and the memory limit; `least_bytes` are the fewest found per device."""

    def __init__(self, message: str, least_bytes: int | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes


class CutOffError(PlanError):
    """No plan is faster than one that is known; `seconds` is what each takes at least."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"every plan takes at least {seconds:g} s, and one that is known takes no more")
        self.seconds = seconds


class TimeLimitError(PlanError):
    """The time limit passed before any plan was found."""


class InputError(AutoparError, ValueError):
    """Inputs that differ from those the model was compiled for."""


NOT_THEIRS = frozenset(("autopar", "torch")) | (sys.stdlib_module_names - {"__main__"})
"""Top-level packages whose frames lie between the user's line and a warning."""


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the user's line, or at the caller's if no line on the stack is the user's."""
    frame, level = sys._getframe(1), 2
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in NOT_THEIRS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=2 if frame is None else level)
