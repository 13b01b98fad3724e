"""Expert parallelism as people have it today: transformers' own, and a dispatch by hand as torchtitan's.

transformers-ep         own samples on every rank, tokens to their experts and home by all-to-all
transformers-ep-reduce  the whole batch on every rank, what its own experts give summed by all-reduce
ep-by-hand              transformers-ep with torchtitan's dispatch: sort, all-to-all, sort by expert, grouped products

Experts are split over all ranks; where ranks have own samples, DDP sums the gradients of everything else. They split
modules with transformers' names and shapes of stacked experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from autopar.tools.benchmarking.baselines import Baseline, InapplicableError, flattened, own_samples

MATRICES = ("gate_up_proj", "down_proj")
"""[experts, 2 · features, hidden] and [experts, hidden, features]."""
Inputs = tuple[Tensor, ...]


def transformers_ep(model: nn.Module, mesh: DeviceMesh, inputs: Inputs) -> Baseline:
    """Have transformers send tokens by all-to-all; every rank has its own samples."""
    return _with_own_samples(model, flattened(mesh), inputs, send_to_experts)


def transformers_ep_reduce(model: nn.Module, mesh: DeviceMesh, inputs: Inputs) -> Baseline:
    """Have transformers sum the outputs of all ranks' experts; every rank has the whole batch."""
    flat = flattened(mesh)
    sum_of_experts(_modules_of_stacked_experts(model, flat), flat)
    return Baseline(model, inputs)


def ep_by_hand(model: nn.Module, mesh: DeviceMesh, inputs: Inputs) -> Baseline:
    """Send tokens by a dispatch of torchtitan's kind; every rank has its own samples."""
    return _with_own_samples(model, flattened(mesh), inputs, dispatch_by_hand)


def send_to_experts(stacked: Sequence[Any], mesh: DeviceMesh) -> None:
    """Split modules of stacked experts over the mesh, with transformers' all-to-all for ranks of different samples."""
    alone = init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("others", "alone"))["alone"]
    _install(stacked, mesh, alone, "all_to_all")


def sum_of_experts(stacked: Sequence[Any], mesh: DeviceMesh) -> None:
    """Split modules of stacked experts over the mesh, with transformers' all-reduce for ranks of the same samples."""
    _install(stacked, mesh, mesh, "all_reduce")


def dispatch_by_hand(stacked: Sequence[Any], mesh: DeviceMesh) -> None:
    """Leave modules of stacked experts those of this rank, and send tokens to where theirs are."""
    for experts in stacked:
        for name in MATRICES:
            setattr(experts, name, nn.Parameter(_own_part(getattr(experts, name), mesh)))
        experts.forward = Dispatched(experts.gate_up_proj, experts.down_proj, experts.act_fn, mesh)


@dataclass(slots=True)
class Dispatched:
    """Experts of one rank, to which all ranks send their tokens."""

    gate_up: Tensor
    """(experts of this rank, 2 · features, hidden)"""
    down: Tensor
    activation: Callable[[Tensor], Tensor]
    mesh: DeviceMesh

    def __call__(self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        group, num_ranks, per_rank = self.mesh.get_group(), self.mesh.size(), self.gate_up.shape[0]
        experts_R, order_R = index_TK.flatten().sort(stable=True)
        sent = torch.bincount(experts_R, minlength=num_ranks * per_rank)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        sent_sizes, got_sizes = (each.view(num_ranks, per_rank).sum(1).tolist() for each in (sent, got))
        rows = all_to_all_single_autograd(x_TD[order_R // index_TK.shape[1]], got_sizes, sent_sizes, group)
        ids = torch.arange(per_rank, device=rows.device).repeat(num_ranks)
        by_expert = ids.repeat_interleave(got, output_size=sum(got_sizes)).argsort(stable=True)
        ends = got.view(num_ranks, per_rank).sum(0).cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(rows[by_expert], self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        rows = F.grouped_mm(self.activation(gate) * up, self.down.transpose(1, 2), offs=ends)
        rows = torch.empty_like(rows).index_copy(0, by_expert, rows)
        rows = all_to_all_single_autograd(rows, sent_sizes, got_sizes, group)
        rows = rows * weights_TK.flatten()[order_R].unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add(0, order_R // index_TK.shape[1], rows)


def _with_own_samples(
    model: nn.Module, mesh: DeviceMesh, inputs: Inputs, split: Callable[[Sequence[Any], DeviceMesh], None]
) -> Baseline:
    if dist.get_backend() == "fake":
        raise InapplicableError(
            "how many tokens a rank gets is read from the results of a collective; a fake world has none"
        )
    num_ranks, part, stacked = mesh.size(), own_samples(inputs, mesh), _modules_of_stacked_experts(model, mesh)
    split(stacked, mesh)

    def mean_of_ranks(parameter: Tensor) -> None:
        """Divide gradients by the number of ranks, as each rank's loss is the mean of its own tokens."""
        assert parameter.grad is not None
        parameter.grad.div_(num_ranks)

    own = {id(each) for experts in stacked for each in experts.parameters()}
    of_experts = {name: each for name, each in model.named_parameters() if id(each) in own}
    for parameter in of_experts.values():
        parameter.register_post_accumulate_grad_hook(mean_of_ranks)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(of_experts))
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    return Baseline(wrapped, part)


def _modules_of_stacked_experts(model: nn.Module, mesh: DeviceMesh) -> list[Any]:
    """Return the modules of stacked experts; InapplicableError where there are none, or they do not divide."""
    found: list[Any] = [module for module in model.modules() if _is_stacked(module)]
    if not found:
        raise InapplicableError(
            f"the model has no module of experts stacked as {' and '.join(MATRICES)}, as transformers have them"
        )
    uneven = [experts.num_experts for experts in found if experts.num_experts % mesh.size()]
    if uneven:
        raise InapplicableError(f"{uneven[0]} experts do not divide over {mesh.size()} ranks")
    return found


def _is_stacked(module: nn.Module) -> bool:
    names = {name for name, _ in module.named_parameters(recurse=False)}
    return names == set(MATRICES) and hasattr(module, "num_experts") and hasattr(module, "act_fn")


def _install(stacked: Sequence[Any], mesh: DeviceMesh, same_batch: DeviceMesh, implementation: str) -> None:
    """Split experts over `mesh`; the ranks of `same_batch` have the same samples."""
    try:
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, MoEParamShard
    except ImportError as error:
        raise InapplicableError(f"the transformers that are installed have no expert parallelism: {error}") from error
    for experts in stacked:
        for name in MATRICES:
            own = _own_part(getattr(experts, name), mesh)
            MoEParamShard(Shard(0), shards_expert_dim=name == MATRICES[0]).shard_param(experts, name, mesh)
            with torch.no_grad():
                getattr(experts, name).to_local().copy_(own)
        EpDispatchExpertsParallel().install_forward(experts, mesh, tp_mesh=same_batch, ep_implementation=implementation)


def _own_part(weight: Tensor, mesh: DeviceMesh) -> Tensor:
    return weight.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
