"""Small files in the forms of HAR's, LEAF's, Digit-Five's and Office-Caltech10's authors."""

import json
import zipfile

import numpy as np
from PIL import Image
from scipy.io import savemat

from polyfed_papers import natural


def har(root, people=((1, 1, 3), (2, 2)), labels=((1, 6, 2), (3, 4))):
    """The folder with a part of three lines and one of two; the k-th line of all is full of k / 10."""
    k = 0
    for split, who, what in zip(("train", "test"), people, labels, strict=True):
        folder = root / "UCI HAR Dataset" / split
        folder.mkdir(parents=True, exist_ok=True)
        rows = np.arange(k, k + len(who))[:, None] / 10 + np.zeros(561)
        np.savetxt(folder / f"X_{split}.txt", rows, fmt="%16.7e")
        np.savetxt(folder / f"y_{split}.txt", what, fmt="%d")
        np.savetxt(folder / f"subject_{split}.txt", who, fmt="%d")
        k += len(who)
    return root / "UCI HAR Dataset"


def zipped(folder, path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for f in sorted(folder.rglob("*.txt")):
            z.write(f, f.relative_to(folder.parent))


def leaf(path, users):
    """A file as LEAF writes it; users: {user: (x, y)}"""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(table))
    return path


def written(*labels):
    """Pictures of one grey each, label / 100."""
    return [[label / 100] * 784 for label in labels], list(labels)


def five(root, count=4):
    """The .mat files of Digit-Five: image k is black at the left, 60 k plus its source's number at the right."""
    names = ("mnist", "mnistm", "svhn", "usps", "syn")
    images = {}
    for i, name in enumerate(names):
        side = 32 if name in ("svhn", "syn") else 28
        images[name] = np.zeros((count, side, side, 1 if name in ("mnist", "usps") else 3), np.uint8)
        images[name][:, :, side // 2 :] = (60 * np.arange(count) + i)[:, None, None, None]
    labels, hot = np.arange(count)[:, None], np.eye(10)[np.arange(count)]
    root.mkdir(parents=True, exist_ok=True)
    marked = {"label_train": hot, "label_test": hot[:2]}
    grey = {"train_28": images["mnist"], "test_28": images["mnist"][:2], "train_32": 1}
    savemat(root / "mnist_data.mat", grey | marked)
    savemat(root / "mnistm_with_label.mat", {"train": images["mnistm"], "test": images["mnistm"][:2]} | marked)
    for split, n in (("train", count), ("test", 2)):
        tens = np.where(labels == 0, 10, labels)[:n]
        savemat(root / f"svhn_{split}_32x32.mat", {"X": images["svhn"][:n].transpose(1, 2, 3, 0), "y": tens})
    cells, shares = np.empty((2, 2), dtype=object), images["usps"].transpose(0, 3, 1, 2) / 255
    cells[0, 0], cells[0, 1], cells[1, 0], cells[1, 1] = shares, labels, shares[:2], labels[:2]
    savemat(root / "usps_28x28.mat", {"dataset": cells})
    syn = {"train_data": images["syn"], "test_data": images["syn"][:2]}
    savemat(root / "syn_number.mat", syn | {"train_label": labels, "test_label": labels[:2]})
    return root


KINDS = tuple(f"kind-{k}" for k in range(10))


def office(root, inside=""):
    """A picture of each class in every source, two of the first; its red is the class, its blue the source."""
    for s, source in enumerate(natural.OFFICE):
        for k, kind in enumerate(KINDS):
            folder = root / source / inside / kind
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(1 + (k == 0)):
                Image.new("RGB", (9 + i, 7), (20 * k, 0, 50 * s)).save(folder / f"frame_{i}.png")
    return root


def speeches(root, speakers, repeated=200):
    root.mkdir(exist_ok=True)
    said = [f"{who}:\n{k % 10} Speak, speak. resolved.\n" for k in range(repeated) for who in speakers]
    (root / "input.txt").write_text("\n".join([*said, "Mute:\nNo.\n"]))
