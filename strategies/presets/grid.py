"""Presets that split the matrix products over a grid of devices: two, two and a half, and three dimensions."""

from __future__ import annotations

from autopar.ir.program.operators.mlp_in_tiles import MLP_IN_TILES
from autopar.ir.program.program import Program
from autopar.ir.sharding.annotation import Annotation
from autopar.ir.sharding.mesh import Mesh
from autopar.strategies.presets import preset_axes
from autopar.strategies.presets.regions import COLUMN, INNER, LOSS, ROW
from autopar.strategies.presets.split import Split, Wish, data
from autopar.strategies.presets.tensor import found_regions
from autopar.strategies.roles import RoledCall, RoledProgram
from autopar.strategies.rules.layers.tiled_mlp import HIDDEN


def tensor_2d(program: Program, mesh: Mesh, strict: bool = True) -> tuple[Annotation, ...]:
    """Activations and weights split over both axes of a grid, as in SUMMA (Xu et al., "Optimus", 2021).

    Inputs of products are gathered over c, their weights over r, and a norm sums one number a token each way. Over an
    axis r of rows (the batch, and storage) and an axis c of columns (features):

        all_gather/r = (2·(P - N) - T)/c
        reduce_scatter/r = (P - N)/c
        all_reduce/r = N/c + 12
        all_gather/c = (L·(3·A + F) + A)/r
        reduce_scatter/c = (L·(3·A + F) + A)/r
        all_reduce/c = 2·(2·L + 1)·R/r + 3·R/r
    """
    preset_axes.need_exactly("tensor_2d", mesh, 2, "the rows and the columns of the grid")
    return _grid("tensor_2d", program, mesh, strict)


def tensor_2_5d(program: Program, mesh: Mesh, strict: bool = True) -> tuple[Annotation, ...]:
    """Several grids of `tensor_2d`, each with a part of the batch (Wang et al., "Tesseract", 2022).

    Over an axis z of grids, and the rows r and columns c of each:

        all_reduce/z = (P - N)/(r·c)
        all_reduce/z_r = N/c + 12
        all_gather/r = (2·(P - N) - T)/c
        reduce_scatter/r = (P - N)/c
        all_gather/c = (L·(3·A + F) + A)/(z·r)
        reduce_scatter/c = (L·(3·A + F) + A)/(z·r)
        all_reduce/c = 2·(2·L + 1)·R/(z·r) + 3·R/(z·r)
    """
    preset_axes.need_exactly("tensor_2_5d", mesh, 3, "the depth, and the rows and the columns of each grid")
    return _grid("tensor_2_5d", program, mesh, strict)


def tensor_3d(program: Program, mesh: Mesh, strict: bool = True) -> tuple[Annotation, ...]:
    """Activations and weights split over all three axes of a cube (Bian et al., "Maximizing Parallelism", 2021).

    Over axes s (the batch, and storage), i (of a column: its inputs) and o (of a column: its outputs). Between blocks
    o splits the batch and i the features, inside them the other way round. A weight's parts over s are not neighbours,
    and change places over o before and after they are gathered:

        all_gather/s = W/(i·o) + T/i
        reduce_scatter/s = W/(i·o) + T/i
        all_reduce/s_i = 12
        all_reduce/s_o = N/i
        all_gather/i = (2·L·(A + K) + 3·L·F + V)/(s·o)
        reduce_scatter/i = (2·L·(A + K) + 3·L·F + V)/(s·o)
        all_reduce/i = 2·(2·L + 1)·R/(s·o)
        all_gather/o = (4·L + 1)·A/(s·i)
        reduce_scatter/o = (4·L + 1)·A/(s·i)
        all_to_all/o = 2·(W/(s·i·o) + W/(i·o))
        all_reduce/o = T/(s·i) + 3·R/(s·i)
    """
    preset_axes.need_exactly("tensor_3d", mesh, 3, "the edges of the cube")
    graph = RoledProgram.of(program)
    samples, inputs, outputs = mesh.names
    if strict:
        preset_axes.need_batch("tensor_3d", graph.samples, mesh, (samples, inputs))
        preset_axes.need_batch("tensor_3d", graph.samples, mesh, (samples, outputs))
    regions = found_regions("tensor_3d", graph, mesh, outputs).by_call

    def over(inner: str, column: str, row: str, outer: str) -> Wish:
        """A role for each region."""
        roles = {INNER: inner, LOSS: inner, COLUMN: column, ROW: row}

        def wish(call: RoledCall) -> str | None:
            # An MLP in tiles has no columns: there the batch is split, as inside of a block.
            role = inner if call.call.target is MLP_IN_TILES and row == "column" else roles.get(regions[call.name])
            return call.factor_of(role or outer)

        return wish

    split = Split(graph, mesh, "tensor_3d")
    split.along(samples, data)
    split.along(inputs, over("data", "row", "column", "column"))
    split.along(outputs, over("column", "column", "row", "data"))
    return split.stored_over((samples,), True).annotations()


def _grid(strategy: str, program: Program, mesh: Mesh, strict: bool) -> tuple[Annotation, ...]:
    """The batch over all axes but the last, features over the last; weights stored over the last but one, too."""
    graph = RoledProgram.of(program)
    *batch, columns = mesh.names
    if strict:
        preset_axes.need_batch(strategy, graph.samples, mesh, tuple(batch))
    split = Split(graph, mesh, strategy)
    for axis in batch:
        split.along(axis, data)
    return split.along(columns, features).stored_over((batch[-1],), True).annotations()


def features(call: RoledCall) -> str | None:
    """Every product by columns, and features, heads and classes where they are; of an MLP in tiles hidden features."""
    return call.factor_of("column") or (HIDDEN if call.call.target is MLP_IN_TILES else None)
