"""Other photographs that restored pictures are compared with as a set.

FID against the true pictures falls with the error of each picture. FID against other photographs, as papers report it,
asks whether the restored pictures look like photographs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from ddc.datasets import find_sources, read_images
from ddc.errors import UserError
from ddc.evaluation.run import DAMAGED, Key, Row, key_of
from ddc.images import appearing
from ddc.perceptual import Array, Metrics

FILE = "fid-reference.npz"  # in the folder of a run
BATCH = 50


@dataclass(frozen=True)
class Reference:
    """The mean and the covariance C of the features of some pictures."""

    mean: Array
    root: Array  # rootᵀ root = C; (k, d), with k no larger than needed

    @staticmethod
    def of(features: Array) -> "Reference":
        mean, root = _centred(features)
        if len(root) > len(mean):  # the symmetric root is smaller
            values, vectors = np.linalg.eigh(root.T @ root)
            root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
        return Reference(mean, root)

    def distance(self, features: Array) -> float:
        """The Fréchet distance between the Gaussians of the reference and of these features, (n, d):
        ‖μ − μ′‖² + tr(C + C′ − 2 (C C′)^½).

        The last trace is the sum of the singular values of the product of two roots.
        """
        mean, root = _centred(features)
        cross = np.linalg.svd(root @ self.root.T, compute_uv=False).sum()
        squares = ((mean - self.mean) ** 2).sum() + (root**2).sum() + (self.root**2).sum()
        return max(float(squares - 2 * cross), 0.0)


def _centred(features: Array) -> tuple[Array, Array]:
    """The mean of features, and their differences from it, so scaled that they are a root of the covariance."""
    features = features.astype(np.float64)
    mean = features.mean(0)
    return mean, (features - mean) / np.sqrt(len(features) - 1)


def check_features(rows: list[Row], cases: set[Key], run: Path) -> None:
    """Refuse measured rows without the features that are compared with a reference."""
    missing = sum(key_of(row) in cases and "fid" not in row["features"] for row in rows)
    if missing:
        raise UserError(
            f"{missing} rows of {run} were measured without the Inception weights, so that FID cannot be computed from them; "
            "measure again with --fid and another --out"
        )


def measure_reference(pictures: Path, size: int, load: Callable[[], Metrics], run: Path) -> None:
    """Write the features of the centres of all pictures in a folder or archive, unless that is done already."""
    path = run / FILE
    if path.exists():
        if (before := str(_load(path, "name"))) != pictures.name:
            raise UserError(f"{path} is of {before}, not of {pictures.name}; delete it, or use another --out")
        return
    metrics = load()
    if metrics.inception is None:
        raise UserError("--fid-reference needs the Inception weights; add --fid, which downloads them")
    sources = find_sources([pictures])
    if len(sources) < 2:
        raise UserError(f"{pictures} has fewer than two pictures; FID compares with many, for example 5,000")
    images = read_images(pictures, sources, size)
    found = []
    while batch := list(islice(images, BATCH)):
        found.append(metrics.features(torch.stack([image.pixels for image in batch]).float() / 255)["fid"])
    with appearing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, features=np.concatenate(found).astype(np.float16), name=np.array(pictures.name))


def read_reference(run: Path) -> Reference | None:
    """What `measure_reference` wrote, if it did."""
    path = run / FILE
    if not path.exists():
        return None
    features = _load(path, "features")
    if features.ndim != 2 or len(features) < 2 or not np.isfinite(features).all():
        raise _damaged(path)
    return Reference.of(features)


def _load(path: Path, name: str) -> Array:
    try:
        found: Array = np.load(path, allow_pickle=False)[name]
    except (*DAMAGED, OSError, EOFError, BadZipFile):
        raise _damaged(path) from None
    return found


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is damaged; delete it, and it is measured again")
