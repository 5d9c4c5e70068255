"""What the authors of methods compute, in plain torch over task vectors, without anything of mecha_exp."""

from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

StateDict = dict[str, Tensor]
Formula = Callable[[list[StateDict]], StateDict]


def task_vectors(models: Sequence[StateDict]) -> list[StateDict]:
    return [{key: expert[key] - base for key, base in models[0].items()} for expert in models[1:]]


def by_key(merge: Callable[[Tensor], Tensor]) -> Formula:
    """A formula of the stacked task vectors of one key, for all keys."""
    return lambda vectors: {key: merge(torch.stack([v[key] for v in vectors])) for key in vectors[0]}


def flat(vectors: Sequence[StateDict]) -> Tensor:
    return torch.stack([torch.cat([x.flatten() for x in vector.values()]) for vector in vectors])


def unflat(vector: Tensor, like: StateDict) -> StateDict:
    parts = vector.split([x.numel() for x in like.values()])
    return {key: part.reshape(x.shape) for part, (key, x) in zip(parts, like.items(), strict=True)}


def as_a_whole(merge: Callable[[Tensor], Tensor]) -> Formula:
    """A formula of the flat task vectors of the model."""
    return lambda vectors: unflat(merge(flat(vectors)), vectors[0])


def orthogonal(matrix: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


def official_iso_cts(deltas: Tensor, fraction: float) -> Tensor:
    if deltas.ndim != 3:
        return deltas.mean(0)
    tasks, rank = len(deltas), min(deltas.shape[1:])
    specific = round((rank - int(rank * fraction)) / tasks) * tasks
    common, each = rank - specific, specific // tasks
    u, s, vh = torch.linalg.svd(deltas.sum(0), full_matrices=False)
    u, s, vh = u[:, :common], s[:common], vh[:common]
    parts = [torch.linalg.svd(delta - u @ u.T @ delta, full_matrices=False) for delta in deltas]
    left = torch.cat([*(part[0][:, :each] for part in parts), u], 1)
    sizes = torch.cat([*(part[1][:each] for part in parts), s])
    right = torch.cat([*(part[2][:each] for part in parts), vh])
    return orthogonal(left) @ torch.diag(sizes.mean().expand(rank)) @ orthogonal(right)


def official_star(deltas: Tensor, eta: float) -> Tensor:
    if deltas.ndim != 3:
        return deltas.mean(0)
    made = []
    for delta in deltas:
        u, s, vh = torch.linalg.svd(delta, full_matrices=False)
        kept = int(torch.searchsorted(s.cumsum(0), s.sum() * eta / 100)) + 1
        made.append(u[:, :kept] @ torch.diag(s[:kept] * s.sum() / s[:kept].sum()) @ vh[:kept])
    return torch.stack(made).mean(0)


def wudi_loss(merged: Tensor, deltas: Tensor) -> Tensor:
    products = (merged - deltas) @ deltas.transpose(1, 2)
    return (products.square() / deltas.square().sum((1, 2))[:, None, None]).sum()


def official_wudi(deltas: Tensor, steps: int, rate: float) -> Tensor:
    if deltas.ndim != 3:
        return torch.zeros_like(deltas[0])
    merged = torch.nn.Parameter(deltas.sum(0))
    optimizer = torch.optim.Adam([merged], lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        wudi_loss(merged, deltas).backward()
        optimizer.step()
    return merged.data


def official_doge(vectors: list[StateDict], eta: float, density: float, subspace: int) -> StateDict:
    """`DOGE_TA` of the authors, with its 400 steps: what it adds to each matrix, and to nothing else."""
    least = [flat([v])[0].abs().sort().values[-int(density * flat([v]).shape[1]) - 1] for v in vectors]
    made = {}
    for key, first in vectors[0].items():
        deltas = torch.stack([vector[key] for vector in vectors])
        if first.ndim != 2:
            made[key] = torch.zeros_like(first)
            continue
        shares = (eta / deltas.flatten(1).norm(dim=1))[:, None, None]
        each = min(first.shape) // len(deltas)
        frames = [torch.linalg.svd(delta, full_matrices=False).U[:, :each] for delta in deltas]
        basis = torch.linalg.svd(torch.cat(frames, 1), full_matrices=False).U[
            :, : min(first.shape) // subspace
        ]
        change = torch.nn.Parameter(torch.zeros_like(first))
        optimizer = torch.optim.Adam([change], lr=1e-4)
        for _ in range(400):
            optimizer.zero_grad()
            gaps = (deltas * (deltas - (shares * (deltas + change)).sum(0))).sum(2)
            gaps.square().sum().backward()
            change.grad -= basis @ basis.T @ change.grad
            optimizer.step()
        masks = deltas.abs() >= torch.stack(least)[:, None, None]
        made[key] = (shares * (deltas + change.detach()) * masks).sum(0)
    return made


def official_pcb(vectors: Tensor, ratio: float) -> Tensor:
    """`PCB_merge` of the authors, on the flat task vectors."""
    tasks, count = vectors.shape

    def clamped(x: Tensor, below: float, above: float) -> Tensor:
        ordered = x.sort(1).values
        low, high = ordered[:, int(count * below)], ordered[:, int(count * (1 - above) - 1)]
        return torch.minimum(torch.maximum(x, low[:, None]), high[:, None])

    def spread_out(x: Tensor) -> Tensor:
        low, high = x.min(1, keepdim=True).values, x.max(1, keepdim=True).values
        return (x - low) / (high - low)

    sizes = clamped(vectors.abs(), 1e-4, 1e-4)
    score = torch.exp(tasks * spread_out(sizes) ** 2) * torch.tanh(vectors * vectors.sum(0))
    shares = spread_out(clamped(score, 1 - ratio, 0))
    return (vectors.sign() * sizes * shares).sum(0) / shares.sum(0).clamp(min=1e-12)


def emr_parts(vectors: list[StateDict], zero_sum: float) -> tuple[StateDict, list[StateDict]]:
    """The unified task vector, and what of it has the sign of each task."""
    united: StateDict = {}
    own: list[StateDict] = [{} for _ in vectors]
    for key in vectors[0]:
        deltas = torch.stack([vector[key] for vector in vectors])
        total = deltas.mean(0)
        sign = torch.where(total > 0, 1.0, torch.where(total < 0, -1.0, zero_sum)).double()
        agree = deltas * sign > 0
        united[key] = sign * (deltas.abs() * agree).amax(0)
        for task, mask in zip(own, agree, strict=True):
            task[key] = united[key] * mask
    return united, own


def official_own_part(own: Tensor, density: float) -> Tensor:
    """`svd` of Twin-Merging's authors: the leading singular parts, and tensors of one axis whole."""
    if density >= 1:
        return own
    if density <= 0:
        return torch.zeros_like(own)
    if own.ndim < 2:
        return own
    u, s, vh = torch.linalg.svd(own.flatten(1), full_matrices=False)
    rank = int(density * len(s))
    return (u[:, :rank] @ torch.diag(s[:rank]) @ vh[:rank]).reshape(own.shape)


def stitched(vectors: Tensor, density: float, strict: bool) -> Tensor:
    least = vectors.abs().topk(int(density * vectors.shape[1]), dim=1).values[:, -1:]
    masks = vectors.abs() > least if strict else vectors.abs() >= least
    return (vectors * masks).sum(0) / masks.sum(0).clamp(min=1)


def official_fr_merging(deltas: Tensor, radius: float) -> Tensor:
    """Low, band and high of the authors, of which they add up the inner disc and the ring around it."""
    if deltas[0].ndim != 2:
        return deltas.sum(0)
    height, width = deltas[0].shape
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    distance = torch.sqrt((x - width // 2) ** 2 + (y - height // 2) ** 2)
    inner = min(height, width) // 10
    disc, ring = distance <= inner, (distance >= inner) & (distance <= min(height, width) * radius)
    return sum(torch.fft.ifft2(torch.fft.fft2(d) * mask).real for d in deltas for mask in (disc, ring))


def largest(delta: Tensor, count: int) -> Tensor:
    """The entries of the `count` largest magnitudes, and what ties with the last of them."""
    if count == 0:
        return torch.zeros_like(delta)
    return torch.where(delta.abs() >= delta.abs().flatten().topk(count).values[-1], delta, 0)


def agreeing(trimmed: Tensor, votes: Tensor) -> Tensor:
    return (trimmed.sign() == votes.sign()) & (trimmed != 0)


def mean_of_agreeing(trimmed: Tensor, agree: Tensor) -> Tensor:
    return (trimmed * agree).sum(0) / agree.sum(0).clamp(min=1)


def disjoint_mean(trimmed: Tensor, votes: Tensor) -> Tensor:
    return mean_of_agreeing(trimmed, agreeing(trimmed, votes))


def paper_ties(deltas: Tensor, k: Fraction) -> Tensor:
    trimmed = torch.stack([largest(d, max(int(k * d.numel()), 1) if k else 0) for d in deltas])
    return disjoint_mean(trimmed, trimmed.sum(0))


def official_breadcrumbs(deltas: Tensor, keep: float, remove: float) -> Tensor:
    """Without the largest of each slice of the last axis, then the largest of what is left; numbers stay."""
    if deltas.ndim == 1:
        return deltas.sum(0)
    count = deltas.shape[-1]
    descending = deltas.abs().argsort(-1, descending=True)
    start = int(Fraction(str(remove)) * count)
    chosen = descending[..., start : start + int(Fraction(str(keep)) * count)]
    return (deltas * torch.zeros_like(deltas).scatter_(-1, chosen, 1)).sum(0)


def official_iso_c(deltas: Tensor, is_matrix: bool = True) -> Tensor:
    if deltas.ndim != 3 or not is_matrix:
        return deltas.mean(0)
    u, s, vh = torch.linalg.svd(deltas.sum(0), full_matrices=False)
    return u @ torch.diag(s.mean().expand(len(s))) @ vh


def official_tsv_m(deltas: Tensor, is_matrix: bool = True) -> Tensor:
    if deltas.ndim != 3 or not is_matrix:
        return deltas.mean(0)
    tasks, size = len(deltas), min(deltas.shape[1:])
    count = size // tasks
    us, ss, vs = (torch.zeros(*x) for x in ((deltas.shape[1], size), (size,), (size, deltas.shape[2])))
    us, ss, vs = us.double(), ss.double(), vs.double()
    for i, delta in enumerate(deltas):
        u, s, vh = torch.linalg.svd(delta, full_matrices=False)
        here = slice(i * count, (i + 1) * count)
        us[:, here], ss[here], vs[here] = u[:, :count], s[:count], vh[:count]
    (uu, _, uv), (vu, _, vv) = (torch.linalg.svd(x, full_matrices=False) for x in (us, vs))
    return uu @ uv @ torch.diag(ss) @ vu @ vv


def official_ties_merging(vectors: Tensor, percent: float) -> Tensor:
    """The authors' ties_merging(vectors, percent, "dis-mean")."""
    count = vectors.shape[1]
    rank = count - int(count * percent / 100)
    least = vectors.abs().kthvalue(rank, dim=1, keepdim=True).values
    trimmed = torch.where(vectors.abs() >= least, vectors, 0)
    signs = trimmed.sum(0).sign()
    signs = torch.where(signs == 0, signs.sum().sign(), signs)
    return mean_of_agreeing(trimmed, torch.where(signs > 0, trimmed > 0, trimmed < 0))


StateDict = dict[str, Tensor]


def official(models: list[StateDict], share: float, scale: float) -> StateDict:
    """The authors' svd-vector with ties and mean, over the coordinates of all matrices in one vector."""
    base, *experts = models
    matrices = [key for key, x in base.items() if x.ndim > 1]
    bases, parts = {}, []
    for key in matrices:
        deltas = [(expert[key] - base[key]).flatten(1) for expert in experts]
        u, s, vh = torch.linalg.svd(torch.cat(deltas, 1), full_matrices=False)
        bases[key], vh = u[:, s > 1e-5], (s[:, None] * vh)[s > 1e-5]
        parts.append(torch.stack([part.flatten() for part in vh.split(deltas[0].shape[1], 1)]))
    vectors = torch.cat(parts, 1)
    if share < 1:
        size = vectors.shape[1]
        least = vectors.abs().kthvalue(size - int(size * share), dim=1, keepdim=True).values
        vectors = vectors * (vectors.abs() >= least)
    sign = vectors.sum(0).sign()
    agreeing = vectors * torch.where(sign > 0, vectors > 0, vectors < 0) * scale
    mean = agreeing.sum(0) / (agreeing != 0).sum(0).clamp(min=1)
    made = dict(base)
    for key, merged in zip(matrices, mean.split([part.shape[1] for part in parts]), strict=True):
        u = bases[key]
        made[key] = base[key] + (u @ merged.reshape(u.shape[1], -1)).reshape(base[key].shape)
    return made
