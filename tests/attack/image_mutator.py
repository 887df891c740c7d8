"""Damaged image files, made from a seed; and a worker that reads them: python image_mutator.py FOLDER FIRST STOP STEP.

The worker prints `begin N NAME`, and then `end N OUTCOME` with `picture`, `refused` or the exception that escaped.
"""

import io
import random
import resource
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image, ImageCms, PngImagePlugin

sys.path.append(str(Path(__file__).parents[1]))  # as pytest does
from tiny import lzw_tiff

Seed = tuple[str, bytes]  # the ending of the name, and the content
INTERESTING = (
    0,
    1,
    2,
    3,
    7,
    8,
    16,
    127,
    128,
    255,
    256,
    0x7FFF,
    0x8000,
    0xFFFF,
    0x10000,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
)
ENDINGS = (".png", ".jpg", ".webp", ".tif", ".bmp", ".heic", ".npy", ".jfif", ".heif", ".tiff", ".jpeg")
MEMORY = 8 << 30
LONGEST = 10  # seconds for one file


def rle_bmp(width: int, height: int, runs: bytes) -> bytes:
    """A BMP of 8 bits with a grey palette and these run lengths."""
    palette = b"".join(bytes((i, i, i, 0)) for i in range(256))
    offset = 14 + 40 + len(palette)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 2835, 2835, 256, 0)
    return b"BM" + struct.pack("<IHHI", offset + len(runs), 0, 0, offset) + info + palette + runs


def scans_jpeg(side: int, scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    buffer = io.BytesIO()
    Image.new("L", (side, side), 90).save(buffer, "JPEG", progressive=True)
    content = buffer.getvalue()
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * scans + b"\xff\xd9"


def png_chunks(content: bytes) -> list[tuple[bytes, bytes]]:
    chunks, at = [], 8
    while at + 12 <= len(content):
        length = struct.unpack(">I", content[at : at + 4])[0]
        chunks.append((content[at + 4 : at + 8], content[at + 8 : at + 8 + length]))
        at += 12 + length
    return chunks


def png_file(chunks: list[tuple[bytes, bytes]]) -> bytes:
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@cache
def seeds() -> list[Seed]:
    """Good files of every format that is read, in many layouts."""
    from pillow_heif import register_heif_opener

    from ddc.images import Picture

    register_heif_opener()
    generator = np.random.default_rng(0)
    smooth = np.linspace(0, 220, 24 * 20 * 3).reshape(20, 24, 3)
    colour = (smooth + generator.integers(0, 30, smooth.shape)).astype(np.uint8)
    deep = colour.astype(np.uint16) * 257
    alpha = generator.integers(0, 256, (20, 24)).astype(np.uint8)
    image = Image.fromarray(colour)
    exif = Image.Exif()
    exif[0x010F], exif[0x0112], exif[0x9003] = "Maker", 6, "2024:01:01 00:00:00"
    exif.get_ifd(0x8769)[0x829A] = (1, 60)
    icc = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    found: list[Seed] = []

    def saved(ending: str, kind: str, picture: Image.Image = image, **options: object) -> None:
        buffer = io.BytesIO()
        picture.save(buffer, kind, **options)  # type: ignore[arg-type]
        found.append((ending, buffer.getvalue()))

    def written(ending: str, picture: Picture) -> None:
        with tempfile.TemporaryDirectory() as folder:
            picture.write(Path(folder) / f"a{ending}")
            found.append((ending, (Path(folder) / f"a{ending}").read_bytes()))

    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", "a text" * 50, zip=True)
    transparent = Image.fromarray(np.dstack([colour, alpha]))
    for mode in ("RGB", "L", "P", "1", "LA", "RGBA"):
        saved(".png", "PNG", transparent.convert(mode))
    saved(".png", "PNG", exif=exif, icc_profile=icc, pnginfo=text)
    saved(".png", "PNG", save_all=True, append_images=[image.rotate(90)])
    for bits_alpha, grey in (
        (None, False),
        (alpha.astype(np.uint16) * 257, False),
        (alpha.astype(np.uint16) * 257, True),
    ):
        written(".png", Picture(deep, bits_alpha, bits=16, grey=grey, exif=exif.tobytes()))
        written(".tif", Picture(deep, bits_alpha, bits=16, grey=grey, icc=icc))
    saved(".jpg", "JPEG", exif=exif, icc_profile=icc)
    saved(".jpg", "JPEG", progressive=True, quality=60)
    saved(".jpg", "JPEG", image.convert("L"), restart_marker_blocks=2)
    saved(".jpg", "JPEG", image.convert("CMYK"), icc_profile=icc)
    saved(".webp", "WEBP", lossless=True, exif=exif, icc_profile=icc)
    saved(".webp", "WEBP", transparent, quality=60)
    saved(".webp", "WEBP", save_all=True, append_images=[image.rotate(180)])
    for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"):
        saved(".tif", "TIFF", compression=compression, tiffinfo={274: 6})
    saved(".tif", "TIFF", save_all=True, append_images=[image], icc_profile=icc, exif=exif)
    saved(".tif", "TIFF", transparent, big_tiff=True)
    saved(".tif", "TIFF", image.convert("1"), compression="group4")
    found.append((".tif", lzw_tiff(deep)))
    found.append((".tif", lzw_tiff(deep[:, :, :1], photometric=0)))
    for planes, bigtiff, predictor in (("contig", True, False), ("separate", False, False), ("contig", False, True)):
        buffer = io.BytesIO()
        stored = deep if planes == "contig" else deep.transpose(2, 0, 1)
        tifffile.imwrite(
            buffer,
            stored,
            photometric="rgb",
            planarconfig=planes,
            bigtiff=bigtiff,
            compression="zlib",
            predictor=predictor,
        )
        found.append((".tif", buffer.getvalue()))
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, generator.random((20, 24), np.float32), photometric="minisblack")
    found.append((".tif", buffer.getvalue()))
    for mode in ("RGB", "L", "P", "1", "RGBA"):
        saved(".bmp", "BMP", transparent.convert(mode))
    found.append((".bmp", rle_bmp(24, 20, b"\x18\x40\x00\x00" * 20 + b"\x00\x01")))
    saved(".heic", "HEIF", quality=70, exif=exif.tobytes())
    saved(".heic", "HEIF", transparent, quality=50, save_all=True, append_images=[transparent])
    for array in (
        colour,
        deep,
        colour.astype(np.float32) / 255,
        (colour / 255).transpose(2, 0, 1),
        np.asfortranarray(colour),
    ):
        buffer = io.BytesIO()
        np.save(buffer, array)
        found.append((".npy", buffer.getvalue()))
    return found


def flip_bits(content: bytearray, pick: random.Random) -> None:
    for _ in range(pick.choice((1, 1, 2, 5, 30))):
        content[pick.randrange(len(content))] ^= 1 << pick.randrange(8)


def set_field(content: bytearray, pick: random.Random) -> None:
    """Overwrite a number of one to eight bytes, most often in the header."""
    for _ in range(pick.choice((1, 1, 2))):
        length, order = pick.choice((1, 2, 4, 8)), pick.choice("<>")
        at = pick.randrange(min(len(content), pick.choice((64, 400, 1 << 20))))
        value = pick.choice(INTERESTING) & ((1 << 8 * length) - 1)
        field = struct.pack(order + {1: "B", 2: "H", 4: "I", 8: "Q"}[length], value)
        content[at : at + length] = field


def truncate(content: bytearray, pick: random.Random) -> None:
    del content[pick.randrange(len(content)) :]


def move_block(content: bytearray, pick: random.Random) -> None:
    """Delete, repeat or move a block."""
    first = pick.randrange(len(content))
    block = bytes(content[first : first + pick.choice((1, 4, 16, 100, 1000))])
    if pick.random() < 0.6:
        del content[first : first + len(block)]
    if pick.random() < 0.6:
        at = pick.randrange(len(content) + 1)
        content[at:at] = block * pick.choice((1, 1, 2, 50))


def splice(content: bytearray, pick: random.Random) -> None:
    """Insert a piece of another file, or go on with it."""
    other = pick.choice(seeds())[1]
    first, at = pick.randrange(len(other)), pick.randrange(len(content))
    if pick.random() < 0.5:
        content[at:] = other[first:]
    else:
        content[at:at] = other[first : first + pick.choice((8, 60, 500))]


def damage_exif(content: bytearray, pick: random.Random) -> None:
    """Change the directory that follows the head of EXIF or TIFF."""
    heads = [at for head in (b"II*\0", b"MM\0*", b"II+\0") if (at := content.find(head)) >= 0]
    if not heads:
        return flip_bits(content, pick)
    start = pick.choice(heads)
    for _ in range(pick.choice((1, 2, 6))):
        at = start + pick.randrange(min(len(content) - start, 300))
        content[at : at + 1] = bytes((pick.choice((0, 1, 2, 3, 5, 10, 11, 12, 13, 16, 127, 255, pick.randrange(256))),))


def remake_png(content: bytearray, pick: random.Random) -> None:
    """Damage chunks of a PNG and give them right checksums, so that the damage is read."""
    chunks = png_chunks(bytes(content))
    if not content.startswith(b"\x89PNG") or not chunks:
        return set_field(content, pick)
    for _ in range(pick.choice((1, 2, 3))):
        index = pick.randrange(len(chunks))
        kind, data = chunks[index][0], bytearray(chunks[index][1])
        action = pick.randrange(4)
        if action == 0 and data:
            (flip_bits if pick.random() < 0.5 else set_field)(data, pick)
        elif action == 1:
            kind = pick.choice(
                (b"IHDR", b"PLTE", b"IDAT", b"tRNS", b"iCCP", b"eXIf", b"acTL", b"fcTL", b"fdAT", b"zTXt", b"gAMA")
            )
        elif action == 2:
            chunks.insert(pick.randrange(len(chunks)), pick.choice(chunks))
        elif kind == b"IDAT":
            data = bytearray(zlib.compress(pick.randbytes(pick.choice((1, 100, 100_000)))))
        chunks[index] = (kind, bytes(data))
    content[:] = png_file(chunks)


MUTATORS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_bits,
    flip_bits,
    set_field,
    set_field,
    truncate,
    move_block,
    splice,
    damage_exif,
    damage_exif,
    remake_png,
)


def mutated(number: int) -> Seed:
    """The damaged file of this number: the ending of its name, and its content."""
    pick = random.Random(number)
    ending, good = seeds()[number % len(seeds())]
    content = bytearray(good)
    for _ in range(pick.choice((1, 1, 1, 2, 3))):
        pick.choice(MUTATORS)(content, pick)
        if not content:
            break
    return (pick.choice(ENDINGS) if pick.random() < 0.1 else ending), bytes(content)


def attempt(path: Path, number: int) -> str:
    """Read a file as the command line does and write it again; returns what came of it."""
    from ddc.errors import UserError
    from ddc.images import Picture, read_size
    from ddc.jpegfile import jpeg_noise, jpeg_settings

    read_size(path.read_bytes())
    jpeg_settings(path)
    try:
        picture = Picture.read(path)
    except UserError as error:
        assert path.name in str(error) and len(str(error).splitlines()) == 1, f"the message {error!r}"
        return "refused"
    height, width = picture.size
    assert picture.pixels.shape == (height, width, 3) and min(height, width) > 0
    assert picture.pixels.dtype in (np.uint8, np.uint16, np.float32)
    assert picture.pixels.dtype != np.float32 or np.isfinite(picture.pixels).all()
    assert picture.alpha is None or picture.alpha.shape == (height, width)
    jpeg_noise(picture)
    if height * width <= 100_000:
        target = path.with_name(f"again{ENDINGS[number % 7]}")
        try:
            picture.write(target)
            assert target.stat().st_size
        except UserError as error:
            assert target.name in str(error) and not target.exists()
        target.unlink(missing_ok=True)
    return "picture"


def work(folder: Path, first: int, stop: int, step: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    for number in range(first, stop, step):
        ending, content = mutated(number)
        path = folder / f"{number}{ending}"
        path.write_bytes(content)
        # a file that takes longer ends the process; on a busy computer, seconds on the clock say little
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + LONGEST, most))
        print(f"begin {number} {path.name}", flush=True)
        try:
            outcome = attempt(path, number)
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"end {number} {outcome}", flush=True)
        if outcome in ("picture", "refused"):
            path.unlink()


if __name__ == "__main__":
    work(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
