"""Products that run otherwise than as one: beside their collectives in chunks, or a tile of the weight at a time."""
