"""On whole parameters: Muon is torch's, and GaLore is its definition."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.optim import GaLoreAdamW, Muon
from autopar.optim.matrices import is_matrix, is_projected

STEPS = 6


class _Model(nn.Module):
    """Two layers with a tall and a wide matrix, a bias and the scale of a norm, between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 12)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 20), nn.SiLU(), nn.Linear(20, 12, bias=False), nn.LayerNorm(12))
            for _ in range(2)
        )
        self.head = nn.Linear(12, 11, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def _trained(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        ids, labels = torch.randint(11, (2, 16), generator=generator)
        model(ids, labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def _model() -> _Model:
    torch.manual_seed(0)
    return _Model()


def _parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    named = list(model.named_parameters())
    hidden = [each for name, each in named if name.startswith("layers.") and each.ndim == 2]
    return hidden, [each for name, each in named if all(each is not other for other in hidden)]


def test_matrices_of_hidden_layers_are_updated_as_by_muon_of_torch_and_all_others_as_by_adamw() -> None:
    ours, theirs = _model(), _model()
    hidden, others = _parts(theirs)
    peers = [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=1e-2)]
    found = _trained(ours, [Muon(ours.named_parameters(), lr=0.02, adamw_lr=1e-2)])
    torch.testing.assert_close(found, _trained(theirs, peers), rtol=0, atol=0)


def test_the_momentum_of_a_matrix_in_bfloat16_is_that_of_its_gradients_alone() -> None:
    """The iterations begin in place, which torch.optim.Muon has them do on the momentum itself."""
    weight = nn.Parameter(torch.randn(12, 8, dtype=torch.bfloat16))
    muon = Muon([("layers.0.w", weight)], nesterov=False)
    weight.grad = torch.randn_like(weight)
    muon.step()
    expected = torch.zeros_like(weight).lerp_(weight.grad, 1 - 0.95)
    assert torch.equal(muon.state[weight]["momentum_buffer"], expected)


def _by_definition(weights: list[Tensor], gradients: list[list[Tensor]], settings: dict[str, Any]) -> None:
    """Algorithm 2 of GaLore, with AdamW's decoupled decay and bias corrections, on whole matrices."""
    lr, rank = settings["lr"], settings["rank"]
    for number, weight in enumerate(weights):
        right = weight.shape[0] >= weight.shape[1]
        mean, square = torch.zeros(()), torch.zeros(())
        basis = torch.empty(0)
        for step, every in enumerate(gradients):
            gradient = every[number]
            if step % settings["update_proj_gap"] == 0:
                u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
                basis = vh[:rank].t() if right else u[:, :rank]
                basis = basis * torch.sign(basis[basis.abs().argmax(0), torch.arange(rank)])
            inside = gradient @ basis if right else basis.t() @ gradient
            mean = 0.9 * mean + 0.1 * inside
            square = 0.999 * square + 0.001 * inside**2
            normed = mean / (1 - 0.9 ** (step + 1)) / ((square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
            weight *= 1 - lr * 0.01
            weight -= lr * settings["scale"] * (normed @ basis.t() if right else basis @ normed)


def test_galore_is_its_definition() -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((20, 12), (12, 20), (12, 12))
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(STEPS)]
    settings = {"lr": 0.01, "rank": 3, "update_proj_gap": 2, "scale": 0.5}
    wanted = [each.clone() for each in start]
    _by_definition(wanted, gradients, settings)
    weights = [nn.Parameter(each) for each in start]
    optimizer = GaLoreAdamW([(f"layers.{i}", each) for i, each in enumerate(weights)], **settings)
    for every in gradients:
        for weight, gradient in zip(weights, every, strict=True):
            weight.grad = gradient
        optimizer.step()
    torch.testing.assert_close([each.detach() for each in weights], wanted)
    held = [x for each in weights for x in optimizer.state[each].values() if x.ndim]
    assert sum(each.numel() for each in held) == sum(3 * (min(shape) + 2 * max(shape)) for shape in shapes)


def test_what_galore_does_not_project_is_updated_by_adamw() -> None:
    ours, theirs = _model(), _model()
    found = _trained(ours, [GaLoreAdamW(ours.named_parameters(), lr=1e-2, rank=12)])
    wanted = _trained(theirs, [torch.optim.AdamW(theirs.parameters(), lr=1e-2)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_basis_does_not_depend_on_the_sign_that_singular_vectors_come_with() -> None:
    from autopar.optim.subspace import basis_of

    gradient = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(basis_of(-gradient, 3), basis_of(gradient, 3))


@pytest.mark.parametrize("kind", [Muon, GaLoreAdamW])
def test_training_goes_on_from_the_state_of_an_optimizer(kind: type[Muon] | type[GaLoreAdamW]) -> None:
    settings: dict[str, Any] = {"rank": 4, "update_proj_gap": 4} if kind is GaLoreAdamW else {}
    model, other = _model(), _model()
    optimizer = kind(model.named_parameters(), **settings)
    _trained(model, [optimizer])
    resumed = kind(other.named_parameters(), **settings)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torch.testing.assert_close(_trained(other, [resumed]), _trained(model, [optimizer]), rtol=0, atol=0)


def test_patterns_say_which_parameters_are_matrices() -> None:
    assert is_matrix("h.3.attn.weight", (4, 4)) and not is_matrix("h.3.attn.bias", (4,))
    assert not is_matrix("wte.weight", (9, 4)) and is_matrix("wte.weight", (9, 4), ("wte.*",))
    assert not is_matrix("h.3.attn.weight", (4, 4), ("wte.*",))
    assert is_projected("h.3.attn.weight", (8, 5), 4) and not is_projected("h.3.attn.weight", (8, 4), 4)


def test_parameters_need_their_names() -> None:
    with pytest.raises(InputError, match=r"Muon was given parameters without names.*model.named_parameters\(\)"):
        Muon(_model().parameters())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 1.0}, r"Muon was given lr=0.001, .*momentum=1.0, .*a momentum below 1"),
        ({"adjust_lr_fn": "half"}, r"adjust_lr_fn='half'; give None or one of 'original', 'match_rms_adamw'"),
        ({"adamw_betas": (0.9, 1.0)}, r"AdamW was given .*betas=\(0.9, 1.0\)"),
    ],
)
def test_hyperparameters_of_muon_that_are_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Muon(_model().named_parameters(), **settings)


def test_a_rank_is_at_least_one() -> None:
    with pytest.raises(InputError, match="GaLoreAdamW was given rank=0, update_proj_gap=200; give at least 1"):
        GaLoreAdamW(_model().named_parameters(), rank=0)
