"""Pictures for training: where they come from, and which crop the n-th draw gets."""

import builtins
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddc.datasets import Pool, Stream, find_sources, load_pictures, read_header, read_pixels, split_holdout
from ddc.errors import UserError
from ddc.images import Picture, quantise
from ddc.training.data import Draws, centre_crops


def picture(seed: int, height: int = 40, width: int = 48) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Good pictures of two sizes, one that is too small, one that is cut off, and one that is no picture."""
    for i in range(5):
        picture(i).save(tmp_path / f"a{i}.png")
    picture(9, 64, 33).save(tmp_path / "b9.png")
    picture(7, 20, 60).save(tmp_path / "small.png")
    whole = (tmp_path / "a0.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "no.jpg").write_text("this is text")
    return tmp_path


def unusual_pictures(folder: Path) -> None:
    """Files whose pixels a plain conversion to RGB gets wrong, or might."""
    rng = np.random.default_rng(0)
    deep = rng.integers(0, 65536, (33, 48, 4)).astype(np.uint16)
    for suffix in ("png", "tif"):
        Picture(deep[:, :, :3], bits=16).write(folder / f"rgb16.{suffix}")
        Picture(deep[:, :, :3], deep[:, :, 3], bits=16).write(folder / f"rgba16.{suffix}")
        grey = np.broadcast_to(deep[:, :, :1], (33, 48, 3))
        Picture(grey, bits=16, grey=True).write(folder / f"grey16.{suffix}")
        Picture(grey, deep[:, :, 3], bits=16, grey=True).write(folder / f"grey-alpha16.{suffix}")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        for suffix in ("jpg", "png", "webp"):
            picture(orientation).save(folder / f"turned{orientation}.{suffix}", exif=exif)
    picture(1).convert("P").save(folder / "palette.png", transparency=3)
    picture(2).convert("CMYK").save(folder / "cmyk.jpg")
    picture(3).convert("L").save(folder / "grey.png")
    transparent = picture(4)
    transparent.putalpha(picture(5).convert("L"))
    transparent.save(folder / "rgba.png")
    transparent.convert("LA").save(folder / "grey-alpha.png")


def test_training_reads_what_restoring_reads(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    unusual_pictures(folder)
    with tarfile.open(tmp_path / "data.tar", "w") as archive:
        archive.add(folder, ".")
    files, members = find_sources([folder]), find_sources([tmp_path / "data.tar"])
    assert [s.name for s in files] == [s.name for s in members] and len(files) == 8 + 24 + 5
    for source in (*files, *members):
        expected = Picture.read(folder / source.name).pixels
        pixels = read_pixels(source)
        assert pixels is not None and pixels.dtype == np.uint8, source.name
        assert np.array_equal(pixels, quantise(expected, 8)), source.name
        assert read_header(source) == expected.shape[:2], source.name
        if expected.dtype == np.uint16:  # rounded, not cut off
            levels = pixels * 257.0
            assert np.abs(levels - expected).max() <= 129, source.name


def test_16_bit_grey_keeps_its_brightness(tmp_path: Path) -> None:
    Image.fromarray(np.full((32, 32), 32768, np.uint16)).save(tmp_path / "grey.png")
    pixels = read_pixels(find_sources([tmp_path])[0])
    assert pixels is not None and np.unique(pixels).tolist() == [128]


def test_unreadable_and_small_pictures_are_counted_and_passed_over(mixed: Path) -> None:
    pool = Pool(find_sources([mixed]), 32)
    assert (len(pool.names), pool.unreadable, pool.too_small) == (6, 2, 1)
    assert pool.count == "6 pictures, 2 unreadable passed over, 1 smaller than the crop passed over"


def test_a_crop_is_a_window_of_its_picture(mixed: Path) -> None:
    pool = Pool(find_sources([mixed]), 32)
    draws = Draws(pool, 32, seed=3)
    crops, numbers = draws.take(12)
    for crop, number in zip(crops, numbers, strict=True):
        place = draws._place(number)
        whole = np.array(Image.open(mixed / pool.names[place.picture]))
        window = whole[place.top : place.top + 32, place.left : place.left + 32]
        window = window[:, ::-1] if place.mirrored else window
        assert np.array_equal(((crop.permute(1, 2, 0).numpy() + 1) * 127.5).round(), window)


def test_the_nth_draw_depends_on_seed_and_number_alone(pictures: Path) -> None:
    pool = Pool(find_sources([pictures]), 32)
    whole, _ = Draws(pool, 32, 5).take(8)
    first, second = Draws(pool, 32, 5, rank=0, world=2), Draws(pool, 32, 5, rank=1, world=2)
    halves = [first.take(4), second.take(4)]
    assert halves[0][1] == [0, 2, 4, 6] and halves[1][1] == [1, 3, 5, 7]
    assert torch.equal(whole[0::2], halves[0][0]) and torch.equal(whole[1::2], halves[1][0])
    again = Draws(pool, 32, 5)
    again.position = 6
    assert torch.equal(again.take(2)[0], whole[6:])
    assert not torch.equal(Draws(pool, 32, 6).take(8)[0], whole)
    epoch = [Draws(pool, 32, 5)._place(n).picture for n in range(3)]
    assert sorted(epoch) == [0, 1, 2]  # every picture once


def test_a_stream_gives_what_the_pool_gives(mixed: Path) -> None:
    (mixed / "cut.png").unlink()
    sources = find_sources([mixed])
    pool, stream = (
        load_pictures(sources, 32, stream="off"),
        load_pictures(sources, 32, stream="on", workers=2),
    )
    assert isinstance(stream, Stream) and stream.names == pool.names
    one, other = Draws(pool, 32, 1), Draws(stream, 32, 1)
    for _ in range(4):
        (a, n), (b, m) = one.take(3), other.take(3)
        assert torch.equal(a, b) and n == m
    (a, names), (b, _) = next(centre_crops(pool, 32, 4)), next(centre_crops(stream, 32, 4))
    assert torch.equal(a, b) and len(names) == 4


def test_a_stream_passes_over_what_turns_out_to_be_cut_off(mixed: Path) -> None:
    stream = load_pictures(find_sources([mixed]), 32, stream="on", workers=2)
    assert "cut.png" in stream.names and stream.unreadable == 1
    crops, _ = Draws(stream, 32, 0).take(2 * len(stream.names))
    assert crops.shape == (14, 3, 32, 32) and stream.unreadable == 2
    again = load_pictures(find_sources([mixed]), 32, stream="on", workers=3)
    assert torch.equal(Draws(again, 32, 0).take(14)[0], crops)


def test_pictures_that_do_not_fit_are_streamed(pictures: Path) -> None:
    sources = find_sources([pictures])
    assert isinstance(load_pictures(sources, 32, share=1e-9), Stream)
    assert not isinstance(load_pictures(sources, 32, share=0.3), Stream)


def test_an_empty_folder_and_what_is_no_picture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no pictures in"):
        find_sources([tmp_path])
    with pytest.raises(UserError, match="neither a folder"):
        find_sources([tmp_path / "nothing"])
    (tmp_path / "x.png").write_text("text")
    with pytest.raises(UserError, match="none of 1 pictures can be used: 1 unreadable"):
        load_pictures(find_sources([tmp_path]), 32)
    with pytest.raises(UserError, match="none of 1 pictures can be used"):
        load_pictures(find_sources([tmp_path]), 32, stream="on")


@pytest.mark.parametrize("prefix", ["", "./"])
def test_tar_archives(mixed: Path, tmp_path_factory: pytest.TempPathFactory, prefix: str) -> None:
    folder = tmp_path_factory.mktemp("archives")
    with tarfile.open(folder / "data.tar", "w") as archive:
        for path in sorted(mixed.glob("a*.png")):
            archive.add(path, prefix + path.name)
    from_tar = Pool(find_sources([folder]), 32)
    from_folder = Pool([s for s in find_sources([mixed]) if s.name.startswith("a")], 32)
    assert from_tar.names == from_folder.names and torch.equal(from_tar.pixels, from_folder.pixels)
    (folder / "bad.tar").write_bytes(b"1" * 2000)
    with pytest.raises(UserError, match="not a plain tar archive"):
        find_sources([folder])


def test_holdout_by_number(mixed: Path) -> None:
    kept, held = split_holdout(find_sources([mixed]), 3)
    assert {s.name for s in held} == {"a0.png", "a3.png", "b9.png"}
    assert len(kept) + len(held) == 9 and split_holdout(kept, 0) == (kept, [])


def test_a_dataset_folder_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    real = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="pip install pyarrow"):
        find_sources([tmp_path])


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_a_dataset_folder(kind: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    rows = []
    for i in range(5):
        buffer = io.BytesIO()
        picture(i).save(buffer, "PNG")
        rows.append({"bytes": buffer.getvalue(), "path": None})
    rows[2]["bytes"] = b"broken"
    picture(8).save(tmp_path / "beside.bin", "PNG")
    rows.append({"bytes": None, "path": "beside.bin"})
    column = pa.array(rows, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    table = pa.table({"label": list(range(6)), "image": column})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "train-0.parquet", row_group_size=2)
    else:
        with (
            pa.OSFile(str(tmp_path / "data-0.arrow"), "wb") as file,
            (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(file, table.schema) as out,
        ):
            out.write_table(table, max_chunksize=4)
    pool = Pool(find_sources([tmp_path]), 32)
    assert len(pool.names) == 5 and pool.unreadable == 1
    expected = np.concatenate([np.array(picture(i)).reshape(-1, 3) for i in (0, 1, 3, 4, 8)])
    assert np.array_equal(pool.pixels.numpy(), expected)
    pq.write_table(pa.table({"label": [1, 2]}), tmp_path / "z.parquet")
    with pytest.raises(UserError, match="no column of pictures"):
        find_sources([tmp_path])
    (tmp_path / "z.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"z\.parquet is not a valid dataset file"):
        find_sources([tmp_path])
