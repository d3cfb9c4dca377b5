"""The data of the examples: original formats, read from small archives made here, and what is embedded or generated."""

import gzip
import hashlib
import io
import itertools
import json
import tarfile
import zipfile

import numpy
import PIL.Image
import pytest
import torch
from examples.common.data import images, shapes, text
from examples.common.errors import BadInput

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def nothing_remembered():
    for module in (images, text, shapes):
        module.load.cache_clear()


def place(monkeypatch, module, name, path):
    """Have a source expect the file that was made here."""
    digest = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    if isinstance(name, tuple):
        table, key = name
        monkeypatch.setitem(getattr(module, table), key, getattr(module, table)[key]._replace(digest=digest))
    else:
        monkeypatch.setattr(module, name, getattr(module, name)._replace(digest=digest))


def write_zip(path, content):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def test_without_a_published_checksum_nothing_is_downloaded(tmp_path):
    with pytest.raises(BadInput, match=r"there is no .*shapenetcore.*\.zip; get it from https://.* and put it there"):
        shapes.load("shapenet", tmp_path, 8)


# Images


def cifar_rows(count, seed):
    generator = numpy.random.default_rng(seed)
    rows = generator.integers(0, 256, (count, 3073), dtype="uint8")
    rows[:, 0] %= 10
    return rows


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """CIFAR-10's archive with 4 images a file."""
    rows = {f"data_batch_{i}.bin": cifar_rows(4, i) for i in range(1, 6)} | {"test_batch.bin": cifar_rows(3, 9)}
    path = tmp_path / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in ({name: row.tobytes() for name, row in rows.items()} | {"readme.html": b"text"}).items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    place(monkeypatch, images, "CIFAR10", path)
    return rows


def test_cifar10(cifar, tmp_path):
    rows = cifar
    data = images.load("cifar10", tmp_path, 32)
    train = numpy.concatenate([rows[f"data_batch_{i}.bin"] for i in range(1, 6)])
    assert data.classes == 10 and data.train[1].tolist() == train[:, 0].tolist()
    assert numpy.array_equal(data.train[0].numpy().reshape(20, -1), train[:, 1:])
    assert numpy.array_equal(data.test[0].numpy().reshape(3, -1), rows["test_batch.bin"][:, 1:])
    assert data.train[0].dtype == torch.uint8 and data.train[1].dtype == torch.int64


@pytest.mark.parametrize("spoil", [lambda data: data[: len(data) // 2], lambda data: b"no archive"])
def test_damaged_archives(cifar, tmp_path, monkeypatch, spoil):
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(BadInput, match=r"has sha256:\w+ instead of sha256:\w+"):
        images.load("cifar10", tmp_path, 32)
    place(monkeypatch, images, "CIFAR10", path)
    with pytest.raises(BadInput, match="damaged, or not in its original format") as error:
        images.load("cifar10", tmp_path, 32)
    assert "\n" not in str(error.value)


@pytest.fixture
def mnist(tmp_path, monkeypatch):
    generator = numpy.random.default_rng(0)
    made = {}
    for name, count in (("train", 5), ("t10k", 3)):
        made[name] = (
            generator.integers(0, 256, (count, 28, 28), dtype="uint8"),
            generator.integers(0, 10, count, "uint8"),
        )
        for kind, array in zip(("images-idx3", "labels-idx1"), made[name], strict=True):
            head = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
            path = tmp_path / f"{name}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(head + array.tobytes()))
            place(monkeypatch, images, ("MNIST", f"{name}-{kind}-ubyte"), path)
    return made


def test_mnist(mnist, tmp_path):
    data = images.load("mnist", tmp_path, 28)
    for part, (pixels, labels) in zip((data.train, data.test), mnist.values(), strict=True):
        assert all(numpy.array_equal(part[0][:, channel].numpy(), pixels) for channel in range(3))
        assert part[1].tolist() == labels.tolist()


@pytest.fixture
def imagenet(tmp_path):
    """Two classes of images of one colour each, of several sizes."""
    colours = {"n01": (250, 0, 0), "n02": (0, 0, 250)}
    for part, count in (("train", 3), ("val", 2)):
        for name, colour in colours.items():
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                image = PIL.Image.new("RGB", (40 + 10 * i, 30), colour)
                image.save(tmp_path / part / name / f"{i}.JPEG")
    PIL.Image.new("L", (20, 20), 128).save(tmp_path / "val" / "n01" / "grey.png")
    return tmp_path


def test_imagenet(imagenet, monkeypatch):
    data = images.load("imagenet", imagenet, 16)
    assert data.classes == 2 and data.train[0].shape == (6, 3, 16, 16)
    assert [part[1].tolist() for part in (data.train, data.test)] == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    red = data.train[0][:, 0].float().mean((1, 2))
    torch.testing.assert_close(red, torch.tensor([250.0] * 3 + [0.0] * 3), atol=4, rtol=0)
    assert data.test[0][2].float().mean() == 128
    assert images.load("imagenet", imagenet, 8, 4).test[1].tolist() == [0, 0, 1]
    # It is decoded once.
    images.load.cache_clear()
    monkeypatch.setattr(images, "_decode", None)
    again = images.load("imagenet", imagenet, 16)
    assert all(map(torch.equal, data.train + data.test, again.train + again.test))


def test_imagenet_damaged_and_empty(imagenet, tmp_path):
    (imagenet / "train" / "n02" / "1.JPEG").write_bytes(b"no image")
    (tmp_path / "bare" / "train" / "n01").mkdir(parents=True)
    for folder, message in (
        (imagenet, r"n02/1\.JPEG: damaged"),
        (tmp_path / "empty", "empty/train has no folders, one for each class"),
        (tmp_path / "bare", "bare/train has no images"),
    ):
        with pytest.raises(BadInput, match=message):
            images.load("imagenet", folder, 16)


def test_lsun(tmp_path):
    lmdb = pytest.importorskip("lmdb", reason="LSUN needs lmdb")
    for name, count in (("train", 3), ("val", 2)):
        with lmdb.open(str(tmp_path / f"bedroom_{name}_lmdb")) as base, base.begin(write=True) as transaction:
            for i in range(count):
                content = io.BytesIO()
                PIL.Image.new("RGB", (50, 40), (80 * i, 0, 0)).save(content, "webp", lossless=True)
                transaction.put(f"{i:040x}".encode(), content.getvalue())
    data = images.load("lsun", tmp_path, 16)
    assert data.train[0].shape == (3, 3, 16, 16) and data.test[0].shape == (2, 3, 16, 16) and data.classes == 1
    assert data.train[0][:, 0].float().mean((1, 2)).tolist() == [0.0, 80.0, 160.0]
    assert len(images.load("lsun", tmp_path, 8, 1).train[0]) == 1
    path = tmp_path / "bedroom_train_lmdb" / "data.mdb"
    path.write_bytes(path.read_bytes()[:8192])
    with pytest.raises(BadInput, match="bedroom_train_lmdb: damaged"):
        images.load("lsun", tmp_path, 32)


# Text


def test_wikitext2(tmp_path, monkeypatch):
    parts = {"train": " = Title = \n the <unk> cat \n \n the dog\n", "test": " the horse\n", "valid": "x"}
    write_zip(tmp_path / "wikitext-2-v1.zip", {f"wikitext-2/wiki.{part}.tokens": parts[part] for part in parts})
    place(monkeypatch, text, "WIKITEXT2", tmp_path / "wikitext-2-v1.zip")
    data = text.load("wikitext2", tmp_path, 2)
    # Title line, sentence, empty line, sentence; each with its end.
    words = ["=", "Title", "=", "<eos>", "the", "<unk>", "cat", "<eos>", "<eos>", "the", "dog", "<eos>"]
    number = {word: i for i, word in enumerate(dict.fromkeys(words))}
    expected = torch.tensor([number[word] for word in words])
    assert data.vocabulary == len(number) == 7
    assert torch.equal(data.train[0].flatten(), expected[:10]) and torch.equal(data.train[1].flatten(), expected[1:11])
    assert data.test[0].tolist() == [[number["the"], number["<unk>"]]] and data.test[1].tolist() == [[1 + 3, 2]]


# Clouds


@pytest.mark.parametrize("top", ["shapenetcore_partanno_segmentation_benchmark_v0", "."])
def test_shapenet(tmp_path, monkeypatch, top):
    content = {f"{top}/synsetoffset2category.txt": "Chair\t0002\nBag\t0001\n"}
    split = {"train": [("0001", "a"), ("0002", "b"), ("0002", "c")], "test": [("0002", "d")]}
    for part, entries in split.items():
        names = [f"shape_data/{number}/{shape}" for number, shape in entries]
        content[f"{top}/train_test_split/shuffled_{part}_file_list.json"] = json.dumps(names)
        for number, shape in entries:
            xyz = numpy.random.default_rng(ord(shape)).normal(size=(20, 3))
            labels = 1 + (xyz[:, 0] > 0) + (number == "0002") * (xyz[:, 1] > 0)
            content[f"{top}/{number}/points/{shape}.pts"] = "\n".join(" ".join(map(str, row)) for row in xyz)
            content[f"{top}/{number}/points_label/{shape}.seg"] = "\n".join(map(str, labels))
    write_zip(tmp_path / shapes.SHAPENET.file, content)
    place(monkeypatch, shapes, "SHAPENET", tmp_path / shapes.SHAPENET.file)
    data = shapes.load("shapenet", tmp_path, 50)
    clouds, classes, parts = data.train
    assert clouds.shape == (3, 3, 50) and classes.tolist() == [0, 1, 1] and data.classes == 2 and data.parts == 3
    torch.testing.assert_close(clouds.norm(dim=1).amax(-1), torch.ones(3))
    # Points that were drawn twice have the same part.
    for cloud, own in zip(clouds, parts, strict=True):
        same = (cloud[:, :, None] == cloud[:, None, :]).all(0)
        assert torch.equal(own[:, None].expand_as(same)[same], own[None].expand_as(same)[same])
    chairs = shapes.load("shapenet", tmp_path, 50, category="Chair")
    assert len(chairs.train[0]) == 2 and chairs.classes == 1 and int(chairs.train[2].max()) < chairs.parts


TRIANGLES = "OFF\n4 2 0\n0 0 0\n3 0 0\n3 1 0\n0 1 0\n3 0 1 2\n3 0 2 3\n"


def test_modelnet40(tmp_path, monkeypatch):
    kinds = itertools.product(("bed", "sofa"), ("train", "test"), (1, 2))
    names = [f"ModelNet40/{one}/{part}/{one}_{i}.off" for one, part, i in kinds]
    content = {name: TRIANGLES for name in names} | {"__MACOSX/ModelNet40/x.off": b"", "ModelNet40/.DS_Store": b""}
    # As in some of the original files.
    content[names[0]] = TRIANGLES.replace("OFF\n", "OFF")
    write_zip(tmp_path / "ModelNet40.zip", content)
    place(monkeypatch, shapes, "MODELNET40", tmp_path / "ModelNet40.zip")
    data = shapes.load("modelnet40", tmp_path, 4000)
    clouds, classes, parts = data.train
    assert classes.tolist() == [0, 0, 1, 1] and data.classes == 2 and data.parts == 1 and not parts.any()
    # A rectangle of 3 by 1, uniform: the variance of its coordinates is in proportion to 9 : 1.
    assert not clouds[:, 2].any()
    variance = clouds.var(-1)
    torch.testing.assert_close(variance[:, 0] / variance[:, 1], torch.full((4,), 9.0), rtol=0.1, atol=0)
    assert len(shapes.load("modelnet40", tmp_path, 4000, 3).train[0]) == 3
