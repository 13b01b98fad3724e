"""In which tiles a model is captured."""

from __future__ import annotations

from typing import NamedTuple

from autopar.capture.tiles.loss import LossTiles
from autopar.capture.tiles.mlp import MlpTiles


class Tiles(NamedTuple):
    """What of a model is captured in how many tiles."""

    loss: LossTiles = None
    mlp: MlpTiles = None
