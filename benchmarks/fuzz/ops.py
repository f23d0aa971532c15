"""Single lines of torch by family. In a template, `{x}` and `{y}` are floating values (`{y}` as `{x}` or broadcast to it),
`{d}` and `{e}` dims of `{x}`, `{n}` the length of dim `{d}`, `{k}` a small number, `{i}` an integer input."""

from __future__ import annotations

from benchmarks.fuzz.scope import Scope

POINTWISE = """
F.relu({x}) | F.gelu({x}) | F.silu({x}) | torch.tanh({x}) | {x}.sigmoid() | F.softplus({x}) | {x} * 0.5 | {x} + 1
{x}.pow(2) | {x}.abs() | torch.exp(torch.tanh({x})) | {x}.clamp(-1, 0.5) | -{x} | torch.sqrt({x} * {x} + 1)
{x}.sin() | F.leaky_relu({x}) | F.elu({x}) | 1 / (1 + {x} ** 2) | F.hardtanh({x}) | F.logsigmoid({x})
torch.where({x} > 0, {x}, 0.3 * {x}) | torch.erf({x}) | {x}.masked_fill({x} > 1, 0.0) | {x}.masked_fill({x} > 1, 0.7)
torch.log1p({x}.abs()) | {x}.float().double() | 2 - {x} | {x} / 3 | F.hardswish({x}) | F.mish({x}) | F.relu6({x})
{x}.square() | {x}.cos() | {x}.clone() | {x}.detach() + {x} | {x} * {x}.shape[{d}] ** -0.5 | {x} / {x}.size({d})
{x}.clamp_min(0.1) | torch.zeros_like({x}) + {x} | F.softsign({x}) | {x}.sign() * {x}
{x} + torch.ones({n}).sum().double() | {x}.new_ones({x}.shape) * {x} | torch.full_like({x}, 0.5) * {x}
{x}.nan_to_num() | {x} * ({x} > 0) | {x}.round().detach() + {x} | torch.addcmul({x}, {x}, {x}, value=0.5)
torch.atan({x}) | {x} % 2.0 | F.hardsigmoid({x})
"""
BINARY = """
{x} + {y} | {x} - {y} | {x} * {y} | {y} - {x} | torch.maximum({x}, {y}) | torch.minimum({x}, {y})
torch.lerp({x}, {y}, 0.3) | {x} / (1 + {y} ** 2) | torch.where({x} > {y}, {x}, {y}) | torch.addcmul({x}, {x}, {y})
{x} * torch.sigmoid({y}) | torch.add({x}, {y}, alpha=0.5) | torch.sub({x}, {y}, alpha=2) | torch.hypot({x}, {y} + 2)
torch.where({x} > 0, {x}, {y}) | {x}.add({y}).mul(0.5) | torch.atan2({x}, {y} + 3) | F.silu({x}) * {y}
torch.cat([{x}, {y}], {d}) | torch.stack([{x}, {y}], {d}) | torch.cat([{y}, {x}, {y}], {d})
torch.stack([{x}, {y}], -1) | torch.addcdiv({x}, {x}, {y} ** 2 + 1) | {x} + {y}.mean({d}, keepdim=True)
{x} * {y}.sum() | torch.logaddexp({x}, {y}) | torch.hstack([{x}, {y}]) | torch.cdist({x}, {y} + 3)
F.cosine_similarity({x}, {y}, dim={d}) | F.mse_loss({x}, {y}, reduction="none") | ({x} * {y}).sum({d})
F.pairwise_distance({x}, {y} + 1) | {x} @ {y}.transpose(-1, -2) | torch.matmul({x}.transpose(-1, -2), {y})
"""
REDUCE = """
{x}.mean({d}) | {x}.mean({d}, keepdim=True) | {x}.sum({d}) | {x}.sum({d}, keepdim=True) | {x}.amax({d})
{x}.amax({d}, keepdim=True) | {x}.amin({d}) | {x}.max({d}).values | {x}.min({d}, keepdim=True).values
{x}.var({d}, keepdim=True) | {x}.std({d}) | {x}.var({d}, correction=0) | torch.logsumexp({x}, {d})
{x}.tanh().prod({d}) | {x}.softmax({d}) | F.log_softmax({x}, {d}) | {x}.cumsum({d}) | {x}.tanh().cumprod({d})
torch.logcumsumexp({x}, {d}) | {x}.cummax({d}).values | {x}.sort({d}).values | {x}.sort({d}, descending=True).values
{x}.topk(2, {d}).values | {x}.norm(dim={d}) | torch.linalg.vector_norm({x}, dim={d}, keepdim=True)
F.normalize({x}, dim={d}) | {x}.mean(({d}, {e})) | {x}.sum(({d}, {e}), keepdim=True)
{x} - {x}.mean({d}, keepdim=True) | {x} / ({x}.norm(dim={d}, keepdim=True) + 1)
({x} - {x}.mean({d}, True)) / ({x}.var({d}, keepdim=True) + 1).sqrt() | torch.var_mean({x}, {d})[0]
torch.std_mean({x}, {d}, keepdim=True)[1] | {x} - {x}.mean() | {x} / (1 + {x}.abs().sum())
{x} * {x}.pow(2).mean({d}, keepdim=True).add(1e-5).rsqrt() | {x}.sum({d}, keepdim=True) / {x}.shape[{d}] + {x}
{x}.flip({d}).cumsum({d}).flip({d}) | {x} - {x}.amax({d}, keepdim=True) | torch.gather({x}, {d}, {x}.argsort({d}))
{x}.median({d}).values | {x}.kthvalue(1, {d}).values | {x}.diff(dim={d}) | F.softmin({x}, {d}) | {x}.nanmean({d})
{x}.aminmax(dim={d}).max | {x} * ({x}.argmax({d}, keepdim=True) + 1) | F.layer_norm({x}, {x}.shape[-1:])
F.layer_norm({x}, {x}.shape[-2:]) | F.rms_norm({x}, {x}.shape[-1:]) | F.glu({x}, {d})
{x} * ({x} > {x}.mean()).sum({d}, keepdim=True) | {x}.renorm(2, {d}, 5.0) | {x}.logsumexp(({d}, {e}))
{x} + {x}.std() | {x}.flatten().softmax(0).view({x}.shape)
"""
VIEWS = """
{x}.transpose({d}, {e}) | {x}.unsqueeze({d}) | {x}.squeeze() | {x}.squeeze({d}) | {x}.flatten() | {x}.flatten(-2)
{x}.flatten(0, 1) | {x}.reshape({x}.shape[0], -1) | {x}.movedim({d}, {e}) | {x}.contiguous()
{x}.transpose(-1, -2).contiguous() | {x}.chunk(2, {d})[0] | {x}.chunk(2, {d})[1] | {x}.narrow({d}, 1, 1)
{x}.narrow({d}, 0, {n} - 1) | {x}[:, 1:] | {x}[..., ::2] | {x}[:, -1] | {x}[:, None] | {x}[..., :-1] | {x}[0]
{x}[:, 0] | {x}[..., None, :] | {x}[:, [1, 0]] | {x}[1:] | {x}.flip({d}) | {x}.roll(1, {d}) | {x}.roll(2)
{x}.repeat_interleave(2, {d}) | {x}.unsqueeze(0).expand(2, *[-1] * {x}.dim()) | torch.tile({x}, (2,)) | {x}.tril()
{x}.triu() | {x}.diagonal(dim1={d}, dim2={e}) | {x}.mT | {x}.select({d}, 1) | torch.cat([{x}, {x}], {d})
torch.stack([{x}, -{x}], {d}) | torch.cat([{x}[..., 1:], {x}[..., :1]], -1) | F.pad({x}, (1, 0))
F.pad({x}, (0, 2), value=1.0) | F.pad({x}, (0, 0, 1, 1)) | F.pad({x}, (1, 1), mode="reflect") | {x}.unfold({d}, 2, 1)
{x}.swapaxes({d}, {e}) | torch.cat([-{x}[..., {x}.shape[-1] // 2 :], {x}[..., : {x}.shape[-1] // 2]], -1)
torch.stack({x}.unbind({d}), {e}) | sum({x}.unbind({d})) | torch.cat({x}.split(2, {d})[::-1], {d})
{x}.tensor_split(2, {d})[1] | {x}.split([1, {n} - 1], {d})[1] | {x}.view({x}.shape[0], -1)
{x}.view(-1, {x}.shape[-1]) | {x}.permute(*reversed(range({x}.dim()))) | {x}.rot90(1, ({d}, {e}))
{x}.unflatten({d}, (2, -1)) | {x}.unflatten({d}, (-1, 2)) | {x}.unflatten({d}, (3, -1))
{x}.reshape(*{x}.shape[:-1], 2, {x}.shape[-1] // 2) | {x}.reshape(-1) | {x}.repeat(*[1] * ({x}.dim() - 1), 2)
{x}.view(*{x}.shape[:-1], -1, 2).flip(-1).flatten(-2) | {x}.expand(*{x}.shape) | {x}.T if {x}.dim() == 2 else {x}.mT
{x}.hsplit(2)[0] | torch.atleast_3d({x}) | {x}.ravel() | {x}.reshape({x}.shape[0], {x}.shape[1], -1)
{x}[..., {n} - 1 :] | {x}.index_select({d}, torch.tensor([0, 1]))
torch.block_diag({x}, {x}) if {x}.dim() == 2 else {x} | {x}[:, ::2] + {x}[:, ::2]
"""
INDEX = """
torch.take_along_dim({x}, {x}.argsort({d}), {d}) | {x}.gather({d}, {x}.argmax({d}, keepdim=True))
torch.take_along_dim({x}, {x}.argmax({d}, keepdim=True), {d}) | {x}[torch.arange({x}.shape[0]), 0]
{x}[torch.arange({x}.shape[0]), {x}.shape[1] - 1] | {x}[:, torch.arange({x}.shape[1] - 1, -1, -1)]
{x}[:, torch.tensor([0, 1, 0])] | {x}.index_add({d}, torch.tensor([0, 1]), {x}.narrow({d}, 0, 2))
torch.zeros_like({x}).scatter_add({d}, {x}.argsort({d}), {x}) | {x}.scatter({d}, {x}.argmax({d}, keepdim=True), 0.5)
{x}.index_copy({d}, torch.tensor([0]), {x}.narrow({d}, 1, 1)) | {x}.index_fill({d}, torch.tensor([1]), 0.3)
{x}.masked_fill(torch.arange({x}.shape[-1]) > 1, 0.0) | {x} + torch.arange({x}.shape[{d}]).double().sum()
{x} * torch.arange({x}.shape[-1]).double() | {x} + torch.linspace(0, 1, {x}.shape[-1]).double()
{x} * torch.ones({x}.shape[-2], {x}.shape[-1]).tril()
torch.bucketize({x}.detach(), torch.tensor([-1.0, 0.0, 1.0]).double()) * {x}
torch.where(torch.arange({x}.shape[-1]) % 2 == 0, {x}, -{x})
{x}.masked_fill(torch.ones_like({x}, dtype=torch.bool).triu(1), 0.0)
torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]).double(), {x}.detach()) + {x}
{x} + torch.eye({x}.shape[-2], {x}.shape[-1]).double() | {x} @ torch.ones({x}.shape[-1], 3).double()
{x} * torch.zeros({x}.shape[0], *[1] * ({x}.dim() - 1)).double().add(0.5)
{x} + torch.arange({x}.shape[1]).double().view(1, -1, *[1] * ({x}.dim() - 2)) * 0.1
{x} + {x}.new_zeros({x}.shape[-1])
"""
IDS = """
{x} + F.one_hot({i} % {x}.shape[-1], {x}.shape[-1]).double() | {x} * {i}.unsqueeze(-1) * 0.1
{x}.gather(1, ({i} % {x}.shape[1]).unsqueeze(-1)) | torch.take_along_dim({x}, ({i} % {x}.shape[-1]).unsqueeze(-1), -1)
{x}[torch.arange({x}.shape[0]).unsqueeze(-1), {i} % {x}.shape[1]] | {x} * ({i} > 1).unsqueeze(-1)
{x}.masked_fill(({i} == 0).unsqueeze(-1), 0.0) | torch.where(({i} > 1).unsqueeze(-1), {x}, 0.5 * {x})
{x} + ({i} > 0).sum(1, keepdim=True).unsqueeze(-1) * 0.1 | {x} * ({i} != 0).double().mean()
torch.zeros_like({x}).index_add(1, {i}[0] % {x}.shape[1], {x}) | {x} + {i}.cumsum(1).unsqueeze(-1) * 0.01
{x}.index_select(1, {i}[0] % {x}.shape[1])
{x}.scatter_add(1, ({i} % {x}.shape[1]).unsqueeze(-1).expand({x}.shape), {x}) | {x} / ({i} > 1).sum().clamp(min=1)
F.embedding({i} % {x}.shape[0], {x}.flatten(1))
"""
IN_PLACE = """
{v} = {x}.clone(); {v} += 1 | {v} = {x} * 1; {v}.mul_(0.5) | {v} = {x}.clone(); {v}[:, 0] = 0
{v} = {x}.clone(); {v}[..., 1:] *= 0.5 | {v} = {x} + 0; {v} += {x}
{v} = torch.zeros_like({x}); {v}[:, 1:] = {x}[:, :-1] | {v} = {x}.clone(); {v}.masked_fill_({v} > 0.5, 0.1)
{v} = torch.zeros({x}.shape).double(); {v} += {x} | {v} = {x}.clone(); {v}.relu_() | {v} = {x} * 2; {v}.clamp_(max=1)
{v} = torch.empty_like({x}); {v}.copy_({x}) | {v} = {x}.clone(); {v}[:, 1] = {x}[:, 0]
{v} = {x}.clone(); {v}.div_({x}.shape[{d}])
{v} = {x}.clone(); {v}.index_add_({d}, torch.tensor([0]), {x}.narrow({d}, 0, 1))
{v} = {x}.new_zeros({x}.shape); {v}.add_({x}.detach()).add_({x}) | {v} = {x}.clone(); {v}[0] = 0
"""
TABLE = {
    name: [line.strip() for row in text.strip().splitlines() for line in row.split("|")]
    for name, text in {
        "pointwise": POINTWISE, "binary": BINARY, "reduce": REDUCE, "views": VIEWS, "index": INDEX, "ids": IDS,
        "in_place": IN_PLACE,
    }.items()
}  # fmt: skip
WEIGHTS = {"pointwise": 3, "binary": 3, "reduce": 4, "views": 4, "index": 2, "ids": 1, "in_place": 1}


def any_line(s: Scope) -> None:
    """Write one drawn line; nothing where it does not fit what there is."""
    family = s.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    template = s.pick(TABLE[family])
    x = s.current if s.chance(0.8) else s.pick(s.floats())
    ints = [n for n in s.args if not s.env[n].is_floating_point() and s.env[n].dtype.is_signed]
    if "{i}" in template and (not ints or s.env[x].dim() != 3):
        return
    d = s.dim(x)
    names = {
        "x": x, "d": d, "e": s.dim(x), "n": s.shape(x)[d], "k": s.pick((1, 2, 3)), "i": s.pick(ints) if ints else "",
        "y": _mate(s, x) if "{y}" in template else x,
    }  # fmt: skip
    if "{v}" not in template:
        s.let(template.format(**names))
        return
    v = s.new()
    if s.line(template.format(v=v, **names), v):
        s.current = v


def _mate(s: Scope, x: str) -> str:
    shape = s.shape(x)
    fits = [n for n in s.floats() if n != x and s.env[n].dim() <= len(shape) and _broadcasts(s.shape(n), shape)]
    if not fits or s.chance(0.15):
        own = s.pick([shape[-1:], shape[-2:], (1, *shape[1:]), (shape[-1],)])
        fits = [s.member(f"nn.Parameter(torch.randn({', '.join(map(str, own))}))")]
    return str(s.pick(fits))


def _broadcasts(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(a in (1, b) for a, b in zip(own[::-1], shape[::-1], strict=False))
