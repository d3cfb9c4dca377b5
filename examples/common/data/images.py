"""Images as bytes ``[N, C, H, W]`` with labels ``[N]``, square and of the size asked for."""

from __future__ import annotations

import functools
import gzip
import importlib
import io
import struct
import tarfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from examples.common.data.files import Source, cached, obtain, reading
from examples.common.errors import BadInput

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
    shaped = [(_resize(images[:limit], size), labels[:limit].long()) for images, labels in (train, test)]
    return Images(*shaped, classes)


def to_float(images: Tensor) -> Tensor:
    """From bytes to -1 ... 1."""
    return images.float() / 127.5 - 1


def digits(folder: Path, size: int, limit: int | None) -> Images:
    """scikit-learn's handwritten digits, 8x8; every fourth one is for testing."""
    images, labels = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
    images = torch.from_numpy((images * (255 / 16)).astype("uint8")).view(-1, 1, 8, 8)
    labels, test = torch.from_numpy(labels), torch.arange(len(labels)) % 4 == 3
    return Images((images[~test], labels[~test]), (images[test], labels[test]), 10)


def cifar10(folder: Path, size: int, limit: int | None) -> Images:
    """CIFAR-10 from its binary version: one byte of label and 3x32x32 of image a row."""
    path = obtain(CIFAR10, folder)
    names = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]
    found = {}
    with reading(path), tarfile.open(path) as archive:
        for entry in archive:
            name = entry.name.rpartition("/")[2]
            if name in names:
                content = numpy.frombuffer(archive.extractfile(entry).read(), "uint8")
                if content.size % 3073 or not content.size or content[::3073].max() > 9:
                    raise ValueError(f"{name} is no sequence of images")
                found[name] = torch.from_numpy(content.copy()).view(-1, 3073)
        rows = torch.cat([found[name] for name in names[:5]]), found[names[5]]
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
    classes = [path.name for path in sorted(folder.glob("train/*/"))]
    if not classes:
        raise BadInput(f"{folder / 'train'} has no folders, one for each class, of images")

    def part(name: str) -> Labelled:
        files = [(path, label) for label, one in enumerate(classes) for path in sorted((folder / name / one).glob("*"))]
        if not files:
            raise BadInput(f"{folder / name} has no images in the folders of train")
        # A few of every class rather than all of the first.
        files = files[:: -(-len(files) // limit)] if limit else files
        kept = folder / f"{name}-{size}{f'-{limit}' if limit else ''}.pt"
        labels = torch.tensor([label for _, label in files])
        return cached(kept, lambda: decode((path for path, _ in files), size)), labels

    return Images(part("train"), part("val"), len(classes))


def lsun(folder: Path, size: int, limit: int | None) -> Images:
    """LSUN's bedrooms from their LMDB folders; images without classes."""
    try:
        lmdb = importlib.import_module("lmdb")
    except ImportError:
        raise BadInput("LSUN is kept in LMDB, which Python reads with lmdb; pip install lmdb") from None

    def part(name: str) -> Labelled:
        path = folder / f"bedroom_{name}_lmdb"
        if not path.is_dir():
            raise BadInput(f"there is no {path}; get it from https://www.yf.io/p/lsun and unzip it there")

        def make() -> Tensor:
            try:
                with lmdb.open(str(path), readonly=True, lock=False).begin() as transaction:
                    rows = [content for _, content in islice(transaction.cursor(), limit)]
            except lmdb.Error as error:
                raise BadInput(f"{path}: damaged: {error}") from None
            return decode(map(io.BytesIO, rows), size, str(path))

        images = cached(folder / f"bedroom_{name}-{size}{f'-{limit}' if limit else ''}.pt", make)
        return images, torch.zeros(len(images))

    return Images(part("train"), part("val"), 1)


LOADERS: dict[str, Callable[[Path, int, int | None], Images]] = {
    "digits": digits,
    "cifar10": cifar10,
    "mnist": mnist,
    "imagenet": imagenet,
    "lsun": lsun,
}


def decode(files: Iterable[Any], size: int, where: str = "") -> Tensor:
    """Square centres of compressed images: ``uint8[N, 3, size, size]``."""
    image = importlib.import_module("PIL.Image")
    operations = importlib.import_module("PIL.ImageOps")

    def one(file: Any) -> Tensor:
        with reading(Path(where or file)), image.open(file) as opened:
            return torch.from_numpy(numpy.array(operations.fit(opened.convert("RGB"), (size, size)))).permute(2, 0, 1)

    with ThreadPoolExecutor() as pool:
        return torch.stack(list(pool.map(one, files)))


def _resize(images: Tensor, size: int) -> Tensor:
    images = images.expand(-1, 3, -1, -1)
    if images.shape[-1] == size:
        return images.contiguous()
    options = {"size": size, "mode": "bilinear", "antialias": True}
    pieces = [nn.functional.interpolate(piece.float(), **options) for piece in images.split(4096)]
    return torch.cat([piece.round().clamp(0, 255).to(torch.uint8) for piece in pieces])
