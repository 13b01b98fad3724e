"""The `autopar` command.

autopar plan        prints a plan without any device, as a table; saves it as JSON, as a page, as a trace
autopar show        prints a plan that was saved, and the schedule of a pipeline
autopar explain     says why one part of a plan is as it is
autopar demo        trains a small model on this machine's CPU, compared with one process
autopar calibrate   measures this machine and writes its hardware profile
autopar bench       measures strategies on this machine, compared with predictions and with PyTorch's own tools

What is read to parse the command line imports no PyTorch; each command imports what it needs.
"""

from autopar.cli.entry import main
from autopar.cli.meshes import parse_mesh

__all__ = ["main", "parse_mesh"]
