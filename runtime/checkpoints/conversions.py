"""Match tensors of a checkpoint with the tensors of a model that they make, by the rules of transformers.

`from_pretrained` renames tensors, and merges or splits some of them (`transformers.core_model_loading`). The same rules
are applied here to names and shapes, before any tensor is read.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]
MOVED = ("rotary_emb.inv_freq", "position_ids")
"""Buffers that older checkpoints have and newer models compute; `from_pretrained` skips them, too."""


@dataclass(slots=True, eq=False)
class Conversion:
    """Tensors of a checkpoint that make one or several tensors of the model."""

    first: str
    """Name of the first tensor that is made."""
    converter: Any
    """A `WeightConverter` of transformers; None if the one source is only renamed."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Pattern of the converter → names in the checkpoint, in the order in which they are merged."""

    @property
    def names(self) -> list[str]:
        """Names in the checkpoint."""
        return [name for names in self.sources.values() for name in names]

    @property
    def stacks(self) -> bool:
        """True if row i of what is made comes from the i-th source of each pattern alone."""
        if self.converter is None or len({len(names) for names in self.sources.values()}) != 1:
            return False
        from transformers.core_model_loading import Concatenate, MergeModulelist

        first, *others = self.converter.operations
        joins = all(type(each) is Concatenate and each.dim > 0 for each in others)
        return type(first) is MergeModulelist and first.dim == 0 and joins

    def made(self, model: Any, load: Callable[[str], Tensor], rows: slice = slice(None)) -> dict[str, Tensor]:
        """Return the tensors that are made, by name.

        Args:
            model: has the configuration, and parameters of the whole shapes.
            load: returns a tensor of the checkpoint.
            rows: of a conversion that stacks, the rows to make.
        """
        if self.converter is None:
            return {self.first: load(self.names[0])}
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names[rows]:
                converter.add_tensor(self.first, name, pattern, load(name))
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    def shapes(self, model: Any, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return name → shape of what is made of tensors of these shapes; whatever transformers raises if it cannot."""
        made = self.made(model, lambda name: torch.empty(shapes[name], device="meta"))
        return {name: tuple(each.shape) for name, each in made.items()}

    def gaps(self) -> list[str]:
        """Return the names that are missing in numbered lists of sources, such as those of one expert."""
        if self.converter is None or not any("*" in pattern for pattern in self.converter.source_patterns):
            return []
        parts = {name: name.split(".") for name in self.names}
        columns = enumerate(zip(*parts.values(), strict=False))
        numbered = [at for at, column in columns if len(set(column)) > 1 and all(map(str.isdecimal, column))]
        if len(numbered) != 1:
            return []
        [at] = numbered
        count = 1 + max(int(each[at]) for each in parts.values())
        return [
            ".".join([*parts[names[0]][:at], str(number), *parts[names[0]][at + 1 :]])
            for names in self.sources.values()
            for number in sorted(set(range(count)) - {int(parts[name][at]) for name in names})
        ]

    def lacks(self) -> str:
        """Return a text that names the patterns without any source; an empty one if all have some."""
        patterns = () if self.converter is None else self.converter.source_patterns
        lacking = [pattern for pattern in patterns if pattern not in self.sources]
        return f"it has no tensor like {', '.join(lacking)} for {self.first}" if lacking else ""

    def several_for_one(self) -> bool:
        """Return whether the checkpoint has the same tensor more than once, under different names."""
        if self.converter is None:
            return len(self.sources) > 1
        return not set(self.sources) <= set(self.converter.source_patterns)


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether transformers has rules for the checkpoints of the model."""
    modeling: Any = sys.modules.get("transformers.modeling_utils")  # a model of transformers has imported it
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def conversions_of(model: Any, known: Mapping[str, Tensor], names: Iterable[str]) -> tuple[list[Conversion], list[str]]:
    """Return the conversions that make a model's tensors, and the names in the checkpoint that make none.

    Args:
        model: a model of transformers.
        known: the tensors of its state dict, by name.
        names: those in the checkpoint.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [each for each in rules if isinstance(each, WeightRenaming)]
    converters = [each for each in rules if isinstance(each, WeightConverter)]
    converter_of = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, tensors = model.base_model_prefix, dict(known)
    skipped = re.compile("|".join(_skipped(model)) or "(?!)")
    found: dict[str, Conversion] = {}
    unknown = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, tensors)
        if target not in known and name in known:
            target, pattern = name, None
        if target in known:
            converter = None if pattern is None else converter_of[str(pattern)]
            conversion = found.setdefault(target, Conversion(target, converter))
            conversion.sources.setdefault(name if pattern is None else str(pattern), []).append(name)
        elif not skipped.search(target):
            unknown.append(name)
    return list(found.values()), unknown


def _skipped(model: Any) -> Iterator[str]:
    """Yield patterns of names that `from_pretrained` skips if the model does not have them."""
    yield from (f"(?:{pattern})" for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    yield from (rf"(?:^|\.){re.escape(leaf)}$" for leaf in MOVED if any(name.endswith(leaf) for name in buffers))
