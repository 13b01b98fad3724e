"""Public calls: `compile`, `plan`, `load`, and questions of size; the types of their options."""
