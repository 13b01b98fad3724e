"""The intermediate representation: captured programs, meshes, layouts and rules."""
