"""NIQE: how far the statistics of a picture are from those of good photographs (Mittal and others, 2013). Less is better.

    pip install --no-deps basicsr
    python scripts/niqe.py PICTURE …

The parameters of good photographs are the original ones, as they come with basicsr; nothing else of it is used, and it is
not imported. The figures equal those of basicsr 1.4.2 up to 0.005. A picture needs 96 pixels on each side for one block, and
some dozens of blocks for a figure that means something. Even, saturated areas make it depend on rounding.
"""

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.ndimage import correlate, correlate1d
from scipy.special import gamma

Pixels = np.ndarray[Any, Any]

BLOCK = 96  # pixels
NEIGHBOURS = ((0, 1), (1, 0), (1, 1), (1, -1))
SHAPES = np.arange(0.2, 10.001, 0.001)  # of generalised Gaussian distributions
RATIOS = gamma(2 / SHAPES) ** 2 / (gamma(1 / SHAPES) * gamma(3 / SHAPES))
WINDOW = np.exp(-sum(axis**2 for axis in np.mgrid[-3:4, -3:4]) / (2 * (7 / 6) ** 2))
WINDOW /= WINDOW.sum()
HALVING = np.array([-0.0234375, -0.0703125, 0.2265625, 0.8671875, 0.8671875, 0.2265625, -0.0703125, -0.0234375]) / 2


@dataclass(frozen=True)
class GoodPhotographs:
    """The mean and the covariance of the 36 features of blocks of good photographs."""

    mean: Pixels
    covariance: Pixels

    @classmethod
    def installed(cls) -> "GoodPhotographs":
        found = importlib.util.find_spec("basicsr")
        if found is None or found.origin is None:
            sys.exit("basicsr, which has the parameters of NIQE, is missing: pip install --no-deps basicsr")
        with np.load(Path(found.origin).parent / "metrics" / "niqe_pris_params.npz") as file:
            return cls(file["mu_pris_param"].reshape(-1), file["cov_pris_param"])


def luminance(pixels: Pixels) -> Pixels:
    """Returns Y of YCbCr as MATLAB has it, from RGB in 8-bit levels."""
    y = pixels[..., :3].astype(float) @ np.array([65.481, 128.553, 24.966]) / 255 + 16
    return np.rint(y).astype(np.float32)


def halved(y: Pixels) -> Pixels:
    """Returns a picture at half its size: MATLAB's imresize with its bicubic kernel, widened against aliasing."""
    for axis in (0, 1):
        y = correlate1d(y, HALVING, axis, mode="reflect")
        y = y[1::2] if axis == 0 else y[:, 1::2]
    return y


def normalised(y: Pixels) -> Pixels:
    """Returns a picture without its local mean, divided by its local contrast.

    Where it is even, only rounding is left, so that this is done in single precision, as in basicsr.
    """
    mean, square = (correlate(z, WINDOW, mode="nearest") for z in (y, y * y))
    return (y - mean) / (np.sqrt(np.abs(square - mean * mean)) + 1)


def distribution(z: Pixels) -> tuple[float, float, float]:
    """Returns shape, left and right width of an asymmetric generalised Gaussian distribution that fits the values."""
    left, right = (np.sqrt(np.mean(side**2)) if side.size else np.nan for side in (z[z < 0], z[z > 0]))
    balance = left / right
    ratio = np.mean(np.abs(z)) ** 2 / np.mean(z**2)
    ratio *= (balance**3 + 1) * (balance + 1) / (balance**2 + 1) ** 2
    shape = SHAPES[np.argmin((RATIOS - ratio) ** 2)]
    width = np.sqrt(gamma(1 / shape) / gamma(3 / shape))
    return shape, left * width, right * width


def features(block: Pixels) -> list[float]:
    """Returns the 18 features of a block of a normalised picture."""
    shape, left, right = distribution(block)
    values = [shape, (left + right) / 2]
    for shift in NEIGHBOURS:
        shape, left, right = distribution(block * np.roll(block, shift, (0, 1)))
        values += [shape, (right - left) * gamma(2 / shape) / gamma(1 / shape), left, right]
    return values


def niqe(pixels: Pixels, good: GoodPhotographs) -> float:
    """Returns NIQE of an RGB picture in 8-bit levels, or NaN for one with less than two blocks that are not even."""
    y = luminance(pixels)
    rows, columns = (length // BLOCK for length in y.shape)
    if not rows * columns:
        return float("nan")
    y = y[: rows * BLOCK, : columns * BLOCK]
    found = []
    for side in (BLOCK, BLOCK // 2):
        z = normalised(y)
        blocks = z.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(-1, side, side)
        with np.errstate(all="ignore"):  # even blocks have no distribution
            found.append([features(block) for block in blocks])
        y = halved(y)
    values = np.concatenate(found, 1)
    whole = values[~np.isnan(values).any(1)]
    if len(whole) < 2:
        return float("nan")
    covariance = np.cov(whole, rowvar=False)
    difference = good.mean - np.nanmean(values, 0)
    return float(np.sqrt(difference @ np.linalg.pinv((good.covariance + covariance) / 2) @ difference))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path, nargs="+")
    good = GoodPhotographs.installed()
    for path in parser.parse_args().pictures:
        print(f"{path}: {niqe(np.asarray(Image.open(path).convert('RGB')), good):.4f}")


if __name__ == "__main__":
    main()
