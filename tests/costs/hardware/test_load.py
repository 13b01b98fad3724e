"""Profiles by name or path, and their variants: what a suffix replaces, and what is published of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.costs.hardware.load import PROFILES, known_profiles, load, parse
from autopar.errors import PlanError

LINK = {"name": "wire", "devices": None, "latency_s": 0.0, "bytes_per_s": 1e9}


def _profile(link: dict[str, Any], **changes: Any) -> dict[str, Any]:
    numbers = {"memory_bytes_per_s": 1e11, "memory_bytes": 1000, "op_latency_s": 0}
    return {"name": "mine", "flops": {"float32": 1e12}, **numbers, "links": [link], **changes}


def test_checks_of_collectives_take_nothing_but_in_the_variant_with_them() -> None:
    assert load("h100").collective_check_s == 0.0 < load("h100:debug").collective_check_s
    profile = json.loads((PROFILES / "cpu.json").read_text())
    with pytest.raises(PlanError, match=r"has collective_check_s = -1\.0; give at least 0"):
        parse({**profile, "collective_check_s": -1})


def test_suffixes_choose_variants_of_a_profile(tmp_path: Path) -> None:
    link = {"name": "wire", "devices": None, "latency_s": 0.0, "bytes_per_s": 1e9}
    path = tmp_path / "a:b.json"
    variants = {
        "graph": {"launch_s": {"value": 1e-9, "source": "assumed"}},
        "slow": {"launch_s": 1e-3},
        "fa3": {"attention_length": 800, "attention_head": 53},
    }
    path.write_text(json.dumps(_profile(link, launch_s=4e-5, variants=variants)))
    whole = load(path)
    assert load(f"{path}:graph") == replace(whole, launch_s=1e-9)
    assert load(f"{path}:fa3:graph") == replace(whole, launch_s=1e-9, attention_length=800.0, attention_head=53.0)
    with pytest.raises(PlanError, match="no variant 'eager', found 'graph', 'slow', 'fa3'; use one of them, or leave"):
        load(f"{path}:eager")
    with pytest.raises(PlanError, match="its variants 'graph' and 'slow' both replace launch_s; choose one of them"):
        load(f"{path}:graph:slow")
    with pytest.raises(PlanError, match="no variant ''"):
        load(f"{path}:")
    with pytest.raises(PlanError, match="'h999:graph' is not known"):
        load("h999:graph")
    path.write_text(json.dumps(_profile(link, variants={"graph": {"launches": 1}})))
    with pytest.raises(PlanError, match=r"variants\.graph has 'launches'; it may have"):
        load(path)


@pytest.mark.parametrize("name", [name for name in known_profiles() if name != "cpu"])
def test_a_gpu_launches_more_slowly_the_more_python_runs(name: str) -> None:
    seconds = [load(each).launch_s for each in (name, *(f"{name}:{how}" for how in ("generated", "compiled", "graph")))]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] > 0


@pytest.mark.parametrize(
    ("name", "queries", "head", "published"),
    [
        *(("a100", queries, 128, rate) for queries, rate in ((512, 99e12), (2048, 155e12), (16384, 189e12))),
        *(("a100", queries, 64, rate) for queries, rate in ((512, 88e12), (2048, 140e12), (16384, 171e12))),
        *(("h100", queries, 128, rate) for queries, rate in ((512, 163e12), (2048, 265e12), (16384, 328e12))),
        *(("h100", queries, 64, rate) for queries, rate in ((512, 141e12), (2048, 232e12), (16384, 284e12))),
        *(("h100:fa3", queries, 128, rate) for queries, rate in ((512, 243e12), (2048, 458e12), (16384, 580e12))),
        *(("h100:cudnn", queries, 128, rate) for queries, rate in ((512, 243e12), (2048, 425e12), (16384, 526e12))),
        *(("h100:te", queries, 128, rate) for queries, rate in ((512, 243e12), (2048, 425e12), (16384, 526e12))),
    ],
)
def test_attention_follows_the_published_curves_of_flash_attention(
    name: str, queries: int, head: int, published: float
) -> None:
    hardware = load(name)
    rate = hardware.flops_of("bfloat16") * hardware.product_efficiency * hardware.attention_efficiency
    rate /= (1 + hardware.attention_length / queries) * (1 + hardware.attention_head / head)
    assert rate == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(("rows", "published"), [(4096, 716e12), (8192, 795e12)])
def test_products_of_transformer_engine_follow_the_published_rates_of_cublas(rows: int, published: float) -> None:
    hardware = load("h100:te")
    rate = hardware.flops_of("bfloat16") * hardware.product_efficiency
    assert rate / (1 + hardware.product_wave / (2 * rows**2)) == pytest.approx(published, rel=0.02)
    with pytest.raises(PlanError, match="its variants 'te' and 'cudnn' both replace attention_efficiency"):
        load("h100:te:cudnn")
