"""Texts of any length, and batches that are smaller, train on ranks as they do on one process, with few plans."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing import assert_close

import autopar
from autopar.errors import InputError
from tests.support.language_models import language_model, texts
from tests.support.options import by_flag
from tests.support.parity import SLOW_DEVICES
from tests.support.ranks import RankError, Ranks, mesh

BATCHES = [texts(4, 8), texts(4, 6, 1), texts(4, 7, 2), texts(2, 5, 3), texts(4, 14, 4), texts(3, 11, 5)]
BUCKETS = autopar.Buckets((8, 16), batches="largest")


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def _trained(model: nn.Module, batches: list[dict[str, Tensor]], step: str = "") -> tuple[list[float], list[Tensor]]:
    """Losses and logits, each of another step."""
    optimizer, losses, logits = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    for batch in batches:
        optimizer.zero_grad()
        if step:
            losses.append(getattr(model, step)(**batch).item())
        else:
            found = model(**batch)
            found["loss"].backward()
            losses.append(found["loss"].item())
            logits.append(_whole(found["logits"]))
        optimizer.step()
    return losses, logits


def _check(found: tuple[list[float], list[Tensor]], expected: tuple[list[float], list[Tensor]]) -> None:
    assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


def _compiled(example: Mapping[str, Tensor], annotations: Mapping[str, dict[str, Any]], **options: Any) -> Any:
    model = language_model(**options.pop("model", {}))
    for pattern, specified in annotations.items():
        autopar.annotate(model, pattern, **specified)
    shape, names = options.pop("shape", (2,)), options.pop("names", ("dp",))
    options = {"buckets": BUCKETS, "hardware": SLOW_DEVICES} | options
    return autopar.compile(model, mesh(shape, names), example, **by_flag(**options))


def _plans(model: Any) -> int:
    """Return how often the model was captured and planned."""
    return sum(map(len, model._known.values()))


LAYOUTS: dict[str, tuple[dict[str, dict[str, Any]], tuple[str, str]]] = {
    "samples": ({"*": {"dp": "data"}}, ("output:1", "S(0)")),
    "zigzag": ({"*": {"dp": "sequence"}}, ("linear_default_2/reshard", "Z(1)")),
    "positions": ({"*": {"dp": "sequence"}}, ("output:1", "S(1)")),
    "heads": (
        {"head": {"dp": "column"}, "packed": {"dp": "column"}},
        ("scaled_dot_product_attention_default", "h"),
    ),
}


def _whole_batches(layout: str) -> None:
    annotations, (decision, choice) = LAYOUTS[layout]
    options, batches = {"causal": layout != "positions"}, BATCHES
    if layout == "positions":
        batches = [batch | {"attention_mask": torch.ones_like(batch["labels"])} for batch in BATCHES]
        batches[1]["attention_mask"][0, 4:] = 0
    model = _compiled(batches[0], annotations, model=options)
    storage = {name: each.placements for name, each in model.named_parameters() if isinstance(each, DTensor)}
    _check(_trained(model, batches), _trained(language_model(**options), batches))
    assert _plans(model) == 2
    assert model.plan.choices[decision] == choice, model.plan.choices
    assert storage == {name: p.placements for name, p in model.named_parameters() if isinstance(p, DTensor)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_programs_serve_all_lengths_and_a_smaller_last_batch(ranks: Ranks, layout: str) -> None:
    ranks.run(_whole_batches, layout)


def _evaluated() -> None:
    model = _compiled(BATCHES[0], {"*": {"dp": "data"}}, outputs="full").eval()
    with torch.no_grad():
        found = model(**BATCHES[3])
        assert_close(found["logits"], language_model().eval()(**BATCHES[3])["logits"])


def test_whole_outputs_are_cut_too(ranks: Ranks) -> None:
    ranks.run(_evaluated)


def _parts() -> None:
    """Each rank has its own part, of its own length; the batch is that of all ranks, as long as the longest."""
    sizes = [((4, 6), (4, 8)), ((4, 3), (4, 5)), ((3, 7), (1, 4)), ((2, 6), (2, 6))]
    by_rank = [
        [texts(*size, seed=10 * step + rank) for rank, size in enumerate(each)] for step, each in enumerate(sizes)
    ]
    whole = [
        {
            name: torch.cat([_longer(part[name], max(size[1] for size in each), value) for part in parts])
            for name, value in (("input_ids", 0), ("labels", -100))
        }
        for each, parts in zip(sizes, by_rank, strict=True)
    ]
    model = _compiled(by_rank[0][dist.get_rank()], {"*": {"dp": "data"}}, inputs="local")
    losses, logits = _trained(language_model(), whole)
    for step, each in enumerate(sizes):
        before, (samples, length) = sum(size[0] for size in each[: dist.get_rank()]), each[dist.get_rank()]
        logits[step] = logits[step][before : before + samples, :length]
    _check(_trained(model, [parts[dist.get_rank()] for parts in by_rank]), (losses, logits))
    assert _plans(model) == 1


def _longer(part: Tensor, length: int, value: int) -> Tensor:
    return nn.functional.pad(part, (0, length - part.shape[1]), value=value)


def test_parts_of_different_lengths_and_sizes_are_one_batch(ranks: Ranks) -> None:
    ranks.run(_parts)


def _micro_batches() -> None:
    buckets = autopar.Buckets((8, 16))
    model = _compiled(BATCHES[0], {"*": {"dp": "data"}}, microbatches=2, buckets=buckets)
    halves = [[{name: each.chunk(2)[i] for name, each in batch.items()} for i in (0, 1)] for batch in BATCHES[:3]]
    alone, losses = language_model(), []
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for parts in halves:
        optimizer.zero_grad()
        each = [alone(**part)["loss"] / 2 for part in parts]
        sum(each).backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(sum(loss.item() for loss in each))
    _check(_trained(model, BATCHES[:3], "train_step"), (losses, []))
    assert _plans(model) == 1


def test_lengths_vary_in_train_step_of_micro_batches(ranks: Ranks) -> None:
    ranks.run(_micro_batches)


class _Blocks(nn.Module):
    """Language models one behind the other, for a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 24)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x_BSD = self.embed(input_ids)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        logits_BSV = self.head(x_BSD)
        return {"loss": nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels.flatten()), "logits": logits_BSV}


def _blocks() -> _Blocks:
    torch.manual_seed(0)
    return _Blocks()


def _pipeline() -> None:
    batches = [texts(4, 8), texts(4, 5, 1), texts(4, 7, 2)]
    options: Any = {"microbatches": 2, "buckets": autopar.Buckets((8,))}
    model = autopar.compile(_blocks(), mesh((2,), ("pp",)), batches[0], **by_flag(**options))
    alone = _blocks()
    _check(_trained(model, batches, "train_step"), (_trained(alone, batches)[0], []))
    assert _plans(model) == 1
    with torch.no_grad():
        found, expected = model.eval()(**batches[1]), alone.eval()(**batches[1])
    assert_close(_whole(found["logits"]), expected["logits"])


def test_lengths_vary_on_a_pipeline(ranks: Ranks) -> None:
    ranks.run(_pipeline)


def _warmed_up() -> None:
    model = _compiled(BATCHES[1], {"*": {"dp": "data"}}, model={"dropout": 0.0})
    model.warm_up(**BATCHES[0])
    before = _plans(model)
    _check(_trained(model, BATCHES), _trained(language_model(), BATCHES))
    assert before == _plans(model) == 2


def test_all_lengths_may_be_planned_ahead(ranks: Ranks) -> None:
    ranks.run(_warmed_up)


def _called_differently() -> None:
    model = _compiled(BATCHES[0], {"*": {"dp": "data"}}, check_inputs=False)
    model(**texts(4, 5 + dist.get_rank()))


def test_ranks_with_whole_batches_of_other_lengths_are_told_so(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"the ranks were called differently: rank 0 with sizes: .*length=5"):
        ranks.run(_called_differently)


def _refused_on_every_rank() -> None:
    with pytest.raises(InputError, match=r"scaled_dot_product_attention.* mixes padded places"):
        _compiled(BATCHES[0], {}, model={"causal": False})
    ids = distribute_tensor(BATCHES[1]["input_ids"], mesh((2,), ("dp",)), [Shard(0)])
    model = _compiled(BATCHES[0], {"*": {"dp": "data"}})
    with pytest.raises(InputError, match=r"input_ids is a DTensor of \[4, 6\], which would have to be padded to"):
        model(input_ids=ids, labels=BATCHES[1]["labels"])


@pytest.mark.slow
def test_what_cannot_be_padded_is_refused_on_every_rank(ranks: Ranks) -> None:
    ranks.run(_refused_on_every_rank)


def _options_refused() -> None:
    for options in ({"shape": (1,), "microbatches": 2}, {"shape": (1,), "names": ("pp",), "microbatches": 2}):
        with pytest.raises(InputError, match=re.escape("Buckets(batches='largest') with micro-batches")):
            _compiled(BATCHES[0], {}, **options)
    with pytest.raises(
        InputError, match=re.escape('Run(buckets=7); give "auto", "none" or autopar.Buckets(…), or None')
    ):
        _compiled(BATCHES[0], {}, buckets=7, shape=(1,))
    with pytest.raises(InputError, match="compiled without buckets"):
        _compiled(BATCHES[0], {}, buckets=None, shape=(1,)).warm_up(**BATCHES[0])
    with pytest.raises(InputError, match="9 positions is longer than the longest bucket, 8"):
        _compiled(BATCHES[0], {}, buckets=autopar.Buckets((8,)), shape=(1,))(**texts(4, 9))


def test_buckets_that_do_not_go_with_other_options_are_refused(ranks: Ranks) -> None:
    ranks.run(_options_refused, world_size=1)
