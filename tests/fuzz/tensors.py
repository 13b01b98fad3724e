"""Expressions of a line on tensors: one function per expression, which takes its operands from a `Drawing`.

A function returns Python text. It may request shapes that do not fit together: the drawing tries every line, and leaves
out those that raise, overflow or grow too large.
"""

from __future__ import annotations

from tests.fuzz.kinds import Operands, dim, kind

UNARY = [
    "{x}.relu()",
    "{x}.tanh()",
    "{x}.sigmoid()",
    "{x}.sin()",
    "{x}.square()",
    "{x}.abs()",
    "-{x}",
    "{x}*2",
    "1-{x}",
    "{x}+0.5",
    "F.gelu({x})",
    "F.silu({x})",
    "F.softplus({x})",
    "F.leaky_relu({x},0.1)",
    "F.elu({x})",
    "{x}.clamp(-1,1)",
    "{x}.clamp(min=0)",
    "{x}**3",
    "({x}.abs()+1).sqrt()",
    "({x}.abs()+1).log()",
    "1/(1+{x}.square())",
    "{x}.clamp(max=2).exp()",
    "({x}.square()+1).rsqrt()",
    "F.hardtanh({x})",
    "{x}.neg().exp().clamp(max=9)",
    "{x}.contiguous()",
    "{x}.clone()",
    "{x}.detach()",
    "F.mish({x})",
    "{x}.cos()",
    "{x}.erf()",
    "{x}.masked_fill({x}>0.3,0.0)",
    "{x}.float().double()",
    "torch.zeros_like({x})+{x}",
    "{x}.nan_to_num()",
    "{x}/3",
    "{x}.atan()",
    "F.logsigmoid({x})",
    "{x}.tril()",
    "{x}.triu(1)",
    "{x}.remainder(0.7)",
    "{x}.expm1().clamp(max=5)",
    "torch.where({x}>0,{x},0.2)",
    "{x}.new_ones({x}.shape)*{x}",
    "{x}.frac()",
    "{x}.sign()*{x}",
    "F.relu6({x})",
    "F.hardswish({x})",
    "torch.full_like({x},0.3)*{x}",
]
BINARY = [
    "{x}+{y}",
    "{x}-{y}",
    "{x}*{y}",
    "{x}/(1+{y}.square())",
    "torch.maximum({x},{y})",
    "torch.minimum({x},{y})",
    "torch.where({x}>{y},{x},{y}*0.5)",
    "torch.lerp({x},{y},0.3)",
    "torch.addcmul({x},{y},{y})",
    "{x}*({y}>0)",
    "{x}.masked_fill({y}>0,0.1)",
    "torch.add({x},{y},alpha=0.5)",
    "torch.atan2({x},{y})",
    "torch.logaddexp({x},{y})",
    "{x}*{y}.mean()",
    "{x}+{y}.sum()",
    "{x}*{y}.sigmoid()",
    "{x}*{y}.detach()",
    "torch.hypot({x},{y})",
    "F.mse_loss({x},{y},reduction='none')",
]


@kind("elementwise")
def unary(d: Operands) -> str:
    return d.random.choice(UNARY).format(x=d.value())


@kind("elementwise")
def binary(d: Operands) -> str:
    return d.random.choice(BINARY).format(x=d.value(), y=d.value())


@kind("elementwise")
def with_weight(d: Operands) -> str:
    """Scales, shifts and gates by parameters that broadcast."""
    x = d.value(1, 2, 3, 4)
    shape = list(d.shape(x)[d.random.randrange(len(d.shape(x))) :])
    if d.random.random() < 0.3:
        shape[d.random.randrange(len(shape))] = 1
    if d.random.random() < 0.1:
        shape = []
    return d.random.choice(BINARY[:8]).format(x=x, y=d.weight(*shape))


@kind("in place")
def in_place(d: Operands) -> str:
    """Writing into a copy, whole or through a view."""
    x = d.value(1, 2, 3, 4)
    call = d.random.choice(
        ["mul_(0.5)", "add_(1)", "relu_()", "tanh_()", "zero_()", "clamp_(min=0)", "neg_()", "sub_(0.1)", "fill_(0.2)"]
    )
    at = dim(d, x)
    size = d.shape(x)[at]
    start = d.random.randrange(size)
    view = d.random.choice(
        [
            "",
            f".narrow({at},{start},{d.random.randint(1, size - start)})",
            f".select({at},{start})",
            ".view(-1)",
            ".t()",
        ]
    )
    return f"({x}.clone(), v_:={x}*1, v_{view}.{call}, v_)[-1]"


@kind("in place")
def slice_written(d: Operands) -> str:
    x, y = d.value(2, 3, 4), d.value(1, 2, 3, 4)
    start = d.random.randrange(max(1, d.shape(x)[-1]))
    return d.random.choice(
        [
            f"(v_:={x}.clone(), v_.__setitem__((..., slice({start},None)), {x}[..., {start}:]*2), v_)[-1]",
            f"(v_:={x}.clone(), v_.add_({y}), v_)[-1]",
            f"(v_:={x}.clone(), v_.__setitem__(0, {y}[0]), v_)[-1]",
            f"(v_:={x}.clone(), v_.copy_({y}), v_.mul_({x}), v_)[-1]",
        ]
    )


@kind("buffer")
def written_buffer(d: Operands) -> str:
    """A running statistic that is written and then read, or the other way round."""
    x = d.value(1, 2, 3)
    shape = d.shape(x)
    b = d.buffer(*shape[1:])
    return d.random.choice(
        [
            f"({b}.mul_(0.9).add_({x}.detach().mean(0), alpha=0.1), {x}-{b})[-1]",
            f"({x}*{b}, {b}.copy_({x}.detach().amax(0)))[0]",
            f"({b}.add_(1), {x}*{b})[-1]",
            f"{x}+{b}",
        ]
    )


@kind("matmul")
@kind("matmul")
@kind("matmul")
def linear(d: Operands) -> str:
    x = d.value(1, 2, 3, 4)
    out = d.random.choice((2, 4, 4, 8, 8, 6, 5))
    wide = d.shape(x)[-1]
    bias = f", {d.weight(out)}" if d.random.random() < 0.5 else ""
    return f"F.linear({x}, {d.weight(out, wide)}{bias})" if d.random.random() < 0.8 else f"{x} @ {d.weight(wide, out)}"


@kind("matmul")
def product(d: Operands) -> str:
    x, y = d.value(2, 3, 4), d.value(2, 3, 4)
    return d.random.choice(
        [
            f"{x} @ {y}",
            f"{x} @ {y}.transpose(-1,-2)",
            f"{x}.transpose(-1,-2) @ {y}",
            f"{x} @ {x}.mT",
            f"torch.matmul({x}, {y}.mT)",
        ]
    )


@kind("matmul")
def einsum(d: Operands) -> str:
    x = d.value(2, 3)
    letters, heads = "bsd"[: len(d.shape(x))], d.weight(d.shape(x)[-1], 2, 4)
    return d.random.choice(
        [
            f"torch.einsum('{letters},{letters[-1]}k->{letters[:-1]}k', {x}, {d.weight(d.shape(x)[-1], 4)})",
            f"torch.einsum('{letters},{letters}->{letters[0]}', {x}, {d.value(2, 3)})",
            f"torch.einsum('{letters},{letters[0]}->{letters}', {x}, {d.value(1)})",
            f"torch.einsum('{letters},{letters[-1]}hk->{letters[0]}h{letters[1:-1]}k', {x}, {heads})",
            f"torch.einsum('...d,kd->...k', {x}, {d.weight(4, d.shape(x)[-1])})",
        ]
    )


@kind("matmul")
def added_product(d: Operands) -> str:
    x = d.value(2)
    wide = d.shape(x)[-1]
    return d.random.choice(
        [
            f"torch.addmm({d.weight(4)}, {x}, {d.weight(wide, 4)})",
            f"torch.outer({x}[0], {x}[:,0])",
            f"torch.mv({x}, {d.weight(wide)})",
            f"torch.dot({x}[0], {d.weight(wide)})",
            f"F.bilinear({x}, {x}, {d.weight(2, wide, wide)})",
        ]
    )


REDUCTIONS = [
    "{x}.sum({a})",
    "{x}.mean({a})",
    "{x}.amax({a})",
    "{x}.amin({a})",
    "{x}.max({a}).values",
    "{x}.min({a}).values",
    "{x}.logsumexp({a})",
    "{x}.var({a},unbiased=False)",
    "{x}.sum({a},keepdim=True)",
    "{x}.mean({a},keepdim=True)",
    "({x}.square().sum({a})+0.1).sqrt()",
    "{x}.softmax({a})",
    "{x}.log_softmax({a})",
    "{x}.cumsum({a})",
    "({x}.std({a},unbiased=False)+1).log()",
    "{x}.amax({a},keepdim=True)",
    "{x}.tanh().prod({a})",
    "{x}.norm(dim={a})",
    "{x}.var({a})",
    "F.normalize({x},dim={a})",
    "{x}.sort({a}).values",
    "{x}.topk(2,{a}).values",
    "{x}.median({a}).values",
    "{x}.diff(dim={a})",
    "{x}.sum()",
    "{x}.mean()",
    "{x}.max()",
    "{x}.cummax({a}).values",
    "{x}.flatten().logsumexp(0)",
    "{x}.norm()",
    "torch.std_mean({x},{a})[1]",
    "{x}.cumprod({a}).clamp(-5,5)",
    "{x}-{x}.mean({a},keepdim=True)",
    "{x}*({x}==0).all({a},keepdim=True).logical_not()",
    "{x}.argmax({a}).double()+{x}.sum({a})",
    "F.softmin({x},dim={a})",
]


@kind("reduction")
def reduction(d: Operands) -> str:
    x = d.value(1, 2, 3, 4)
    return d.random.choice(REDUCTIONS).format(x=x, a=dim(d, x))


@kind("reduction")
def reduction_over_two(d: Operands) -> str:
    x = d.value(2, 3, 4)
    a, b = d.random.sample(range(len(d.shape(x))), 2)
    call = d.random.choice(["sum", "mean", "amax", "logsumexp", "var"])
    return f"{x}.{call}(({a},{b}){d.random.choice(['', ',keepdim=True'])})"


@kind("view")
@kind("view")
def view(d: Operands) -> str:
    x = d.value(1, 2, 3, 4)
    shape = d.shape(x)
    ndim, at = len(shape), dim(d, x)
    other, size = d.random.randrange(-ndim, ndim), shape[at]
    start = d.random.randrange(size)
    length = d.random.randint(1, size - start)
    order = d.random.sample(range(ndim), ndim)
    factor = d.random.choice([f for f in range(1, size + 1) if size % f == 0])
    return d.random.choice(
        [
            f"{x}.transpose({at},{other})",
            f"{x}.permute({','.join(map(str, order))})",
            f"{x}.unsqueeze({at})",
            f"{x}.unsqueeze({at}).squeeze({at})",
            f"{x}.unflatten({at},({factor},{size // factor}))",
            f"{x}.flatten({d.random.randrange(ndim)})",
            f"{x}.flatten(0,{max(0, ndim - 2)})",
            f"{x}.reshape(-1)",
            f"{x}.reshape(-1,{factor})",
            f"{x}.reshape({factor},-1)",
            f"{x}.flip({at})",
            f"{x}.roll({start},{at})",
            f"{x}.narrow({at},{start},{length})",
            f"{x}.select({at},{start})",
            f"{x}[{start % shape[0]}:]",
            f"{x}[..., ::2]",
            f"{x}[..., {start % shape[-1]}]",
            f"{x}.chunk(2,{at})[-1]",
            f"{x}.split({length},{at})[0]",
            f"{x}.unbind({at})[{start}]",
            f"{x}.unsqueeze(0).expand(2,{','.join(map(str, shape))})",
            f"{x}.unsqueeze(-1).expand({','.join(map(str, shape))},2)",
            f"{x}.repeat(2,{','.join('1' for _ in shape[1:])})".replace(",)", ")"),
            f"{x}.repeat_interleave(2,{at})",
            f"F.pad({x},(1,0))",
            f"F.pad({x},(0,{factor}),value=0.3)",
            f"{x}.movedim({at},{other})",
            f"{x}.diagonal()",
            f"{x}.unfold({at},{min(2, size)},{d.random.randint(1, 2)})",
            f"{x}.swapaxes(0,-1)",
            f"{x}.view({','.join(map(str, shape))})",
            f"{x}[None]",
            f"{x}.expand_as({x})",
            f"torch.squeeze({x})",
            f"{x}.tile(2)",
            f"{x}.rot90()",
        ]
    )


@kind("concat")
def concat(d: Operands) -> str:
    x = d.value(1, 2, 3, 4)
    at = dim(d, x)
    y = d.random.choice([x, f"{x}*2", d.value(1, 2, 3, 4), d.weight(*d.shape(x))])
    return d.random.choice(
        [
            f"torch.cat(({x},{y}),{at})",
            f"torch.stack(({x},{y}),{at})",
            f"torch.cat(({x},{y},{x}),{at})",
            f"torch.cat({x}.chunk(2,{at})[::-1],{at})",
            f"torch.cat(({x}.narrow({at},1,{d.shape(x)[at] - 1}),{x}.narrow({at},0,1)),{at})",
            f"torch.stack({x}.unbind({at}),{dim(d, x)})",
            f"torch.hstack(({x},{y}))",
        ]
    )


@kind("indexing")
def indexing(d: Operands) -> str:
    x = d.value(1, 2, 3, 4)
    shape, at = d.shape(x), dim(d, x)
    size = shape[at]
    index = f"torch.tensor({[d.random.randrange(size) for _ in range(d.random.randint(1, 4))]})"
    return d.random.choice(
        [
            f"{x}.index_select({at},{index})",
            f"{x}[torch.tensor({[d.random.randrange(shape[0]) for _ in range(4)]})]",
            f"{x}.gather({at},{x}.argsort({at}))",
            f"{x}.take_along_dim({x}.argmax({at},keepdim=True),{at})",
            f"torch.zeros_like({x}).scatter({at},{x}.argsort({at}),{x})",
            f"torch.zeros_like({x}).scatter_add({at},{x}.argmax({at},keepdim=True),{x}*2)",
            f"torch.zeros_like({x}).index_add({at},torch.arange({size}).flip(0),{x})",
            f"{x}.index_copy({at},torch.arange({size}).flip(0),{x}*0.5)",
            f"{x}.index_fill({at},torch.tensor([0]),0.4)",
            f"{x}[..., torch.arange({shape[-1]}).flip(0)]",
            f"{x}[torch.arange({shape[0]}), 0]",
            f"torch.where(torch.arange({shape[-1]}) > 1, {x}, 0.1)",
            f"{x}.masked_fill(torch.ones({shape[-1]},{shape[-1]},dtype=torch.bool).tril(), 0.2)",
            f"{x}.topk(1,{at}).values",
            f"F.one_hot({x}.argmax({at}),{size}).double()+{x}.sum()",
        ]
    )
