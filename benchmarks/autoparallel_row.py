"""Plan a Llama with AutoParallel (github.com/meta-pytorch/autoparallel), and print what `plan_row` prints.

Its sources lie at PATH and need the package pulp. It plans on a CPU host when it is told that the device is an H100:
a fake process group, device look-ups that answer so, and eager attention, as its attention operator is CUDA's own.
Parameters take at most their share of an even split, as in its examples.
"""

from __future__ import annotations

import importlib
import json
import math
import resource
import sys
import time
from dataclasses import asdict
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.models.catalogue import language_model
from benchmarks.plan_row import AXES, Measured, Row, peak_rss, timed

DEVICE = "NVIDIA H100 80GB HBM3"


def measure(row: Row, path: str) -> Measured:
    """Plan the row with the sources at `path`: bf16 compute on fp32 parameters, gradients reduced in fp32."""
    sys.path.insert(0, path)
    api = importlib.import_module("autoparallel.api")
    model = language_model(row.model, row.layers, device="meta")
    model.decoder.set_attn_implementation("eager")
    vocabulary = model.decoder.config.vocab_size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(row.mesh))
    mesh = init_device_mesh("cpu", row.mesh, mesh_dim_names=AXES[len(row.mesh)])
    placement = [(Shard(0), *(Replicate() for _ in row.mesh[1:]))] * 2
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def inputs() -> tuple[Tensor, ...]:
        return tuple(torch.randint(vocabulary, (row.batch, row.sequence)) for _ in range(2))

    def named(*args: object) -> str:
        return DEVICE

    cpu, start = time.process_time(), time.perf_counter()
    with (
        mock.patch.object(torch.cuda, "get_device_name", named),
        mock.patch.object(torch.cpu, "get_device_name", named, create=True),
        timed({"build_joint_graph": api}) as (seconds, _),
        api.AutoParallel(model, inputs, mesh, policy, repeated_subgraphs=True) as planner,
    ):
        built = time.perf_counter()
        planner.add_input_constraints(placement)
        planner.add_parameter_memory_constraint(low=None, high=None)
        planner.optimize_placement()
        end = time.perf_counter()
        nodes = len(planner.gm.graph.nodes)
    capture = seconds["build_joint_graph"]
    return Measured(
        capture=capture,
        build=built - start - capture,
        solve=end - built,
        total=end - start,
        cpu=time.process_time() - cpu + _children_seconds(),
        rss_bytes=peak_rss(),
        nodes=nodes,
        solver="AutoParallel",
    )


def _children_seconds() -> float:
    """CPU seconds of the processes that ended: the solver, CBC, is one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Row.from_json(sys.argv[1]), sys.argv[2]))))
