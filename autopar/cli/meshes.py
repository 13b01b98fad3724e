"""Meshes as people write them on a command line."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError

if TYPE_CHECKING:
    from autopar.ir.sharding.mesh import Mesh

DEFAULT_AXES = ("dp", "tp")
RECIPE = {"--microbatches": int, "--schedule": str, "--stages-per-rank": int, "--strategy": str, "--recompute": str}
"""Options that a recipe may have behind its mesh, by their kind."""


def parse_mesh(text: str, hardware: str = "cpu") -> Mesh:
    """Return the mesh that a text means: "dp=2,tp=4", or "2x4" for the axes dp and tp.

    >>> print(parse_mesh("2x4"))
    dp=2 × tp=4

    Raises InputError for text that is no mesh.
    """
    from autopar.ir.sharding.mesh import Mesh  # not before, for --help does without PyTorch

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


def parse_recipe(text: str, hardware: str = "cpu") -> tuple[Mesh, dict[str, Any]]:
    """Return the mesh and the options of `plan` that a recipe means.

    >>> mesh, options = parse_recipe("pp=2,dp=4 --microbatches 8 --schedule 1f1b")
    >>> print(mesh, options)
    pp=2 × dp=4 {'microbatches': 8, 'schedule': '1f1b'}

    Raises InputError for text that is no recipe.
    """
    mesh, *words = text.split() or [""]
    options: dict[str, Any] = {}
    for flag, value in itertools.zip_longest(words[::2], words[1::2], fillvalue=""):
        kind = RECIPE.get(flag)
        if kind is None or not value or (kind is int and (not value.isdecimal() or int(value) < 1)):
            raise InputError(
                f"'{flag} {value}' of --compare '{text}' is no option there; give a mesh and any of "
                f"{', '.join(RECIPE)}, as in 'pp=4,dp=8,tp=8 --microbatches 16 --schedule 1f1b'."
            )
        options[flag.removeprefix("--").replace("-", "_")] = kind(value)
    return parse_mesh(mesh, hardware), options
