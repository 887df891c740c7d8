"""The ComfyUI node, called as ComfyUI calls one: by its mappings, with the inputs that it declares."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from skimage import data

from ddc.errors import UserError

FOLDER = Path(__file__).parents[2] / "integrations" / "comfyui"


@pytest.fixture(scope="module")
def node() -> Any:
    spec = importlib.util.spec_from_file_location("ddc_comfyui", FOLDER / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert set(module.NODE_CLASS_MAPPINGS) == set(module.NODE_DISPLAY_NAME_MAPPINGS)
    return module.NODE_CLASS_MAPPINGS["DDCRestore"]


def run(node: Any, image: torch.Tensor, model: Path, **given: Any) -> Any:
    inputs = node.INPUT_TYPES()
    declared = inputs["required"] | inputs["optional"]
    assert set(given) <= set(declared) and declared["image"] == ("IMAGE",) and declared["mask"] == ("MASK",)
    defaults = {name: one[1]["default"] for name, one in inputs["required"].items() if name != "image"}
    outputs = getattr(node(), node.FUNCTION)(image=image, **(defaults | {"steps": 2} | given), model=str(model))
    assert isinstance(outputs, tuple) and len(outputs) == len(node.RETURN_TYPES) == len(node.RETURN_NAMES)
    return outputs


@pytest.fixture
def images() -> torch.Tensor:
    photo = torch.from_numpy(data.astronaut()).float() / 255
    return torch.stack([photo[20:52, 180:220], photo[120:152, 80:120]])


def test_a_batch_keeps_comfyuis_layout(node: Any, images: torch.Tensor, tiny_model: Path) -> None:
    restored, report = run(node, images, tiny_model, task="sr2", sigma=0.02, seed=3)
    assert restored.shape == (2, 64, 80, 3) and restored.dtype == torch.float32
    assert float(restored.min()) >= 0 and float(restored.max()) <= 1
    assert report.splitlines()[0].startswith("0: sr2 with noise 0.020") and len(report.splitlines()) == 2
    alone, _ = run(node, images[:1], tiny_model, task="sr2", sigma=0.02, seed=3)
    assert torch.equal(alone[0], restored[0])
    clean, _ = run(node, images, tiny_model)  # auto leaves these, or restores them at their size
    assert clean.shape == images.shape


def test_a_mask_is_1_where_a_hole_is(node: Any, images: torch.Tensor, tiny_model: Path) -> None:
    mask = torch.zeros(1, 32, 40)
    mask[:, 5:15, 10:20] = 1
    restored, _ = run(node, images, tiny_model, task="inpaint", mask=mask)
    changed = ((restored - images).abs() > 1e-3).any(-1)
    assert changed[:, 5:15, 10:20].any() and not changed[:, :5].any() and not changed[..., 20:].any()
    with pytest.raises(UserError, match="the mask has"):
        run(node, images, tiny_model, task="inpaint", mask=mask[:, :9])
    with pytest.raises(UserError, match="not known"):
        run(node, images, tiny_model, task="sharpen")


def test_progress_and_interruption(
    node: Any, images: torch.Tensor, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[int] = []

    class Interrupted(Exception):
        pass

    def check() -> None:
        if len(shown) > 2:
            raise Interrupted

    class ProgressBar:
        def __init__(self, total: int) -> None:
            assert total == 100

        def update_absolute(self, value: int, total: int) -> None:
            shown.append(value)

    parts = {"comfy": {}, "comfy.utils": {"ProgressBar": ProgressBar}}
    parts["comfy.model_management"] = {"throw_exception_if_processing_interrupted": check}
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(Interrupted):
        run(node, images, tiny_model, task="denoise", sigma=0.1, steps=5)
    assert shown == sorted(shown) and len(shown) == 3
