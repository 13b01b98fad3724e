"""The text of the demonstration: bytes of this Python, cut into batches."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from autopar.errors import InputError
from autopar.models.corpus import batches, library_text


def test_the_text_is_the_library_in_the_order_of_its_file_names() -> None:
    first, second = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:2]
    expected = first.read_bytes() + second.read_bytes()
    assert library_text().startswith(expected)


def test_the_text_ends_at_its_cap() -> None:
    assert len(library_text(1000)) == 1000
    assert library_text(1000) == library_text()[:1000]


def test_a_python_without_sources_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(InputError, match=f"no .py files in {tmp_path}"):
        library_text()


def test_a_label_is_the_byte_after_its_id() -> None:
    found = list(batches(bytes(range(200)), batch=3, sequence=10, steps=2))
    assert len(found) == 2
    for ids, labels in found:
        assert ids.shape == labels.shape == (3, 10)
        assert ids.dtype == labels.dtype == torch.int64
        assert torch.equal(labels, ids + 1)


def test_equal_seeds_give_equal_batches_and_steps_differ() -> None:
    def ids(seed: int) -> torch.Tensor:
        return torch.stack([ids for ids, _ in batches(bytes(range(256)) * 4, 2, 8, 3, seed)])

    assert torch.equal(ids(1), ids(1))
    assert not torch.equal(ids(1), ids(2))
    assert not torch.equal(ids(1)[0], ids(1)[1])


def test_a_text_of_one_piece_is_enough_and_a_shorter_one_is_an_error() -> None:
    assert [ids.tolist() for ids, _ in batches(b"abc", 1, 2, 1)] == [[[97, 98]]]
    with pytest.raises(InputError, match=r"a text of 2 bytes has no piece of 3"):
        list(batches(b"ab", 1, 2, 1))
