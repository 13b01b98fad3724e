"""Tile counts with which a model is captured."""

from __future__ import annotations

from typing import NamedTuple

from autopar.capture.tiles.loss import LossTiles
from autopar.capture.tiles.mlp import MlpTiles


class Tiles(NamedTuple):
    """Numbers of tiles in which the losses and the MLPs of a model are captured."""

    loss: LossTiles = None
    mlp: MlpTiles = None
