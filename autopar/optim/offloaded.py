"""AdamW with its state on the host, where it steps, too (ZeRO-Offload: Ren et al., USENIX ATC 2021).

The moments of each parameter are in host memory, and so are its master copy in float32 where it has one. A step copies
gradients down in blocks, updates there with PyTorch's fused AdamW for CPUs, and takes the new weights up (see
`staging`). All is split as the parameter is: each rank steps on its own part, and nothing is communicated.

The device has the current weight: without master copies it comes down with its gradient. A master copy is the
weight as the host last left it; where something else has written into the weight since (a checkpoint that was loaded),
those elements of it that are no longer the master's, rounded, are taken from the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle

from autopar.errors import InputError
from autopar.optim.backward_thread import BackwardThread
from autopar.optim.host_gradients import HostGradients
from autopar.optim.sharded_tensors import flat, local
from autopar.optim.staging import Link, Piece, Staged, Staging, ranges, staging_bytes
from autopar.optim.with_adamw import adamw_settings

MOMENTS, MASTER = ("exp_avg", "exp_avg_sq"), "master"
Gradients = Literal["device", "host"]


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW whose state, and whose step, are on the host; on parameters that are whole, or stored in parts.

    params: as any optimizer of PyTorch takes them: `model.named_parameters()`, or groups
    lr, betas, eps, weight_decay: as in `torch.optim.AdamW`
    master_copies: whether parameters of less than float32 have a copy in float32, on the host, which is updated
    gradients: where they wait for the step. On the "device" they may be clipped, scaled and added up as always. With
        "host" each goes there as soon as the backward has made it, and is freed on the device; those of several
        backwards are added up on the host, and `.grad` is None

    Raises InputError for hyperparameters out of range, and parameters that are no real floating point numbers.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_copies: bool = False,
        gradients: Gradients = "device",
    ) -> None:
        if gradients not in ("device", "host"):
            raise InputError(f'OffloadedAdamW was given gradients={gradients!r}; give "device" or "host".')
        super().__init__(params, adamw_settings(lr, betas, eps, weight_decay))
        self._master_copies = master_copies
        self._staging: Staging | None = None
        self._written: dict[torch.Tensor, int] = {}
        """Parameter → the version of its memory when the host last wrote it."""
        for each in self._parameters():
            if not each.is_floating_point():
                raise InputError(
                    f"OffloadedAdamW was given a parameter of {each.dtype}; the host's AdamW takes real floating point "
                    "numbers: give other parameters to an optimizer of their own."
                )
        self._on_host: HostGradients | None = None
        if gradients == "host":
            self._on_host = HostGradients(self._parameters(), lambda: self._link)
            self._step_supports_amp_scaling = True  # so that a GradScaler comes to `step`, which refuses it

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that this rank holds for it: state, staging, and gradients that wait there."""
        state = [x for state in self.state.values() for x in state.values() if isinstance(x, torch.Tensor) and x.ndim]
        waiting = 0 if self._on_host is None else self._on_host.num_bytes
        return sum(local(x).nbytes for x in state) + (self._staging.num_bytes if self._staging else 0) + waiting

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Return a step of all parameters that have gradients; the host has computed it when this returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "grad_scale", None) is not None:
            raise InputError(
                'OffloadedAdamW(gradients="host") was given gradients that a GradScaler has scaled, and that it cannot '
                'look at on the host; make it with gradients="device".'
            )
        stepping = [
            (each, group) for group in self.param_groups for each in group["params"] if self._has_gradient(each)
        ]
        if stepping:
            self._step(stepping)
        return loss

    def step_in_backward(self) -> list[RemovableHandle]:
        """Step each parameter during the backward, as soon as its gradient is on the host.

        `backward()` ends when all have stepped, and `step` has nothing left to do. Not for gradients that add up over
        several backwards, are clipped by their norm over all parameters, or are scaled. Returns handles, of which
        `remove()` ends it.

        Raises InputError where gradients wait on the device.
        """
        if self._on_host is None:
            raise InputError(
                "step_in_backward of an OffloadedAdamW steps on gradients that have come to the host, and these wait "
                'on the device; make it with gradients="host".'
            )
        thread = BackwardThread(self._step, lambda: self._link.end())

        def hook_of(group: dict[str, Any]) -> Callable[[torch.Tensor], None]:
            return lambda parameter: thread.put((parameter, group))

        return [  # behind the hooks that bring gradients
            each.register_post_accumulate_grad_hook(hook_of(group))
            for group in self.param_groups
            for each in group["params"]
            if each.requires_grad
        ]

    def _step(self, parameters: Iterable[tuple[torch.Tensor, dict[str, Any]]]) -> None:
        """Step parameters with gradients, each by the settings of its group; the host is done when this returns."""
        staging, done = self._staged(), []

        def pieces() -> Iterator[Piece]:
            for each, group in parameters:
                done.append(each)
                yield from self._pieces(each, group, staging)

        staging.run(pieces())
        for each in done:
            self._written[each] = local(each)._version
        if self._on_host is not None:
            self._on_host.forget(done)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those on the host, too."""
        super().zero_grad(set_to_none)
        if self._on_host is not None:
            self._on_host.clear()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of an optimizer that was saved; InputError for parts of other shapes than this rank's.

        PyTorch would take it to the device, and to the dtype, of the parameters.
        """
        super().load_state_dict({**state_dict, "state": {}})
        self.state.clear()
        self._written.clear()
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for number, parameter in zip(saved, self._parameters(), strict=True):
            found = state_dict["state"].get(number)
            if found:
                self._load(parameter, found)

    def _load(self, parameter: torch.Tensor, found: Mapping[str, Any]) -> None:
        for name, held in self._state_of(parameter).items():
            if name not in found:
                raise InputError(
                    f"the state has no {name!r} of a parameter of shape {tuple(parameter.shape)}, found "
                    f"{', '.join(map(repr, found))}; load what an OffloadedAdamW of the same master_copies has saved."
                )
            source = local(torch.as_tensor(found[name]))
            if source.shape != local(held).shape:
                raise InputError(
                    f"the state has {name!r} of shape {tuple(source.shape)} where this rank has a part of shape "
                    f"{tuple(local(held).shape)}; load it by torch.distributed.checkpoint, which cuts state as "
                    "parameters are."
                )
            local(held).copy_(source)

    # One parameter.

    def _parameters(self) -> list[torch.Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def _has_gradient(self, parameter: torch.Tensor) -> bool:
        return parameter.grad is not None or (self._on_host is not None and self._on_host.has(parameter))

    def _is_widened(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter has a master copy in float32."""
        return self._master_copies and parameter.dtype.itemsize < torch.float32.itemsize

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the parameter's state, zeros at first."""
        state = self.state[parameter]
        if not state:
            widened = self._is_widened(parameter)
            dtype = torch.float32 if widened else parameter.dtype
            state["step"] = torch.tensor(0.0)
            for name in (*MOMENTS, *((MASTER,) if widened else ())):
                state[name] = _zeros_on_host(parameter, dtype)
        return state

    def _pieces(self, parameter: torch.Tensor, group: Mapping[str, Any], staging: Staging) -> Iterator[Piece]:
        """Yield the blocks of a parameter, and the host's update of each."""
        is_new, state, own = not self.state[parameter], self._state_of(parameter), local(parameter)
        state["step"] = state["step"] + 1  # in a tensor of its own, which a state that was saved does not see
        is_changed = is_new or self._written.get(parameter) != own._version
        held = {name: flat(local(state[name])) for name in state if name != "step"}
        arrived = None
        if self._on_host is not None:
            gradient, arrived = self._on_host.take(parameter)
        else:
            assert parameter.grad is not None, "a parameter that steps has a gradient"
            gradient = flat(local(parameter.grad), like=own)
        weight = flat(own)
        if weight.numel() and weight.data_ptr() != own.data_ptr():
            raise InputError(
                f"OffloadedAdamW was given a parameter of which the part of shape {tuple(own.shape)} lies in memory "
                "with gaps; give it one that is contiguous."
            )
        for part in ranges(weight.numel()):
            mine = {name: each[part] for name, each in held.items()}
            update = self._update_of(mine, group, float(state["step"]), is_new, is_changed, staging)
            needs_weight = MASTER not in held or is_changed
            yield Piece(gradient[part], weight[part], needs_weight, update, self._on_host is not None, arrived)

    @staticmethod
    def _update_of(
        state: Mapping[str, torch.Tensor],
        group: Mapping[str, Any],
        count: float,
        is_new: bool,
        is_changed: bool,
        staging: Staging,
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Return the update of a weight in host memory to step `count`, given its gradient in host memory."""

        def update(gradient: torch.Tensor, weight: torch.Tensor) -> None:
            if MASTER not in state:
                _update(weight, gradient, state, group, count)
                return
            master = state[MASTER]
            if is_new:
                master.copy_(weight)
            elif is_changed:
                master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.float()))
            _update(master, staging.widened(gradient), state, group, count)
            weight.copy_(master)

        return update

    # The way to the host.

    @functools.cached_property
    def _link(self) -> Link:
        devices = {each.device for each in self._parameters()}
        if len(devices) > 1:
            raise InputError(
                f"OffloadedAdamW was given parameters on {', '.join(sorted(map(str, devices)))}; make one for each "
                "device."
            )
        return Link(devices.pop())

    def _staged(self) -> Staging:
        """Return memory for blocks of all parameters, reused from step to step."""
        parts = [(each, local(each)) for each in self._parameters() if each.requires_grad]
        needed = [Staged(part.numel(), part.dtype.itemsize, self._is_widened(each)) for each, part in parts]
        if self._staging is None or self._staging.num_bytes < staging_bytes(needed):
            self._staging = Staging(self._link, needed)
        return self._staging


def _update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    group: Mapping[str, Any],
    count: float,
) -> None:
    """Run AdamW's step `count` on a block, in place, all in host memory."""
    adamw(
        [weight],
        [gradient],
        [state[MOMENTS[0]]],
        [state[MOMENTS[1]]],
        [],
        [torch.tensor(count - 1)],  # the count that it increments
        amsgrad=False,
        maximize=False,
        fused=True,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )


def _zeros_on_host(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in host memory in the shape, and in the parts, of a parameter."""
    made = torch.zeros_like(local(parameter), dtype=dtype, device="cpu")
    if not isinstance(parameter, DTensor):
        return made
    meta = TensorMeta(parameter.shape, parameter.stride(), dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, meta)
    return DTensor(made, spec, requires_grad=False)  # from_local would take it to the device of the mesh
