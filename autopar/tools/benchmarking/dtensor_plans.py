"""Plans for DTensor's `parallelize_module`: the style of each module, for the model families that it can split.

Llama-like       q, k, v, gate and up by columns, o and down by rows, embedding and head by the vocabulary
vision encoder   q, k, v and fc1 by columns, o and fc2 by rows
perceptron       the layers in pairs: by columns, then by rows

With sequence parallelism, norms and residuals are sharded over the sequence. Embeddings stay whole, because Hugging
Face models derive positions from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

Styles = dict[str, ParallelStyle]


@dataclass(frozen=True, slots=True)
class TensorParallelPlan:
    """A style per module, and whether the loss is computed on parts of the vocabulary."""

    styles: Mapping[str, ParallelStyle]
    splits_loss: bool = False


def tensor_parallel_plan(
    model: nn.Module, num_parts: int, inputs: Sequence[Tensor], sequence: bool
) -> TensorParallelPlan | str:
    """Return the split of the model over `num_parts` ranks, or the reason why it cannot be split."""
    names = {name for name, _ in model.named_modules()}
    for family in (_llama, _vision_encoder, _perceptron):
        found = family(model, names, num_parts, inputs, sequence)
        if found is not None:
            return found
    if any(type(module).__name__ == "Conv1D" for module in model.modules()):
        return (
            "the model keeps its weights in Conv1D modules, with q, k and v in one; ColwiseParallel splits nn.Linear "
            "and nn.Embedding, one matrix each"
        )
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()):
        return "the model is made of convolutions; ColwiseParallel splits nn.Linear and nn.Embedding"
    return f"no tensor-parallel plan is written for {type(model).__name__}"


def _llama(
    model: nn.Module, names: set[str], num_parts: int, inputs: Sequence[Tensor], sequence: bool
) -> TensorParallelPlan | str | None:
    found = _modules_with_projection(names, "self_attn.q_proj")
    if not found or not all(f"{found[0]}.{name}" in names for name in ("self_attn.o_proj", "mlp.gate_proj")):
        return None
    config: Any = model.get_submodule(f"{found[0]}.self_attn").config
    counts = {"key heads": config.num_key_value_heads, "tokens of the vocabulary": config.vocab_size}
    if reason := _indivisible(num_parts, counts):
        return reason
    if sequence and (reason := _indivisible(num_parts, {"tokens of a text": inputs[0].shape[1]})):
        return reason
    if config.tie_word_embeddings:
        return "the embedding and the head share one weight, which parallelize_module splits for one of them only"
    stem = found[0].removesuffix(".layers.0")
    root = stem.rpartition(".")[0]
    head = f"{root}.lm_head" if root else "lm_head"
    between = Shard(1) if sequence else Replicate()
    styles: Styles = {
        f"{stem}.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        head: ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    for layer in found:
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        rows = ("self_attn.o_proj", "mlp.down_proj")
        styles |= _column_then_row_styles(layer, columns, rows, sequence)
        if sequence:
            styles |= _whole_sequence(f"{layer}.self_attn", keyword="hidden_states")
            styles |= _whole_sequence(f"{layer}.mlp")
            styles |= {f"{layer}.{norm}": SequenceParallel() for norm in _NORMS}
    if sequence:
        styles[found[0]] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
        )
        styles[f"{stem}.norm"] = SequenceParallel()
    return TensorParallelPlan(styles, splits_loss=True)


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _vision_encoder(
    model: nn.Module, names: set[str], num_parts: int, inputs: Sequence[Tensor], sequence: bool
) -> TensorParallelPlan | str | None:
    found = _modules_with_projection(names, "attention.q_proj")
    if not found or f"{found[0]}.mlp.fc1" not in names:
        return None
    config: Any = model.get_submodule(f"{found[0]}.attention").config
    if reason := _indivisible(num_parts, {"heads": config.num_attention_heads}):
        return reason
    if sequence:
        return (
            "an image has one token more than it has patches, an uneven sequence, of which SequenceParallel takes "
            "equal parts only"
        )
    styles: Styles = {}
    for layer in found:
        columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.fc1")
        styles |= _column_then_row_styles(layer, columns, ("attention.o_proj", "mlp.fc2"), sequence)
    return TensorParallelPlan(styles)


def _perceptron(
    model: nn.Module, names: set[str], num_parts: int, inputs: Sequence[Tensor], sequence: bool
) -> TensorParallelPlan | str | None:
    with_weights = [(name, module) for name, module in model.named_modules() if [*module.parameters(recurse=False)]]
    linears = [(name, module) for name, module in with_weights if isinstance(module, nn.Linear)]
    if not linears or len(linears) < len(with_weights):
        return None
    if sequence:
        return "the model has no sequence"
    pairs = list(zip(linears[::2], linears[1::2], strict=False))
    if not pairs:
        return "a single matrix has no pair to split it with"
    styles: Styles = {}
    for (up, first), (down, _) in pairs:
        if reason := _indivisible(num_parts, {f"outputs of {up}": first.out_features}):
            return reason
        styles |= {up: ColwiseParallel(), down: RowwiseParallel()}
    return TensorParallelPlan(styles)


def _modules_with_projection(names: set[str], projection: str) -> list[str]:
    layers = [name.removesuffix(f".{projection}") for name in names if name.endswith(f".{projection}")]
    return sorted(layers, key=lambda name: int(name.rpartition(".")[2]))


def _column_then_row_styles(layer: str, columns: Sequence[str], rows: Sequence[str], sequence: bool) -> Styles:
    styles: Styles = {f"{layer}.{name}": ColwiseParallel() for name in columns}
    for name in rows:
        styles[f"{layer}.{name}"] = RowwiseParallel(output_layouts=Shard(1) if sequence else Replicate())
    return styles


def _whole_sequence(module: str, keyword: str | None = None) -> Styles:
    """Return a module that takes parts of the sequence and computes on the whole."""
    parts, whole = Shard(1), Replicate()
    if keyword is None:
        return {module: PrepareModuleInput(input_layouts=(parts,), desired_input_layouts=(whole,))}
    return {
        module: PrepareModuleInput(input_kwarg_layouts={keyword: parts}, desired_input_kwarg_layouts={keyword: whole})
    }


def _indivisible(num_parts: int, counts: Mapping[str, int]) -> str | None:
    """Return why the first of the counts that does not divide cannot be split."""
    for what, count in counts.items():
        if count % num_parts:
            return f"{count} {what} do not divide over {num_parts} ranks"
    return None
