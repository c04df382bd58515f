"""Synthetic data in the files that public training programs read."""

from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

IMAGES = 2048
SIDE = 28
CLASSES = 10
WORDS = 2000

CORA = '''"""Stand-in for the package ``requests``: every download is the archive next to this file."""

import contextlib
from pathlib import Path


class _Answer:
    def __init__(self, raw):
        self.raw = raw


@contextlib.contextmanager
def get(url, stream=True):
    with Path(__file__).with_name("cora.tgz").open("rb") as raw:
        yield _Answer(raw)
'''


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``[count, 28, 28]`` of ten noisy patterns, and their classes."""
    patterns = np.random.default_rng(7).random((CLASSES, SIDE // 4, SIDE // 4)) > 0.6
    patterns = patterns.repeat(4, axis=1).repeat(4, axis=2) * 200.0
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count)
    images = patterns[labels] + random.normal(0, 40, (count, SIDE, SIDE))
    return images.clip(0, 255).astype(np.uint8), labels.astype(np.uint8)


def mnist(folder: Path) -> None:
    """Write a small MNIST in idx files below ``folder/MNIST/raw``."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", IMAGES), ("t10k", 256)):
        images, labels = digits(count, seed=len(part))
        head = np.array([0x803, count, SIDE, SIDE], ">i4").tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(
            np.array([0x801, count], ">i4").tobytes() + labels.tobytes()
        )


def cifar10(folder: Path) -> None:
    """Write a small CIFAR-10 in the batches of its archive."""
    base = folder / "cifar-10-batches-py"
    base.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(3)
    patterns = random.integers(0, 200, (CLASSES, 3, 4, 4)).repeat(8, axis=2).repeat(8, axis=3)
    for name in (*(f"data_batch_{part}" for part in range(1, 6)), "test_batch"):
        labels = random.integers(0, CLASSES, 200)
        images = (patterns[labels] + random.normal(0, 30, (200, 3, 32, 32))).clip(0, 255).astype(np.uint8)
        entry = {"data": images.reshape(200, -1), "labels": labels.tolist()}
        (base / name).write_bytes(pickle.dumps(entry))
    classes = {"label_names": [f"class{label}" for label in range(CLASSES)]}
    (base / "batches.meta").write_bytes(pickle.dumps(classes))


def citations(folder: Path) -> None:
    """Write a citation graph in the two files of Cora."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in _cora().items():
        (folder / name).write_text(text)


def cora(folder: Path) -> None:
    """Write a citation graph with the format of Cora, and a stand-in for its download."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "cora.tgz", "w:gz") as archive:
        for name, text in _cora().items():
            entry = tarfile.TarInfo(f"cora/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    (folder / "requests.py").write_text(CORA)


def _cora() -> dict[str, str]:
    random = np.random.default_rng(0)
    nodes, features, classes = 2708, 200, 7
    labels = random.integers(0, classes, nodes)
    words = random.random((nodes, features)) < 0.02 + 0.1 * (np.arange(features) % classes == labels[:, None])
    content = "\n".join(
        f"{node} {' '.join(map(str, words[node].astype(int)))} class{labels[node]}" for node in range(nodes)
    )
    ends = [(a, b) for a, b in random.integers(0, nodes, (40_000, 2)) if labels[a] == labels[b] and a != b]
    return {"cora.content": content, "cora.cites": "\n".join(f"{a} {b}" for a, b in ends)}


def _words(count: int) -> list[str]:
    random = np.random.default_rng(1)
    vocabulary = ["".join(chr(97 + c) for c in random.integers(0, 26, 2 + rank % 7)) for rank in range(300)]
    ranks = np.minimum(random.zipf(1.3, count) - 1, len(vocabulary) - 1)
    return [vocabulary[rank] for rank in ranks]


def text(folder: Path) -> None:
    """Write a text of words with a power-law frequency: ``train.txt``, ``valid.txt``, ``test.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("train", 400), ("valid", 60), ("test", 60), ("input", 1500)):
        words = _words(lines * 12)
        rows = [" ".join(words[12 * i : 12 * i + 12]) for i in range(lines)]
        (folder / f"{name}.txt").write_text("\n".join(rows) + "\n")


def wikitext(folder: Path) -> None:
    """Write a text in place of WikiText-2: ``wikitext-2.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    words = _words(300_000)
    lines = [" ".join(words[i : i + 100]) for i in range(0, len(words), 100)]
    (folder / "wikitext-2.txt").write_text("\n".join(lines) + "\n")


def characters(folder: Path) -> None:
    """Write tokens of characters as nanoGPT reads them: ``train.bin``, ``val.bin``."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.frombuffer(" ".join(_words(40_000)).encode(), np.uint8).astype(np.uint16)
    for name, part in (("train", tokens[:-20_000]), ("val", tokens[-20_000:])):
        part.tofile(folder / f"{name}.bin")


def photographs(folder: Path) -> None:
    """Write smooth colour images: BSDS300 for super-resolution, folders of classes for classifiers."""
    random = np.random.default_rng(2)
    places = (
        "BSDS300/images/train",
        "BSDS300/images/test",
        "train/a",
        "train/b",
        "validation/a",
        "validation/b",
    )
    for place, count in zip(places, (64, 16, 48, 48, 16, 16), strict=True):
        (folder / place).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            small = random.integers(0, 255, (6, 6, 3), dtype=np.uint8)
            small[..., 0] //= 1 + place.endswith("b")
            Image.fromarray(small).resize((300, 300)).save(folder / place / f"{index}.jpg")


def cats_and_dogs(folder: Path) -> None:
    """Write an archive of two classes of photographs, as it is downloaded."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(4)
    with zipfile.ZipFile(folder / "cats_and_dogs_filtered.zip", "w") as archive:
        for part, count in (("train", 48), ("validation", 16)):
            for name in ("cats", "dogs"):
                for index in range(count):
                    small = random.integers(0, 255, (6, 6, 3), dtype=np.uint8)
                    small[..., 0] //= 1 + (name == "dogs")
                    file = io.BytesIO()
                    Image.fromarray(small).resize((64, 64)).save(file, "jpeg")
                    place = f"cats_and_dogs_filtered/{part}/{name}/{index}.jpg"
                    archive.writestr(place, file.getvalue())


def names(folder: Path) -> None:
    """Write lists of names of two languages, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    words = _words(WORDS)
    for language, ending in (("First", "ov"), ("Second", "ini")):
        (folder / f"{language}.txt").write_text("\n".join(f"{word}{ending}" for word in words) + "\n")


GENERATORS: dict[str, Callable[[Path], None]] = {
    function.__name__: function
    for function in (
        mnist, cifar10, citations, cora, text, wikitext, characters, photographs, cats_and_dogs, names,
    )
}  # fmt: skip
"""Generators by name; each writes below a folder."""
