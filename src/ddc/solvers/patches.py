"""Holes filled with patches from around them.

"Space-Time Completion of Video" (Wexler, Shechtman, Irani 2007): for each patch that reaches into the hole the most similar
known patch is found, and each missing pixel becomes a weighted mean of the patches that were found there. This is repeated, from
coarse to fine. The first filling is the posterior mean. Nearly all the weight goes to the best patch at a pixel, as in the last
step of "Video Inpainting of Complex Scenes" (Newson et al. 2014), because a mean of many would be smooth.
"""

import math
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

SIDE = 7  # of a patch
WAVES = 4  # of the cosine transform of a patch, in each direction: enough to compare patches
DEEPEST = 12  # pixels from the border of a hole to its middle, at the coarsest scale
ITERATIONS = (10, 6)  # at the coarsest scales
FINE_ITERATIONS = 2  # at the others
SHARPNESS = 16.0  # the power of the weights
DECAY = 1.25  # by which a patch counts less for each pixel that it is farther from the border
MOST_PAIRS = 40_000_000  # of patches that are all compared; beyond, the matches of the coarser scale are refined


def fill_with_patches(x: Tensor, hole: Tensor) -> Tensor:
    """Fills the hole of a picture, (H, W) of booleans, with patches of its other pixels.

    x, (3, H, W) in [-1, 1], already has a first filling, which decides what fits. If nothing but the hole is there, it is kept.
    """
    if not bool(hole.any()) or bool(hole.all()):
        return x
    top, left, height, width = _surroundings(hole)
    window = (..., slice(top, top + height), slice(left, left + width))
    filled = x.clone()
    filled[window] = _fill(x[window], hole[window])
    return filled


def _surroundings(hole: Tensor) -> tuple[int, int, int, int]:
    """The part of the picture that patches are taken from: the hole, and as much again on each side."""
    bounds = []
    for axis, length in ((1, hole.shape[0]), (0, hole.shape[1])):
        inside = hole.any(axis).nonzero()[:, 0]
        first, last = int(inside[0]), int(inside[-1]) + 1
        margin = max(last - first, 8 * SIDE)
        bounds.append((max(first - margin, 0), min(last + margin, length)))
    (top, bottom), (left, right) = bounds
    return top, left, bottom - top, right - left


def _fill(x: Tensor, hole: Tensor) -> Tensor:
    depth = int(distance_to_border(hole).max())
    halvings = math.ceil(math.log2(max(depth / DEEPEST, 1)))
    halvings = max(0, min(halvings, int(math.log2(min(hole.shape) / (3 * SIDE)))))  # known patches have to be left
    current = x
    found: Tensor | None = None
    for k in range(halvings, -1, -1):
        first, missing = _reduced(x, hole, 2**k)
        if k < halvings:
            larger = F.interpolate(current[None], missing.shape, mode="bicubic", align_corners=False)[0]
            first = torch.where(missing, larger.clamp(-1, 1), first)
        count = (*ITERATIONS, *[FINE_ITERATIONS] * halvings)[halvings - k]
        current, found = _improve(first, missing, count, found, every=1 if k else 2)
    return current


def _reduced(x: Tensor, hole: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The picture and its hole in a smaller size; a pixel is known if all of its area is."""
    if factor == 1:
        return x, hole
    size = (round(hole.shape[0] / factor), round(hole.shape[1] / factor))
    missing = F.interpolate(hole[None, None].to(x.dtype), size, mode="area")[0, 0] > 0
    return F.interpolate(x[None], size, mode="area")[0], missing


def _improve(x: Tensor, hole: Tensor, iterations: int, coarse: Tensor | None, every: int) -> tuple[Tensor, Tensor]:
    """Returns the picture after some iterations, and where the patch of each position was found, as indices (h, w).

    `coarse` is that at half the size. With `every` 2, only patches of every second row and column are replaced.
    """
    h, w = hole.shape[0] - SIDE + 1, hole.shape[1] - SIDE + 1
    reaches = F.max_pool2d(hole[None, None].to(x.dtype), SIDE, 1)[0, 0] > 0
    asked, sources = torch.zeros_like(reaches), (~reaches).flatten().nonzero()[:, 0]
    asked[::every, ::every] = reaches[::every, ::every]
    targets = asked.flatten().nonzero()[:, 0]
    match = torch.arange(h * w, device=x.device)
    if not len(sources):
        return x, match.view(h, w)
    refine = coarse is not None and len(targets) * len(sources) > MOST_PAIRS
    found = _doubled(coarse, asked) if refine and coarse is not None else targets
    trust = _patches(DECAY ** -distance_to_border(hole).clamp(max=24).to(x.dtype)[None])[targets].mean(1).log()
    whole, basis = _patches(x), _waves(x)  # the sources do not change
    offered = whole @ basis
    for _ in range(iterations):
        wanted = _patches(x)[targets] @ basis
        if refine:
            found, distance = _nearest_around(wanted, offered, found, reaches)
        else:
            index, distance = _nearest(wanted, offered[sources])
            found = sources[index]
        x = torch.where(hole, _vote(x, whole[found], targets, distance, trust), x)
    match[targets] = found
    return x, match.view(h, w)


def _vote(x: Tensor, patches: Tensor, targets: Tensor, distance: Tensor, trust: Tensor) -> Tensor:
    """Returns the weighted mean of the found patches at each pixel."""
    usual = torch.quantile(distance[:: max(1, len(distance) // 10_000)], 0.75).clamp(min=1e-6)
    weight = SHARPNESS * (trust - distance / (2 * usual))
    weight = (weight - weight.max()).clamp(min=-60).exp()
    size, n = x.shape[-2:], (x.shape[-2] - SIDE + 1) * (x.shape[-1] - SIDE + 1)
    said = torch.zeros(4 * SIDE**2, n, dtype=x.dtype, device=x.device)
    said[:, targets] = torch.cat([patches, torch.ones_like(patches[:, : SIDE**2])], 1).T * weight
    total = F.fold(said[None], size, SIDE)[0]
    return total[:3] / total[3:].clamp(min=1e-30)


def _nearest(wanted: Tensor, offered: Tensor) -> tuple[Tensor, Tensor]:
    """The index of the nearest row for each, and its squared distance."""
    squares, found, distance = offered.square().sum(1), [], []
    for part in wanted.split(1024):
        least, index = (squares - 2 * part @ offered.T).min(1)
        found.append(index)
        distance.append((least + part.square().sum(1)).clamp(min=0))
    return torch.cat(found), torch.cat(distance)


def _nearest_around(wanted: Tensor, offered: Tensor, found: Tensor, reaches: Tensor) -> tuple[Tensor, Tensor]:
    """As `_nearest`, but only among the neighbours of the patches that were found before."""
    h, w = reaches.shape
    best, distance = found, torch.full((len(found),), math.inf, dtype=offered.dtype, device=offered.device)
    flat = reaches.flatten()
    for down, right in product(range(-2, 3), repeat=2):
        place = (found // w + down).clamp(0, h - 1) * w + (found % w + right).clamp(0, w - 1)
        d = (offered[place] - wanted).square().sum(1).masked_fill(flat[place], math.inf)
        best, distance = torch.where(d < distance, place, best), torch.minimum(d, distance)
    lost = distance.isinf()  # only patches with holes are there
    distance[lost] = distance[~lost].max() if bool((~lost).any()) else 1.0
    return best, distance


def _doubled(coarse: Tensor, wanted: Tensor) -> Tensor:
    """Returns where the patches at the wanted places were found at half the size, as indices at this size."""
    h, w = wanted.shape
    place = wanted.nonzero()
    half = torch.minimum(place // 2, torch.tensor(coarse.shape, device=coarse.device) - 1)
    match = coarse[half[:, 0], half[:, 1]]
    found = torch.stack([match // coarse.shape[1], match % coarse.shape[1]], 1) * 2 + place % 2
    return found[:, 0].clamp(0, h - 1) * w + found[:, 1].clamp(0, w - 1)


def _patches(x: Tensor) -> Tensor:
    """All patches of a picture, one in each row."""
    return F.unfold(x[None], SIDE)[0].T


def _waves(x: Tensor) -> Tensor:
    """Returns the lowest waves of the cosine transform of patches, as columns."""
    place, wave = torch.arange(SIDE) + 0.5, torch.arange(WAVES)
    cosine = (math.pi / SIDE * wave * place[:, None]).cos() * torch.where(wave > 0, 2 / SIDE, 1 / SIDE).sqrt()
    colours = torch.eye(len(x))
    return torch.kron(colours, torch.kron(cosine, cosine)).to(x)


def distance_to_border(hole: Tensor) -> Tensor:
    """The distance of missing pixels to the nearest known one, 0 for known ones."""
    inside, distance = hole.clone(), torch.zeros(hole.shape, dtype=torch.long, device=hole.device)
    while bool(inside.any()) and int(distance.max()) < max(hole.shape):
        distance += inside
        inside = F.max_pool2d((~inside)[None, None].float(), 3, 1, 1)[0, 0] == 0
    return distance
