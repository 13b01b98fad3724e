"""Static arguments: tensors whose values a graph is captured for, as `static_argnames=` names them."""
