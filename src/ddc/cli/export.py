"""`ddc export`: the model of a training run, or a model folder, as a folder to share or as ONNX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ddc.errors import UserError


@dataclass(frozen=True)
class Export:
    """Write the model (averaged weights) of a run's latest checkpoint, which may still be training; or write a model folder
    with weights of another data type."""

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The --out folder of `ddc train`, or a model folder; with --onnx, a model folder."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder of the model; replaced if it exists. With --onnx, a new folder."""
    dtype: Literal["fp32", "fp16", "8bit"] = "fp32"
    """Data type of the weights; 8bit stores a scale for each output channel and computes in fp32."""
    shard_mb: float | None = None
    """Maximum size of a safetensors file, in megabytes."""
    push: Annotated[str | None, tyro.conf.arg(metavar="USER/MODEL")] = None
    """Also push it to this model on the Hugging Face Hub, as prior/, network/ and so on, with a card if the model has none.
    It is created if it does not exist. Log in first with `hf auth login`."""
    private: bool = False
    """Make a new model on the Hub private."""
    onnx: bool = False
    """Write ONNX files of the model's network (network/, else posterior/), and of whole restorations in one pass."""
    size: int = 256
    """With --onnx: height and width of the restored pictures."""

    def run(self) -> int:
        if self.onnx:
            from ddc.onnx.export import export_onnx

            if self.push is not None:
                raise UserError("--push is for a model folder; push without --onnx")
            export_onnx(self.run_folder, self.out, self.dtype, self.size)
            return 0
        from ddc.hub import check_push, push_model
        from ddc.training.output import export_run

        if self.push is not None:
            check_push(self.push)
        step = export_run(self.run_folder, self.out, self.dtype, self.shard_mb)
        print(f"{self.out}: the model" + (f" of step {step}" if step is not None else ""))
        if self.push is not None:
            print(push_model(self.out, self.push, step, self.private))
        return 0
