"""Fixtures that several test files use."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton; see test_kernels.py

from ddc.priors import DataConsistency, Prior, schedule_from_config, scheduler_config
from tiny import tiny_unet

gc.disable()  # until all tests are imported: it would search their modules again and again, which stay to the end

# Files of few and long tests are begun first, so that the processes of `make test` end at about the same time.
LONG = (
    *("test_browser.py", "test_fleet.py", "test_readme.py", "test_loop.py", "test_experiments.py", "test_service.py"),
    *("test_page.py", "test_restore.py", "test_web.py", "test_slots.py", "test_checkpoints.py", "test_generator.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as people have it, prior/ and network/, with tiny random networks."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = scheduler_config(clamp=1.0)
    prior = Prior(tiny_unet(3, seed=0), schedule_from_config(config), clamp=1.0, scheduler_config=config)
    prior.save_pretrained(folder / "prior")
    DataConsistency(tiny_unet(6, seed=1)).save_pretrained(folder / "network")
    return folder


@pytest.fixture(scope="module")
def small_metrics() -> Iterator[Path]:
    """Evaluations without VGG16 and Inception, which take most of the time; also where the user's cache has them.

    Gives the cache folder of the user.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDC_VGG16", os.devnull + "/absent")
        patch.setenv("XDG_CACHE_HOME", os.devnull)
        yield folder
