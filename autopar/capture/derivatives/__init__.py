"""Derivatives that a forward computes itself, while it is traced: `torch.autograd.grad` and `torch.func`."""
