"""Scripts moved over from DistributedDataParallel: each rank loads its own samples and takes the loss of these."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.users.scripts.setting import (
    Classifier,
    Found,
    Setting,
    Writer,
    batches,
    parameters_of,
    seeded,
    texts,
    whole,
)


def distributed_sampler(setting: Setting) -> Found:
    """A DistributedSampler on every rank, the loss outside, epochs with `set_epoch`."""
    x, y = (torch.cat(each) for each in zip(*batches(3), strict=True))
    data = TensorDataset(x, y)
    model = setting.parallel(seeded(Classifier), x[: 8 // setting.num_parts])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(2):
        # In one process the batches are those that the ranks have together.
        parts = [
            list(_loader(data, rank, setting, epoch)) for rank in ([setting.rank] if setting.num_parts > 1 else (0, 1))
        ]
        for each in zip(*parts, strict=True):
            inputs, labels = (torch.cat(tensors) for tensors in zip(*each, strict=True))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(setting.mean(loss))
    return {"losses": losses, **parameters_of(model)}


def _loader(data: TensorDataset, rank: int, setting: Setting, epoch: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    sampler = DistributedSampler(data, 2, rank, seed=3)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size=4, sampler=sampler)


def accumulated_with_clipping(setting: Setting) -> Found:
    """Accumulate two backward passes of local losses, clip, and step a language model."""
    data = texts(6)
    model = setting.parallel(seeded(Writer), setting.part(data[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms, losses = [], []
    for step, ids in enumerate(data):
        ids = setting.part(ids)
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / 2
        loss.backward()
        losses.append(setting.mean(loss))
        if step % 2:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            norms.append(float(whole(norm)))
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": losses, "norms": norms, **parameters_of(model)}


def metrics_and_full_checkpoint(setting: Setting) -> Found:
    """Evaluate on each rank's samples and reduce the counts; save a full state dict on rank 0 and load it."""
    train, held_out = batches(3), batches(2, seed=7)
    model = setting.parallel(seeded(Classifier), setting.part(train[0][0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    right = []
    for x, y in train:
        x, y = setting.part(x), setting.part(y)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found = [(model(setting.part(x)).argmax(-1) == setting.part(y)).sum() for x, y in held_out]
        right.append(setting.mean(torch.stack(found).sum().float()) * setting.num_parts)
        model.train()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    path = setting.folder / "full.pt"
    if setting.rank == 0:
        torch.save(state, path)
    model = setting.parallel(seeded(Classifier, 8), setting.part(train[0][0]))
    loaded = torch.load(path) if setting.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=setting.is_parallel)
    set_model_state_dict(model, loaded, options=options)
    return {"right": right, **parameters_of(model)}
