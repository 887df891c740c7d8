"""Times 3×3 convolutions in FP8 and in float16 on a GPU: pip install nvidia-cudnn-frontend; python scripts/fp8.py

PyTorch has no convolution in FP8; cuDNN's own is called here, with a scale for each output channel and a float16 result.
"""

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 448.0  # of float8_e4m3
PLANS = 8  # of cuDNN, of which the fastest counts
# pictures, channels before and after, height and width: the largest layers of the paper's networks
SHAPES = (
    *((16, 256, 256, 256), (16, 512, 256, 256), (16, 256, 256, 128), (16, 512, 512, 64)),
    *((16, 1024, 512, 64), (16, 512, 512, 32), (16, 1024, 1024, 16)),
)


def milliseconds(run: Any) -> float:
    from triton.testing import do_bench

    return float(do_bench(run, warmup=5, rep=20, return_mode="median"))


def channels_last(count: int, channels: int, height: int, width: int) -> dict[str, list[int]]:
    """The size and the strides of a tensor, as cuDNN wants them."""
    strides = [channels * height * width, 1, width * channels, channels]
    return {"dim": [count, channels, height, width], "stride": strides}


class FP8Convolution:
    """scale · (x ∗ w), with x and w in FP8."""

    def __init__(self, cudnn: Any, x: Tensor, w: Tensor, scale: Tensor) -> None:
        kinds = cudnn.data_type
        self.handle = cudnn.create_handle()
        cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        graph = cudnn.pygraph(
            io_data_type=kinds.HALF,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self.handle,
        )
        image = graph.tensor(name="x", data_type=kinds.FP8_E4M3, **channels_last(*x.shape))
        weight = graph.tensor(name="w", data_type=kinds.FP8_E4M3, **channels_last(*w.shape))
        factor = graph.tensor(name="scale", data_type=kinds.FLOAT, **channels_last(*scale.shape))
        sums = graph.conv_fprop(image=image, weight=weight, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
        sums.set_data_type(kinds.FLOAT)
        result = graph.mul(a=sums, b=factor)
        place = channels_last(len(x), len(w), *x.shape[-2:])
        result.set_output(True).set_data_type(kinds.HALF).set_dim(place["dim"]).set_stride(place["stride"])
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        self.graph = graph
        self.y = torch.empty(place["dim"], device=x.device, dtype=torch.half).to(memory_format=torch.channels_last)
        self.places = {image: x, weight: w, factor: scale, result: self.y}

    def run(self, plan: int, work: Tensor) -> None:
        self.graph.execute_plan_at_index(self.places, work, plan, handle=self.handle)

    def fastest(self) -> float:
        """The milliseconds of the fastest plan, whose result is in y."""
        found: list[tuple[float, int, Tensor]] = []
        for plan in range(min(PLANS, self.graph.get_execution_plan_count())):
            try:
                self.graph.build_plan_at_index(plan)
                size = max(self.graph.get_workspace_size_plan_at_index(plan), 1)
                work = torch.empty(size, device=self.y.device, dtype=torch.uint8)
                found.append((milliseconds(lambda: self.run(plan, work)), plan, work))  # noqa: B023
            except Exception as error:  # cuDNN offers plans that this GPU cannot run
                print(f"  plan {plan}: {str(error)[:80]}")
        taken, plan, work = min(found, key=lambda one: one[0])
        self.run(plan, work)
        return taken


def main() -> None:
    cudnn: Any = importlib.import_module("cudnn")
    torch.backends.cudnn.benchmark = True
    print(f"torch {torch.__version__}, cuDNN {cudnn.backend_version()}, {torch.cuda.get_device_name()}")
    for count, channels, outputs, side in SHAPES:
        x = torch.randn(count, channels, side, side, device="cuda").to(memory_format=torch.channels_last)
        w = torch.randn(outputs, channels, 3, 3, device="cuda").to(memory_format=torch.channels_last)
        w = w / (9 * channels) ** 0.5
        x_scale, w_scale = x.abs().max() / LARGEST, w.abs().amax((1, 2, 3), keepdim=True) / LARGEST
        x8, w8 = (x / x_scale).to(torch.float8_e4m3fn), (w / w_scale).to(torch.float8_e4m3fn)
        fast = FP8Convolution(cudnn, x8, w8, (x_scale * w_scale).view(1, -1, 1, 1))
        expected = F.conv2d(x8.float() * x_scale, w8.float() * w_scale, padding=1)
        taken = fast.fastest()
        error = float((fast.y.float() - expected).norm() / expected.norm())
        halves = (x.half(), w.half())
        usual = milliseconds(lambda: F.conv2d(*halves, padding=1))  # noqa: B023
        work = 2 * count * side**2 * 9 * channels * outputs / 1e9
        print(
            f"{count} × {channels} → {outputs}, {side}: float16 {usual:.3f} ms {work / usual:.0f} TFLOP/s, "
            f"FP8 {taken:.3f} ms {work / taken:.0f} TFLOP/s, error {error:.1e}"
        )


if __name__ == "__main__":
    main()
