"""Meshes as people write them on a command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.errors import InputError

if TYPE_CHECKING:
    from autopar.sharding.mesh import Mesh

DEFAULT_AXES = ("dp", "tp")


def parse_mesh(text: str, hardware: str = "cpu") -> Mesh:
    """Return the mesh that a text means: "dp=2,tp=4", or "2x4" for the axes dp and tp.

    >>> print(parse_mesh("2x4"))
    dp=2 × tp=4

    Raises InputError for text that is no mesh.
    """
    from autopar.sharding.mesh import Mesh  # not before, for --help does without PyTorch

    words = text.split(",") if "=" in text else text.split("x")
    if "=" not in text and len(words) <= len(DEFAULT_AXES):
        words = [f"{name}={size}" for name, size in zip(DEFAULT_AXES, words, strict=False)]
    pairs = [word.partition("=")[::2] for word in words]
    names = [name.strip() for name, _ in pairs]
    if not all(size.strip().isdecimal() for _, size in pairs) or len(set(names)) < len(names):
        raise InputError(
            f'{text!r} is no mesh; write axes with sizes, "dp=2,tp=4", or one or two sizes, "2x4", for dp and tp.'
        )
    return Mesh({name: int(size) for name, (_, size) in zip(names, pairs, strict=True)}, hardware)
