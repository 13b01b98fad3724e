"""Expressions of a line that compute what layers and losses do; the interface is that of `tensors`."""

from __future__ import annotations

from tests.fuzz.kinds import Operands, kind
from tests.fuzz.program import VOCABULARY


@kind("embedding")
def embedding(d: Operands) -> str:
    wide = d.random.choice((4, 8))
    ids = d.ids(4) if d.random.random() < 0.3 else d.ids(4, 4)
    table = d.weight(VOCABULARY, wide)
    return d.random.choice(
        [
            f"F.embedding({ids}, {table})",
            f"F.embedding({ids}, {table})",
            f"{table}[{ids}]",
            f"F.one_hot({ids}, {VOCABULARY}).double() @ {table}",
            f"F.embedding({ids}, {table}, padding_idx=0)",
        ]
    )


@kind("norm")
def norm(d: Operands) -> str:
    x = d.value(2, 3, 4)
    shape = d.shape(x)
    wide, channels = shape[-1], shape[1]
    return d.random.choice(
        [
            f"F.layer_norm({x},({wide},),{d.weight(wide)},{d.weight(wide)})",
            f"F.layer_norm({x},({wide},))",
            f"F.layer_norm({x},{shape[-2:]})",
            f"F.rms_norm({x},({wide},),{d.weight(wide)},1e-3)",
            f"{x}*({x}.square().mean(-1,keepdim=True)+0.01).rsqrt()*{d.weight(wide)}",
            f"F.group_norm({x},{2 if channels % 2 == 0 else 1},{d.weight(channels)},{d.weight(channels)})",
            f"F.batch_norm({x},{d.buffer(channels)},{d.buffer(channels)}.abs_(),{d.weight(channels)},{d.weight(channels)},training=True)",
            f"F.batch_norm({x},None,None,training=True)",
            f"F.instance_norm({x})",
            f"F.local_response_norm({x},2)",
        ]
    )


@kind("attention")
def attention(d: Operands) -> str:
    """Attention with projections of its own; heads, shared keys, masks and causality are drawn."""
    x = d.value(3)
    _, positions, wide = d.shape(x)
    heads = d.random.choice((1, 2, 4))
    groups = d.random.choice([g for g in (1, 2, 4) if heads % g == 0])
    q = f"F.linear({x},{d.weight(2 * heads, wide)}).unflatten(-1,({heads},2)).transpose(1,2)"
    k, v = (f"F.linear({x},{d.weight(2 * groups, wide)}).unflatten(-1,({groups},2)).transpose(1,2)" for _ in range(2))
    more = ",enable_gqa=True" if groups != heads else ""
    mask = d.random.choice(
        [
            "",
            ",is_causal=True",
            f",attn_mask=torch.ones({positions},{positions},dtype=torch.bool).tril()",
            f",attn_mask=torch.zeros({positions},{positions},dtype=torch.float64)",
            ",dropout_p=0.3",
        ]
    )
    return f"F.scaled_dot_product_attention({q},{k},{v}{mask}{more}).transpose(1,2).flatten(2)"


@kind("attention")
def attention_by_hand(d: Operands) -> str:
    q, k = d.value(3, 4), d.value(3, 4)
    positions = d.shape(k)[-2]
    future = f"torch.ones({positions},{positions},dtype=torch.bool).triu(1)"
    return f"({q}@{k}.mT).masked_fill({future},-math.inf).softmax(-1)@{k}"


@kind("convolution")
def convolution(d: Operands) -> str:
    x = d.value(3, 4)
    channels, n = d.shape(x)[1], len(d.shape(x)) - 2
    out = d.random.choice((2, 4))
    bias = d.random.choice(["None", d.weight(out)])
    groups = d.random.choice([1, 1, 2 if channels % 2 == 0 else 1])
    options = d.random.choice(["padding=1", "stride=2,padding=1", "padding=2,dilation=2", "padding=0"])
    return d.random.choice(
        [
            f"F.conv{n}d({x},{d.weight(out, channels // groups, *(3,) * n)},{bias},{options},groups={groups})",
            f"F.conv{n}d({x},{d.weight(out, channels, *(1,) * n)},{bias})",
            f"F.conv{n}d({x},{d.weight(channels, 1, *(3,) * n)},None,padding=1,groups={channels})",
            f"F.conv_transpose{n}d({x},{d.weight(channels, out, *(2,) * n)},stride=2)",
            f"F.max_pool{n}d({x},2)",
            f"F.avg_pool{n}d({x},2)",
            f"F.adaptive_avg_pool{n}d({x},{(1,) * n})",
            f"F.interpolate({x},scale_factor=2)",
            f"F.avg_pool{n}d({x},3,stride=1,padding=1)",
        ]
    )


@kind("dropout")
def dropout(d: Operands) -> str:
    x = f"{d.value(1, 2, 3, 4)}.contiguous()"  # one process draws masks in the order of memory
    return d.random.choice([f"F.dropout({x},0.4)", f"F.dropout({x},0.2).relu()", f"F.dropout({x},0.0)"])


@kind("scalar")
def penalty(d: Operands) -> str:
    """Terms of the loss that look at weights alone."""
    w = d.weight(4, 8) if d.random.random() < 0.5 else d.weight(8, 4)
    return d.random.choice(
        [
            f"{w}.square().sum()",
            f"{w}.norm()",
            f"{w}.abs().mean()",
            f"({w}@{w}.T-torch.eye({w}.shape[0],dtype=torch.float64)).square().sum()",
            f"{w}.sum(0).square().sum()",
            f"({w}*{w}).sum(1).max()",
        ]
    )


@kind("scalar")
def loss(d: Operands) -> str:
    """Losses as PyTorch has them, against targets made of what there is."""
    x, y = d.value(2, 3, 4), d.value(2, 3, 4)
    reduction = d.random.choice(["mean", "mean", "sum"])
    return d.random.choice(
        [
            f"F.mse_loss({x},{y}.detach(),reduction='{reduction}')",
            f"F.l1_loss({x},{y}.detach(),reduction='{reduction}')",
            f"F.smooth_l1_loss({x},{y}.detach(),reduction='{reduction}')",
            f"F.huber_loss({x},{y},reduction='{reduction}')",
            f"F.binary_cross_entropy_with_logits({x},{y}.sigmoid().detach(),reduction='{reduction}')",
            f"F.kl_div({x}.log_softmax(-1),{y}.softmax(-1),reduction='batchmean')",
            f"F.cross_entropy({x}.flatten(0,-2),{y}.flatten(0,-2).argmax(-1)%{d.shape(x)[-1]},reduction='{reduction}')",
            f"F.nll_loss({x}.log_softmax(1),{y}.argmax(1)%2)",
            f"F.cosine_similarity({x},{y},-1).mean()",
        ]
    )


@kind("scalar")
def cross_entropy(d: Operands) -> str:
    """Next-token loss over the vocabulary, with tokens left out."""
    x = d.value(2, 3)
    ids = d.ids(*d.shape(x)[:-1])
    wide = d.shape(x)[-1]
    logits = (
        f"F.linear({x},{d.weight(VOCABULARY, wide)})"
        if d.random.random() < 0.7
        else f"{x}@{d.weight(wide, VOCABULARY)}"
    )
    more = d.random.choice(["", ",ignore_index=3", ",label_smoothing=0.1", ",reduction='sum'"])
    return f"F.cross_entropy({logits}.flatten(0,-2),{ids}.flatten(){more})"
