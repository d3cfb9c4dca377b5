"""Images as bytes ``[N, C, H, W]`` with labels ``[N]``, square and of the size asked for."""

from __future__ import annotations

import functools
import gzip
import io
import struct
import sys
import tarfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from examples.common.data.files import Source, mapped, obtain, reading
from examples.common.errors import BadInput, optional

Labelled = tuple[Tensor, Tensor]

CIFAR10 = Source(
    "cifar-10-binary.tar.gz",
    "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9dddda3db29a59bca1dd",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)
MNIST = {
    name: Source(f"{name}.gz", f"md5:{md5}", (f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz",))
    for name, md5 in {
        "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
    }.items()
}


class Images(NamedTuple):
    """Training and test images, and the number of classes."""

    train: Labelled
    test: Labelled
    classes: int


@functools.lru_cache(maxsize=1)
def load(name: str, folder: Path, size: int, limit: int | None = None) -> Images:
    """A data set by name, with three channels.

    Raises:
        BadInput: if its files cannot be had or read.
    """
    train, test, classes = LOADERS[name](folder, size, limit)
    train, test = ((_resize(images[:limit], size), labels[:limit].long()) for images, labels in (train, test))
    return Images(train, test, classes)


def to_float(images: Tensor) -> Tensor:
    """From bytes to -1 ... 1."""
    return images.float() / 127.5 - 1


def digits(folder: Path, size: int, limit: int | None) -> Images:
    """scikit-learn's handwritten digits, 8x8; every fourth one is for testing."""
    images, labels = optional("sklearn.datasets", "the handwritten digits").load_digits(return_X_y=True)
    images = torch.from_numpy((images * (255 / 16)).astype("uint8")).view(-1, 1, 8, 8)
    labels, test = torch.from_numpy(labels), torch.arange(len(labels)) % 4 == 3
    return Images((images[~test], labels[~test]), (images[test], labels[test]), 10)


def cifar10(folder: Path, size: int, limit: int | None) -> Images:
    """CIFAR-10 from its binary version: one byte of label and 3x32x32 of image a row."""
    path = obtain(CIFAR10, folder)
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    contents = {}
    with reading(path), tarfile.open(path) as archive:
        for entry in archive:
            name = entry.name.rpartition("/")[2]
            if name in names and (file := archive.extractfile(entry)):
                content = numpy.frombuffer(file.read(), "uint8")
                if content.size % 3073 or not content.size or content[::3073].max() > 9:
                    raise ValueError(f"{name} is no sequence of images")
                contents[name] = torch.from_numpy(content.copy()).view(-1, 3073)
        rows = torch.cat([contents[name] for name in names[:5]]), contents[names[5]]
    train, test = ((part[:, 1:].reshape(-1, 3, 32, 32), part[:, 0]) for part in rows)
    return Images(train, test, 10)


def mnist(folder: Path, size: int, limit: int | None) -> Images:
    """MNIST from its four files."""

    def read(name: str) -> Tensor:
        path = obtain(MNIST[name], folder)
        with reading(path), gzip.open(path) as file:
            content = file.read()
            axes = content[3]
            shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
            if content[:3] != b"\0\0\x08":
                raise ValueError("this is no file of unsigned bytes")
            return torch.from_numpy(numpy.frombuffer(content, "uint8", offset=4 + 4 * axes).copy()).view(shape)

    def part(name: str) -> Labelled:
        images, labels = read(f"{name}-images-idx3-ubyte").unsqueeze(1), read(f"{name}-labels-idx1-ubyte")
        if len(images) != len(labels):
            raise BadInput(f"{folder}: {len(images)} images of MNIST's {name} but {len(labels)} labels")
        return images, labels

    return Images(part("train"), part("t10k"), 10)


def imagenet(folder: Path, size: int, limit: int | None) -> Images:
    """Folders ``train/<class>/`` and ``val/<class>/`` of images; decoded once and kept beside them."""
    classes = [path.name for path in sorted(folder.glob("train/*")) if path.is_dir()]
    if not classes:
        raise BadInput(f"{folder / 'train'} has no folders, one for each class, of images")

    def part(name: str) -> Labelled:
        files = [(path, label) for label, one in enumerate(classes) for path in sorted((folder / name / one).glob("*"))]
        if not files:
            raise BadInput(f"{folder / name} has no images in the folders of train")
        # A few of every class rather than all of the first.
        files = files[:: -(-len(files) // limit)] if limit else files
        images = mapped(
            _stem(folder, name, size, limit),
            ((label, path.parent.name, path.name, *_version(path)) for path, label in files),
            (len(files), 3, size, size),
            lambda out: _decode(((path, path) for path, _ in files), out),
        )
        return images, torch.tensor([label for _, label in files])

    return Images(part("train"), part("val"), len(classes))


def lsun(folder: Path, size: int, limit: int | None) -> Images:
    """LSUN's bedrooms from their LMDB folders; images without classes."""
    lmdb = optional("lmdb", "LSUN's files")

    def part(name: str) -> Labelled:
        path = folder / f"bedroom_{name}_lmdb"
        content = path / "data.mdb"
        if not content.exists():
            raise BadInput(f"there is no {content}; unzip {path.name}.zip of https://www.yf.io/p/lsun in {folder}")
        with reading(path, lmdb.Error), lmdb.open(str(path), readonly=True, lock=False) as base:
            if (base.info()["last_pgno"] + 1) * base.stat()["psize"] > content.stat().st_size:
                raise ValueError("it is cut short")
            count = min(base.stat()["entries"], limit or sys.maxsize)
            if not count:
                raise ValueError("it has no images")

            def fill(out: numpy.ndarray) -> None:
                with base.begin() as transaction:
                    _decode(((path, io.BytesIO(row)) for _, row in islice(transaction.cursor(), count)), out)

            images = mapped(
                _stem(folder, f"bedroom_{name}", size, limit), _version(content), (count, 3, size, size), fill
            )
        return images, torch.zeros(count)

    return Images(part("train"), part("val"), 1)


LOADERS: dict[str, Callable[[Path, int, int | None], Images]] = {
    "digits": digits,
    "cifar10": cifar10,
    "mnist": mnist,
    "imagenet": imagenet,
    "lsun": lsun,
}


def _stem(folder: Path, name: str, size: int, limit: int | None) -> Path:
    return folder / f"{name}-{size}{f'-{limit}' if limit else ''}"


def _version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _decode(files: Iterable[tuple[Path, Any]], out: numpy.ndarray) -> None:
    """Write square centres of compressed images to ``uint8[N, 3, size, size]``; a file has a name and what Pillow opens."""
    image, operations = (optional(f"PIL.{name}", "compressed images") for name in ("Image", "ImageOps"))

    def one(row: numpy.ndarray, file: tuple[Path, Any]) -> None:
        path, content = file
        with reading(path, image.DecompressionBombError), image.open(content) as opened:
            row[:] = numpy.array(operations.fit(opened.convert("RGB"), row.shape[1:])).transpose(2, 0, 1)

    rows = zip(out, files, strict=True)
    with ThreadPoolExecutor() as pool:
        # A block at a time, because a pool takes in all that it is given before it is done.
        while block := list(islice(rows, 256)):
            list(pool.map(one, *zip(*block, strict=True)))


def _resize(images: Tensor, size: int) -> Tensor:
    images = images.expand(-1, 3, -1, -1)
    if images.shape[-1] == size:
        return images.contiguous()
    options = {"size": size, "mode": "bilinear", "antialias": True}
    pieces = [nn.functional.interpolate(piece.float(), **options) for piece in images.split(4096)]
    return torch.cat([piece.round().clamp(0, 255).to(torch.uint8) for piece in pieces])
