"""The gallery of docs/examples: each script shows on two ranks what it shows on one process without autopar."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.testing import assert_close

from tests.integrations.scripts import EXAMPLES, shown_here, written_before
from tests.support.ranks import Ranks

CHANGED = {
    "plain.py": 3,
    "diffusion.py": 3,
    "vision.py": 3,
    "lora.py": 3,
    "experts.py": 3,
    "long_context.py": 3,
    "serving.py": 3,
}
"""Lines that autopar adds to or changes in each script; the others are run by tests of their integrations."""
SLOW = set(CHANGED) - {"lora.py", "serving.py"}
FURTHER = {"accelerate_loop.py", "lightning_trainer.py", "trainer.py"}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each in SLOW else ()) for each in CHANGED]
)
def test_an_example_shows_on_two_ranks_what_it_shows_on_one_process(name: str, ranks: Ranks, tmp_path: Path) -> None:
    script, changed = written_before(name, tmp_path)
    expected = shown_here(str(script), str(tmp_path))
    found = ranks.run(shown_here, str(EXAMPLES / name), str(tmp_path), timeout=120.0)
    assert changed == CHANGED[name]
    if name == "serving.py":
        assert found == [expected, expected] and len(expected["tokens"][0]) == 14
        return
    # Where each rank has its own samples, the loss of the batch is the mean of those of the ranks.
    losses = [sum(pair) / 2 for pair in zip(*(each["losses"] for each in found), strict=True)]
    assert_close(losses, expected["losses"], rtol=1e-4, atol=1e-5)
    assert losses[-1] < losses[0]
    assert (name == "lora.py") == (tmp_path / "lora-adapter" / "adapter_model.safetensors").exists()


def test_the_gallery_has_ten_scripts_of_at_most_sixty_lines() -> None:
    index = (EXAMPLES / "index.md").read_text()
    listed = set(re.findall(r"^\| \[.*\]\((\w+\.py)\) \|", index, re.M))
    assert listed == CHANGED.keys() | FURTHER and len(listed) == 10
    assert {name: lines for name in listed if (lines := len((EXAMPLES / name).read_text().splitlines())) > 60} == {}
