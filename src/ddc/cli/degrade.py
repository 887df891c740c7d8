"""`ddc degrade`: the measurement that a task starts from, made from clean pictures."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ddc.cli.files import FileOptions, Report, progress_bar, shown
from ddc.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from ddc.images import Picture


@dataclass(frozen=True, kw_only=True)
class Degrade(FileOptions):
    """Make measurements of clean pictures. Those of inpainting carry their mask in the alpha channel; .npy
    files (--ext npy) keep noise beyond black and white, which other formats cut off."""

    task: str = "sr4"
    """What to do to the pictures: sr4, gauss, disc, motion, blur, inpaint92, box, strokes, jpeg10, denoise, colorize."""
    sigma: float = 0.0
    """Noise to add, for pixels in [0, 1], as in 0.05."""
    mask: Annotated[Path | None, shown("FILE")] = None
    """A mask for inpainting, as large as the picture: white is kept, black becomes a hole."""
    kernel: Annotated[Path | None, shown("FILE")] = None
    """The kernel of the task blur: a picture or a 2-D .npy array."""
    operator: Annotated[str | None, shown("FILE.py:CLASS")] = None
    """Your own operator, a class in a Python file; it takes the place of --task."""
    seed: int = 0
    """Of noise and masks; with a file's name it decides both."""

    def run(self) -> int:
        from ddc.images import KEEPS_ALPHA, Picture, check_writable
        from ddc.problems import check_sigma, task_family

        items = self.items(default_ext="png")
        check_sigma(self.sigma)
        if task_family(self._task()) == "inpaint":
            for item in items:
                if check_writable(item.target) not in KEEPS_ALPHA:
                    raise UserError(
                        f"{item.target.name} cannot hold the mask in an alpha channel; use --ext png"
                    )
        if not items:
            return 0
        report = Report(self, len(items))
        with progress_bar(report, self.task) as show:
            for index, item in enumerate(items):
                try:
                    measured = self.measure(Picture.read(item.source), item.source.name)
                    measured.write(item.target)
                except UserError as error:
                    report.failed(item, error)
                else:
                    height, width = measured.size
                    facts = {"task": self._task(), "sigma": self.sigma, "seed": self.seed}
                    report.finished(item, facts | {"width": width, "height": height})
                show(index + 1)
        return report.exit_code()

    def _task(self) -> str:
        return "custom" if self.operator is not None else self.task

    def measure(self, picture: "Picture", name: str) -> "Picture":
        """The picture's measurement, with what the file said about itself."""
        import torch

        from ddc.images import Picture, to_internal
        from ddc.noise import derive_seed
        from ddc.problems import make_problem

        own = derive_seed(self.seed, name)
        problem = make_problem(
            self._task(),
            self.sigma,
            picture.size,
            # masks and noise come from the same kind of field, and must not come from the same seed
            [derive_seed(own, "mask")],
            self.mask,
            self.kernel,
            self.operator,
        )
        operator = problem.operator
        with torch.inference_mode():
            y = operator(to_internal(picture.tensor)[None])
            if self.sigma > 0:
                y = operator.add_noise(y, _noise(derive_seed(own, "noise"), y), problem.sigma)
            observed = operator.observed(y)
        measured = Picture.from_tensor((y[0] + 1) / 2)
        alpha = None
        if observed is not None:
            if not observed.any():
                height, width = picture.size
                raise UserError(
                    f"{self._task()} leaves nothing of {name}, {width}×{height}; name a smaller hole"
                )
            alpha = (observed[0, 0] * 255).to(torch.uint8).numpy()
        elif picture.alpha is not None and measured.size == picture.size:
            alpha = picture.alpha
        bits = 32 if self.ext is not None and self.ext.endswith("npy") else picture.bits
        return replace(
            picture, pixels=measured.pixels, alpha=alpha, grey=picture.grey or y.shape[1] == 1, bits=bits
        )


def _noise(seed: int, like: "Tensor") -> "Tensor":
    """The standard normal field of a whole measurement, by bands of rows, to keep memory low."""
    import torch

    from ddc.noise import Noise

    z = torch.empty_like(like)
    for top in range(0, like.shape[-2], 128):
        band = z[..., top : top + 128, :]
        band.copy_(Noise([seed], origin=(top, 0)).normal(band.shape))
    return z
