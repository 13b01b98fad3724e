"""Tile counts with which a model is captured."""

from __future__ import annotations

from typing import NamedTuple

from autopar.capture.tiles.mlp import MlpTiles
from autopar.capture.tiles.tiled_losses import LossTiles


class Tiles(NamedTuple):
    """Numbers of tiles in which the losses and the MLPs of a model are captured."""

    loss: LossTiles = None
    mlp: MlpTiles = None
