"""Detects that a picture was enlarged, and by how much.

Interpolation by a factor f copies the small picture's spectrum to each multiple of 1/f cycles a pixel, and attenuates
the copies. So the frequencies e + d and e − d, on both sides of the edge e = 1/2f, have phases whose sum is the same
for all d and all rows. Nothing else does that, but JPEG, a little, at multiples of 1/8. Interpolation other than by
repeating pixels also leaves little power above the edge.
"""

from typing import Any, NamedTuple

import numpy as np
import PIL.Image

from ddc.diagnosis.planes import Plane

Levels = np.ndarray[Any, np.dtype[np.uint8]]

SIDE = 512  # pixels of the part that is used
SMALLEST, LARGEST = 1.4, 6.0  # factors
SURE, WITH_DROP = 0.25, 0.09  # coherence that tells of an enlargement, alone and with a drop
LEAST_DROP = 15.0  # dB; photographs have at most 12, and coarse JPEGs 14
SOFT_DROP = 10.0  # dB; no blurred photograph has less
STEEP_DROP = 20.0  # dB; only enlarged and blurred pictures have as much
ABOVE_OTHERS = (2.5, 4.0)  # times the usual coherence at near factors: with a steep drop, and without
FLAT_DROP = 13.0  # dB; repeated pixels leave less
STEP = 0.35  # of the largest change nearby: less means that a pixel was repeated


class Enlargement(NamedTuple):
    """What tells of an enlargement."""

    factor: float
    coherence: float  # of the frequencies on both sides of the edge, 0 to 1
    drop: float  # of the power across the edge, in dB


def detect_enlargement(luma: Plane, jpeg: bool) -> Enlargement | None:
    """Returns the enlargement of a plane of luma in [0, 1], which may have been a JPEG, or None."""
    size = min(*luma.shape, SIDE) // 2 * 2
    if size < 96:
        return None
    luma = luma[:size, :size]
    factors = 2 * size / np.arange(round(2 * size / LARGEST), round(2 * size / SMALLEST))
    coherence = np.minimum(coherences(luma, factors), coherences(luma.T, factors))
    drops = spectral_drops(luma, factors)
    steep = drops > STEEP_DROP
    if jpeg:
        for harmonic in (3, 4, 5):
            own = np.abs(1 / factors - harmonic / 8) < 2 / size
            coherence[own & ~((coherence > SURE) | steep) if harmonic == 4 else own] = 0
    found = (coherence > SURE) | ((coherence > WITH_DROP) & (drops > LEAST_DROP))
    near = np.lib.stride_tricks.sliding_window_view(np.pad(coherence, 20, mode="reflect"), 41)
    found &= coherence > np.where(steep, *ABOVE_OTHERS) * np.median(near, axis=1)
    if not found.any():
        return None
    best = int(np.where(found, coherence * np.maximum(drops - 5, 1), 0).argmax())

    def at(factor: float, width: float = 0.03) -> Enlargement:
        """Returns the best factor near this one."""
        near = np.flatnonzero(np.abs(factors / factor - 1) < width)
        if not len(near):
            return Enlargement(factor, 0.0, 0.0)
        number = near[coherence[near].argmax()]
        return Enlargement(float(factors[number]), float(coherence[number]), float(drops[near].max()))

    one = at(float(factors[best]))
    least = max(0.3 * one.coherence, WITH_DROP)
    if one.drop < FLAT_DROP:  # repeated pixels have copies at fractions of their factor, too
        repeated = at(repetition(luma), 0.1)
        if repeated.coherence > least:
            return repeated
        half = at(one.factor / 2)
        return half if abs(one.factor - 3) < 0.1 and half.coherence < 0.6 * one.coherence else one
    twice = at(2 * one.factor)  # copies at every second multiple are seen as well
    return twice if twice.coherence > least and (twice.drop > LEAST_DROP or twice.coherence > SURE) else one


def repetition(luma: Plane) -> float:
    """Returns how often pixels are repeated along rows and columns: one in so many differs from its neighbour."""
    steps = 0.0
    for turned in (luma, luma.T):
        change = np.sqrt((np.diff(turned, axis=1) ** 2).mean(0))
        largest = np.lib.stride_tricks.sliding_window_view(np.pad(change, 5, mode="reflect"), 11).max(1)
        steps += float((change > STEP * largest).mean()) / 2
    return 1 / max(steps, 1 / LARGEST)


def without_enlargement(pixels: Levels, factor: float) -> Levels:
    """Returns 8-bit levels (h, w, 3) at the size that they had before they were enlarged."""
    height, width = (max(8, round(length / factor)) for length in pixels.shape[:2])
    return np.asarray(PIL.Image.fromarray(pixels).resize((width, height), PIL.Image.Resampling.BOX))


def is_soft(luma: Plane, least: float = SOFT_DROP) -> bool:
    """Returns whether a plane may be blurred: its power falls faster somewhere, in dB, than a sharp photograph's."""
    size = min(*luma.shape, SIDE) // 2 * 2
    return size >= 48 and bool(
        spectral_drops(luma[:size, :size], np.arange(1.4, LARGEST, 0.1, dtype=np.float32)).max() > least
    )


def coherences(plane: Plane, factors: Plane) -> Plane:
    """Returns how equal the sums of phases are along rows, for each factor."""
    size = plane.shape[1]
    points = 4 * size
    spectrum = np.fft.rfft((plane - plane.mean(1, keepdims=True)) * np.hanning(size), points, axis=1)
    strength = np.abs(spectrum)
    phases = (spectrum / (strength + 1e-3 * strength.mean())).astype(np.complex64)
    result = []
    for factor in factors:
        edge = 0.5 / factor
        above = np.rint((edge + np.arange(0.015, min(0.12, 0.49 - edge, edge - 0.02), 1 / size)) * points).astype(int)
        sums = phases[:, above] * phases[:, round(points / factor) - above]
        result.append(abs(complex(sums.mean())))
    return np.array(result)


def spectral_drops(plane: Plane, factors: Plane) -> Plane:
    """Returns, for each factor, by how many dB the power falls across the edge."""
    size = len(plane)
    fade = np.hanning(size)
    power = np.zeros(size // 2 + 1)
    for turned in (plane, plane.T):
        rows = (turned - turned.mean(1, keepdims=True)) * fade
        power += (np.abs(np.fft.rfft(rows, axis=1)) ** 2).mean(0)
    total = np.append(0, np.cumsum(power))

    def mean(low: Plane, high: Plane) -> Plane:
        first, last = (np.rint(value * size).astype(int) for value in (low, high))
        last = np.maximum(last, first + 1)
        return (total[last] - total[first]) / (last - first)

    edges = 0.5 / factors
    above = mean(np.minimum(1.3 * edges, 0.48), np.minimum(1.75 * edges, 0.5))
    return np.asarray(10 * np.log10((mean(0.5 * edges, 0.8 * edges) + 1e-9) / (above + 1e-9)))
