"""Products that compute beside their collectives, or on a tile of the weight at a time."""
