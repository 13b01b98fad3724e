"""Matrices that are gathered along their columns are stored transposed, and train as they would otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

import autopar
from benchmarks.step_counts import Operations
from benchmarks.step_operations import CASES, MACHINE
from benchmarks.transformer_model import Size, batch, transformer
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES, Case, check
from tests.support.ranks import Ranks, mesh
from tests.support.simulation.fake_mesh import fake_mesh

SIZE = Size(2, 64, 4, 128, 8, 8)
LARGER = Size(2, 512, 8, 1024, 8, 8)  # whose embedding has a message of its own


def test_columns_are_stored_first_where_products_alone_take_them() -> None:
    with fake_mesh({"dp": 2, "tp": 2}) as devices:
        model = autopar.compile(transformer(SIZE), devices, batch(SIZE), hardware=MACHINE, strategy="fsdp_megatron")
        assert model.plan.choices["p_blocks_0_attention_q_weight"] == "S(1) S(0)"
        assert model.plan.choices["p_embedding_weight"] == "S(1) S(0)"
        transposed = {n for n, p in model.named_parameters() if not p._local_tensor.is_contiguous()}  # type: ignore[attr-defined]
    columns = {f"blocks.{i}.{m}.weight" for i in range(2) for m in ("attention.q", "attention.k", "attention.v")}
    assert transposed == columns | {f"blocks.{i}.feedforward.up.weight" for i in range(2)} | {"head.weight"}


@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_messages_of_columns_are_packed_and_unpacked_by_one_kernel(precision: str | None) -> None:
    axes = next(case.axes for case in CASES if case.name == "fsdp_megatron")
    with fake_mesh(axes(8)) as devices:
        options: dict[str, Any] = {"strategy": "fsdp_megatron", "precision": precision, "hardware": MACHINE}
        model = autopar.compile(transformer(LARGER), devices, batch(LARGER), **by_flag(**options))
        model(*batch(LARGER)).backward()
        with Operations() as operations:
            model(*batch(LARGER)).backward()
    every, kernels = (each["aten::_foreach_copy_"] for each in (operations.every, operations.kernels))
    assert kernels == every
    assert precision or every == 2  # of the embedding, whose rows are looked up, forward and backward


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_they_train_as_one_process_does(recompute: str, ranks: Ranks) -> None:
    options = {"hardware": SLOW_DEVICES, "strategy": "fsdp_megatron", "recompute": recompute}
    check(ranks, Case("llama", (2, 2), options=options, dtype=torch.float64, steps=3))


def _saved_and_read(path: Path) -> list[tuple[bool, bool]]:
    devices = mesh((2, 2), ("dp", "tp"))

    def made(strategy: str) -> Any:
        return autopar.compile(transformer(SIZE), devices, batch(SIZE), hardware=SLOW_DEVICES, strategy=strategy)

    one, other, plain = made("fsdp_megatron"), made("fsdp_megatron"), made("data_parallel")
    one(*batch(SIZE)).backward()
    torch.optim.AdamW(one.parameters(), lr=0.1).step()
    save({"model": one.state_dict()}, checkpoint_id=path)
    for model in (other, plain):
        state = {"model": model.state_dict()}
        load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
    found = []
    for mine, its, whole in zip(one.parameters(), other.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, DTensor) and isinstance(its, DTensor)
        found.append((torch.equal(mine.full_tensor(), its.full_tensor()), torch.equal(mine.full_tensor(), whole)))
    return found


@pytest.mark.slow
def test_checkpoints_do_not_depend_on_the_order_in_memory(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(_saved_and_read, tmp_path, world_size=4):
        assert all(same and whole for same, whole in found)
