"""Fixtures of the tests of training."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from skimage import data


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The same arithmetic as in a process that is started with OMP_NUM_THREADS=1."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for i, name in enumerate(("astronaut", "coffee", "rocket")):
        Image.fromarray(getattr(data, name)()[100:228, 150:300]).save(folder / f"{name}-{i}.png")
    return folder
