"""Whether a restored face is still the same person: the distance of its embedding by dlib's network from that of the true
face. Below 0.6 dlib takes two faces for one person."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ddc.errors import UserError
from ddc.images import appearing
from ddc.perceptual import Member, cache_folder, download_archive, extract_member

REQUIREMENT = "face-recognition-models==0.3.0"
ARCHIVE = "b79bd200a88c87c9a9d446c990ae71c5a626d1f3730174e6d570157ff1d896cf"
FOLDER = "face_recognition_models-0.3.0/face_recognition_models/models"
LANDMARKS = "shape_predictor_5_face_landmarks.dat"
EMBEDDING = "dlib_face_recognition_resnet_model_v1.dat"
HASHES = {
    LANDMARKS: "c4b1e9804792707d3a405c2c16a80a20269e6675021f64a41d30fffafbc41888",
    EMBEDDING: "55533b28a95800a551ba546ba62fe69625c7e95a7061c338adffead08719da30",
}


def fetch_face_models() -> None:
    """Download dlib's networks into the cache folder, with checked hashes; they are in the public domain."""
    _dlib()
    if all((cache_folder() / name).is_file() for name in HASHES):
        return
    members = {name: Member(REQUIREMENT, ARCHIVE, f"{FOLDER}/{name}", sha256) for name, sha256 in HASHES.items()}
    with tempfile.TemporaryDirectory() as folder:
        archive = download_archive(members[EMBEDDING], "leave --faces out", Path(folder))
        for name, member in members.items():
            with appearing(cache_folder() / name) as temporary:
                temporary.write_bytes(extract_member(archive, member))


class Identity:
    """dlib's detector of faces, of their landmarks, and its embedding of a face as 128 numbers."""

    def __init__(self) -> None:
        dlib, files = _dlib(), {name: str(cache_folder() / name) for name in HASHES}
        self.detect = dlib.get_frontal_face_detector()
        self.landmarks = dlib.shape_predictor(files[LANDMARKS])
        self.network = dlib.face_recognition_model_v1(files[EMBEDDING])

    def __call__(self, x: Tensor, truth: Tensor) -> list[float | None]:
        """The distance of the largest face in each pair of pictures (B, 3, H, W) in [0, 1]; None where the true one shows
        no face."""
        return [self._distance(a, b) for a, b in zip(_pixels(x), _pixels(truth), strict=True)]

    def _distance(self, x: Any, truth: Any) -> float | None:
        faces = self.detect(truth, 1)  # enlarged once, so that faces of 40 pixels are found
        if not faces:
            return None
        # the landmarks of the true face, so that both are cut out alike
        shape = self.landmarks(truth, max(faces, key=lambda face: face.area()))
        a, b = (np.array(self.network.compute_face_descriptor(image, shape)) for image in (x, truth))
        return float(np.linalg.norm(a - b))


def _pixels(x: Tensor) -> Any:
    return (x.detach().cpu().float().clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).contiguous().numpy()


def _dlib() -> Any:
    try:
        import dlib
    except ImportError:
        raise UserError("--faces needs dlib: pip install 'deep-data-consistency[faces]'") from None
    return dlib
