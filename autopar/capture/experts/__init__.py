"""Finding Mixture-of-Experts in a model's graph, however it is written, and stating it by four operators."""
