"""Files with the tensors of a checkpoint: one file, or several with an index, named as by Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from autopar.errors import InputError
from autopar.files.reading import read_json, read_text
from autopar.files.schema import Malformed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def files_of(path: str | Path) -> dict[str, Path]:
    """Return the name of a tensor → the file that has it, of a `.safetensors` file or of a folder of them; else
    InputError.
    """
    path = Path(path)
    if path.is_dir() and (path / INDEX).exists():
        index: Any = _json(path / INDEX)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            raise InputError(f'{path / INDEX} has no "weight_map"; give a checkpoint as Hugging Face writes it.')
        found = {name: path / str(file) for name, file in index["weight_map"].items()}
        missing = sorted({str(file) for file in found.values() if not file.is_file()})
        if missing:
            raise InputError(f"{path / INDEX} names {missing[0]}, which is not there; fetch all files of it.")
        return found
    file = path / SINGLE if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"{file} is no file; give a .safetensors file, or a folder with {SINGLE} or {INDEX}, as "
            "huggingface_hub.snapshot_download returns one."
        )
    try:
        with safe_open(file, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), file)
    except Exception as error:  # safetensors has an exception of its own, and no base for it
        raise InputError(f"{file} is no safetensors file: {error}.") from error


def _json(file: Path) -> Any:
    try:
        return read_json(read_text(file))
    except Malformed as error:
        raise InputError(f"{file} cannot be read: {error}.") from error


def index_of(files: Mapping[str, str], num_bytes: int) -> str:
    """Return the text of an index: name of a tensor → name of its file."""
    return json.dumps({"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(files.items()))}, indent=2)
