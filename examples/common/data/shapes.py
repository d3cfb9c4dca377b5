"""ShapeNet's parts and ModelNet40, read from their archives as clouds of points."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import numpy
import torch
from torch import Tensor

from examples.common.data.files import Source, cached, obtain, reading_zip
from examples.common.data.points import Clouds, Labelled, surfaces, unit_ball
from examples.common.errors import BadInput

SHAPENET = Source(
    "shapenetcore_partanno_segmentation_benchmark_v0.zip",
    "",
    ("https://shapenet.cs.stanford.edu/ericyi/shapenetcore_partanno_segmentation_benchmark_v0.zip",),
)
MODELNET40 = Source(
    "ModelNet40.zip",
    "sha256:42dc3e656932e387f554e25a4eb2cc0e1a1bd3ab54606e2a9eae444c60e536ac",
    ("https://modelnet.cs.princeton.edu/ModelNet40.zip",),
)
# ShapeNet's, of all categories together; every category numbers its own from 1.
PARTS = 50


@functools.lru_cache(maxsize=1)
def load(name: str, folder: Path, points: int, limit: int | None = None, category: str | None = None) -> Clouds:
    """A set of clouds by name; ``category`` keeps one of ShapeNet's categories, and counts the parts of that one.

    Raises:
        BadInput: if its files cannot be had or read.
    """
    if name == "surfaces":
        return surfaces(points, *(min(count, limit or count) for count in (1300, 260)))
    train, test, classes, parts = LOADERS[name](folder, points, category)
    train, test = ((clouds[:limit], labels[:limit], pieces[:limit]) for clouds, labels, pieces in (train, test))
    return Clouds(train, test, classes, parts)


def shapenet(folder: Path, points: int, category: str | None) -> Clouds:
    """ShapeNet's part annotations: text files of points and of labels, categories by number, and lists of the split."""
    path = obtain(SHAPENET, folder)

    def make() -> Clouds:
        with reading_zip(path) as archive:
            # The archive may have its files in a folder of its name or not.
            (top, *_) = (PurePosixPath(n).parent for n in archive.namelist() if n.endswith("synsetoffset2category.txt"))
            categories = dict(
                line.split() for line in archive.read(f"{top}/synsetoffset2category.txt").decode().splitlines()
            )
            if category is not None and category not in categories:
                raise BadInput(f"--category {category} is none of ShapeNet's: {', '.join(sorted(categories))}")
            numbers = sorted(number for name, number in categories.items() if category in (None, name))
            generator = numpy.random.default_rng(0)

            def part(name: str) -> Labelled:
                clouds, classes, parts = [], [], []
                for entry in json.loads(archive.read(f"{top}/train_test_split/shuffled_{name}_file_list.json")):
                    number, shape = str(entry).split("/")[-2:]
                    if number not in numbers:
                        continue
                    xyz = _numbers(archive.read(f"{top}/{number}/points/{shape}.pts")).reshape(-1, 3)
                    labels = _numbers(archive.read(f"{top}/{number}/points_label/{shape}.seg"))
                    if len(xyz) != len(labels):
                        raise ValueError(f"{number}/{shape} has {len(xyz)} points but {len(labels)} labels")
                    if not numpy.isfinite(xyz).all():
                        raise ValueError(f"{number}/{shape} has coordinates that are not finite")
                    if not numpy.isin(labels, numpy.arange(1, PARTS + 1)).all():
                        raise ValueError(f"{number}/{shape} has labels other than 1 to {PARTS}")
                    rows = generator.integers(len(xyz), size=points)
                    clouds.append(torch.from_numpy(xyz[rows].T))
                    classes.append(numbers.index(number))
                    parts.append(torch.from_numpy(labels[rows].astype("int64") - 1))
                if not clouds:
                    raise ValueError(f"its list for {name} has no shape of {category or 'any category'}")
                return unit_ball(torch.stack(clouds).float()), torch.tensor(classes), torch.stack(parts)

            train, test = part("train"), part("test")
            return Clouds(train, test, len(numbers), 1 + int(max(train[2].max(), test[2].max())))

    return Clouds(*cached(folder / f"shapenet-{category or 'all'}-{points}.pt", lambda: tuple(make())))


def modelnet40(folder: Path, points: int, category: str | None) -> Clouds:
    """ModelNet40's meshes, points spread over their triangles; a cloud has one part."""
    path = obtain(MODELNET40, folder)

    def make() -> Clouds:
        with reading_zip(path) as archive:
            meshes = [n for n in archive.namelist() if n.startswith("ModelNet40/") and n.endswith(".off")]
            classes = sorted({name.split("/")[1] for name in meshes})
            generator = numpy.random.default_rng(0)

            def part(which: str) -> Labelled:
                names = [name for name in meshes if name.split("/")[2] == which]
                if not names:
                    raise ValueError(f"it has no meshes for {which}")
                clouds = [_spread(archive.read(name), name, points, generator) for name in names]
                labels = torch.tensor([classes.index(name.split("/")[1]) for name in names])
                return unit_ball(torch.stack(clouds)), labels, torch.zeros(len(names), points, dtype=torch.int64)

            return Clouds(part("train"), part("test"), len(classes), 1)

    return Clouds(*cached(folder / f"modelnet40-{points}.pt", lambda: tuple(make())))


def _numbers(content: bytes) -> numpy.ndarray:
    return numpy.array(content.split(), dtype="float64")


def _spread(content: bytes, name: str, points: int, generator: numpy.random.Generator) -> Tensor:
    """Points on the triangles of a mesh in the Object File Format, by area: ``[3, points]``."""
    # Some of the files lack the end of line after the first word.
    head, words = content[:3], content[3:].split()
    if head != b"OFF":
        raise ValueError(f"{name} does not begin with OFF")
    corners, sides = int(words[0]), int(words[1])
    vertices = numpy.array(words[3 : 3 + 3 * corners], dtype="float64").reshape(corners, 3)
    faces = numpy.array(words[3 + 3 * corners : 3 + 3 * corners + 4 * sides], dtype="int64").reshape(sides, 4)
    if (faces[:, 0] != 3).any():
        raise ValueError(f"{name} has faces that are no triangles")
    a, b, c = (vertices[faces[:, corner]] for corner in (1, 2, 3))
    areas = numpy.linalg.norm(numpy.cross(b - a, c - a), axis=1)
    chosen = generator.choice(sides, size=points, p=areas / areas.sum())
    u, v = generator.random((2, points, 1))
    # Uniform in a triangle: Osada et al., "Shape distributions", ACM Transactions on Graphics 21(4), 2002.
    u = numpy.sqrt(u)
    cloud = (1 - u) * a[chosen] + u * (1 - v) * b[chosen] + u * v * c[chosen]
    return torch.from_numpy(cloud.T).float()


LOADERS: dict[str, Callable[[Path, int, str | None], Clouds]] = {
    "shapenet": shapenet,
    "modelnet40": modelnet40,
}
