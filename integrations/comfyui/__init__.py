"""A ComfyUI node that restores pictures with `ddc`.

Copy this folder to ComfyUI/custom_nodes/ddc, and install `deep-data-consistency` into ComfyUI's Python. Images are
(B, H, W, C) in [0, 1]; masks are (B, H, W), 1 where a hole is.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ddc.errors import UserError
from ddc.images import Picture
from ddc.pipeline import RestorationPipeline
from ddc.solvers import SOLVERS


@lru_cache(maxsize=1)
def _pipeline(model: str) -> RestorationPipeline:
    return RestorationPipeline.from_pretrained(model or None).to("auto", compile=False)


class Restore:
    """Restores the pictures of a batch."""

    CATEGORY = "image/restoration"
    FUNCTION = "restore"
    RETURN_TYPES = ("IMAGE", "STRING")
    RETURN_NAMES = ("image", "report")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        task = "auto, sr4, deblur, gauss1.5, jpeg20, denoise, inpaint (with a mask), …; `ddc info` lists all"
        sigma = "Noise for pixels in [0, 1]; below 0 it is estimated where the task needs it"
        return {
            "required": {
                "image": ("IMAGE",),
                "task": ("STRING", {"default": "auto", "tooltip": task}),
                "solver": (list(SOLVERS), {"default": "ddc"}),
                "steps": ("INT", {"default": 0, "min": 0, "max": 1000, "tooltip": "0: the solver's own"}),
                "sigma": ("FLOAT", {"default": -1.0, "min": -1.0, "max": 1.0, "step": 0.001, "tooltip": sigma}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**31}),
            },
            "optional": {
                "mask": ("MASK",),
                "model": (
                    "STRING",
                    {"default": "", "tooltip": "A model folder or user/model on the Hub; empty: shipped"},
                ),
            },
        }

    def restore(
        self,
        image: Tensor,
        task: str,
        solver: str,
        steps: int,
        sigma: float,
        seed: int,
        mask: Tensor | None = None,
        model: str = "",
    ) -> tuple[Tensor, str]:
        pipe, tell = _pipeline(model), _progress(len(image))
        if mask is not None and mask.shape[-2:] != image.shape[1:3]:
            raise UserError(f"the mask has {tuple(mask.shape[-2:])} pixels and the image {tuple(image.shape[1:3])}")
        masks = [None] * len(image) if mask is None else list(1 - mask.reshape(-1, *mask.shape[-2:]).cpu().round())
        pictures, lines = [], []
        for index, pixels in enumerate(image):
            result = pipe(
                Picture.from_tensor(pixels[..., :3].permute(2, 0, 1), bits=32),
                task,
                solver=solver,
                steps=steps or None,
                sigma=None if sigma < 0 else sigma,
                seed=seed,
                names=[str(index)],
                mask=masks[index % len(masks)],
                progress=lambda share, index=index: tell(index + share),
            )
            pictures.append(result.picture.tensor.permute(1, 2, 0).clamp(0, 1))
            notes = " ".join(result.found[0] + result.notes[0])
            lines.append(f"{index}: {result.tasks[0]} with noise {result.sigma[0]:.3f}. {notes}".strip())
        return torch.stack(pictures), "\n".join(lines)


def _progress(total: int) -> Callable[[float], None]:
    """A function that shows how much is done, and stops the run if the person has stopped it."""
    try:
        from comfy.model_management import throw_exception_if_processing_interrupted
        from comfy.utils import ProgressBar
    except ImportError:  # outside ComfyUI
        return lambda done: None
    bar = ProgressBar(100)

    def tell(done: float) -> None:
        throw_exception_if_processing_interrupted()
        bar.update_absolute(int(100 * done / total), 100)

    return tell


NODE_CLASS_MAPPINGS = {"DDCRestore": Restore}
NODE_DISPLAY_NAME_MAPPINGS = {"DDCRestore": "Restore (ddc)"}
