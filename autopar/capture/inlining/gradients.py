"""What stands for a forward's own `torch.autograd.grad` in an exported graph, until it becomes a call of its own."""

from __future__ import annotations

from autopar.capture.inlining.recorded import Recorded

GRADIENT = Recorded("autopar_gradient")
"""A use of torch.autograd.grad: its number, its outputs, their gradients, and its inputs."""
NEEDS_GRADIENT = Recorded("autopar_needs_gradient")
"""`x.requires_grad_()`, of x alone."""
