"""Static arguments: tensors whose values a graph is captured for, as `Capture(static_argnames=…)` names them."""
