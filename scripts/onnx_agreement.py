"""How far ONNX files are from PyTorch, over pictures: the largest difference of a pixel in [0, 1], for each graph.

python scripts/onnx_agreement.py MODEL GRAPHS IMAGES [N] [NAMES]: the model folder, its files from `ddc export --onnx`, N pictures
(20) of a folder or archive, and names of graphs, separated by commas (all). PyTorch's pictures are those of the core's operators, with the weights of the files, and for 8bit also
with the weights of the model.
"""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor
from torch.nn.functional import pad

from ddc.datasets import load_images
from ddc.fast import cpu_unet
from ddc.images import to_internal, to_unit
from ddc.noise import Noise, derive_seed
from ddc.onnx.blur import KERNEL, singular_vectors
from ddc.onnx.export import one_pass_network, round_weights
from ddc.onnx.restorations import SinglePass
from ddc.operators.base import Operator
from ddc.operators.blur import GaussianBlur, KernelBlur, motion_kernel
from ddc.operators.inpaint import Denoise, Inpaint, stroke_mask
from ddc.operators.jpeg import CHROMA, JPEG, LUMA, quantisation
from ddc.operators.superres import Bicubic


def families(side: int, number: int) -> dict[str, tuple[Operator, float, dict[str, Tensor]]]:
    """Operator, σ and own inputs of each graph, for one picture."""
    line = motion_kernel(9, 20.0 * number)
    rows, columns = ((KERNEL - length) // 2 for length in line.shape)
    line = pad(line, (columns, columns, rows, rows))
    soft = GaussianBlur(0.5 + 0.15 * number)
    mask, quality = stroke_mask((side, side), number), 5 + 4 * number
    luma, chroma = (quantisation(table)[quality].float() for table in (LUMA, CHROMA))
    return {
        **{f"sr{scale}": (Bicubic(scale), 0.0, {}) for scale in (2, 3, 4, 8)},
        "blur": (KernelBlur(line), 0.01, {"kernel": line}),
        "gauss": (soft, 0.01, dict(zip("usv", singular_vectors(soft, side), strict=True))),
        "holes": (Inpaint(mask), 0.0, {"mask": mask}),
        "jpeg": (JPEG(quality), 0.0, {"luma": luma, "chroma": chroma}),
        "noise": (Denoise(), 0.02 + 0.01 * number, {}),
    }


@torch.no_grad()
def main(model: Path, graphs: Path, images: Path, count: int = 20, names: str = "") -> None:
    told = json.loads((graphs / "model.json").read_text())
    exact = one_pass_network(model)
    rounded = copy.deepcopy(exact)
    rounded.unet.load_state_dict(round_weights(exact.unet.state_dict(), told["dtype"])[1])
    networks = [rounded, exact] if told["dtype"] == "8bit" else [rounded]
    for network in networks:
        network._modules["unet"] = cpu_unet(network.unet)
    side = told["graphs"]["noise"]["side"]
    chosen = load_images(images, side, count)
    for name in names.split(",") if names else told["graphs"]:
        about = told["graphs"][name]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(str(graphs / f"{name}.onnx"), options)
        found = []
        for number, image in enumerate(chosen):
            operator, sigma, given = families(side, number)[name]
            x = to_internal(image.pixels[None, :, : about["side"], : about["side"]].float() / 255)
            y = operator(x)
            y = operator.add_noise(y, Noise([derive_seed(0, image.name)]).normal(y.shape), 2 * sigma)
            inputs = {"y": to_unit(y, clip=False), "sigma": torch.tensor([sigma]), **given}
            if "conditions" in about["inputs"]:
                inputs["conditions"] = torch.zeros(1, 9)
            (ours,) = session.run(None, {key: value.numpy() for key, value in inputs.items()})
            measured = operator, y, torch.full((1, 1, 1, 1), 2 * sigma)
            theirs = [to_unit(SinglePass(network)(measured, torch.zeros_like(x))).numpy() for network in networks]
            found.append([np.abs(ours - one).max() for one in theirs])
        same, *other = np.max(found, axis=0)
        text = f"{told['dtype']} {name}: {same:.1e} from PyTorch with these weights"
        text += f", {other[0]:.1e} with the model's" if other else ""
        print(f"{text} ({len(chosen)} pictures)", flush=True)


if __name__ == "__main__":
    if not 4 <= len(sys.argv) <= 6:
        sys.exit(__doc__)
    main(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:5]), *sys.argv[5:])  # type: ignore[arg-type]
