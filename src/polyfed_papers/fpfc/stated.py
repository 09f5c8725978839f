"""What the pages of FPFC's experiments say of data, models and work, and whose it is."""

from collections.abc import Sequence

from polyfed_papers.recipes.recipe import Size
from polyfed_papers.recipes.said import Setting, without

SYNTHETIC = (
    Setting("features", "uniform on [0, 1), 60 of them (the text says normal; the tables fit uniform)", "code"),
    Setting("start", "W, b ~ N(0, 1), the same for all devices", "code"),
    Setting("participation", "30 % of the devices, drawn without replacement (the text: 30 to 50 %)", "code"),
    Setting("local work", "10 full-batch gradient steps, lr 0.1", "paper"),
    Setting("rho, a, xi", "1, 3.7, 1e-4", "paper"),
    Setting("nu", "0.1 (the text: from xi to 0.5)", "code"),
    Setting("training data",
            "64 % of a device's samples, 16 % for validation, 20 % for the test (the code: 80, 0 and 20)", "paper"),
    Setting("metric", "mean over devices of test accuracy, last round; a cluster deploys its mean model", "paper"),
)  # fmt: skip
GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of lambda from a common start; the paper's 0.6

HBF = (
    Setting("devices", "6 with Boston Housing, 2 with Body fat", "paper"),
    Setting("participation", "4 of the 8 a round (the text: 30 to 50 %; follows from the printed cost)", "ours"),
    Setting("inputs", "each data set to [-1, 1] by its training rows; the paper does not say", "ours"),
    Setting("model", "linear with intercept, mean squared error, from zero", "ours"),
    Setting("work", "20 full-batch gradient steps, lr 0.01", "paper"),
    Setting("rounds", "100 (follows from the printed cost of 12120)", "ours"),
    Setting("rho, a, xi", "1, 3.7, 1e-4", "paper"),
    Setting("lambda", "4", "paper"),
    Setting("nu", "4 (from [xi, 0.5], as in the text, no clusters are found)", "ours"),
)
HBF_BESIDE = tuple(Setting(f"H&BF, {s.key}", s.value, s.source) for s in HBF)  # where other data sets have their own
HBF_GRID = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)  # of lambda
HBF_CAVEAT = (
    "Boston Housing has an ethical problem: one of its inputs was made on the assumption that racial self-segregation "
    "raises house prices. It is used here only because the paper reports it. BodyFat is computed from Density, one of "
    "its inputs."
)

IMAGES = (
    Setting("devices, images", "20, Dirichlet(1.0) per class, training and test sets dealt out independently", "code"),
    Setting("clusters", "4 of 5 devices, each with another two labels exchanged: 0/8, 1/7, 2/6, 3/5", "code"),
    Setting("layers", "all but the last are shared by all devices, the last is fused (the text: three shared)", "code"),
    Setting("shared layers", "mean over the round's participants, weighted by samples", "ours"),
    Setting("participation, images", "half of the devices (the text: 30 to 50 %)", "code"),
    Setting("step size", "x 0.9 every 5 rounds", "paper"),
    Setting("step size of the rivals", "falls as FPFC's (released: IFCA's alone does)", "ours"),
)
FEWER = {"small": (2000, 5000), "middle": (6000, 10_000)}  # images of the training and of the test set
HIDDEN = 50  # units of the small size's perceptron
IMAGE_ROUNDS = (30, 200, 100)  # small, paper, middle
LENET = "two convolutions of 6 and 16 channels and one linear layer, 2572 + 4010 numbers"


def image_settings(scale: Size, but: Sequence[str] = ()) -> tuple[Setting, ...]:
    """Data, model, rounds and local work on images; a recipe has its own of the keys in `but`."""
    small, middle, paper = IMAGE_ROUNDS[0], IMAGE_ROUNDS[2], IMAGE_ROUNDS[1]
    if scale == "paper":
        own = (
            Setting("model", LENET, "code"),
            Setting("rounds, images", str(paper), "code"),
            Setting("epochs", "10", "paper"),
            Setting("batches, lr", "of 100, 0.01", "paper"),
            Setting("lambda, images", "0.4 (the code's README; 0.1 in Table 2)", "code"),
        )
    elif scale == "middle":
        own = (
            Setting("model", LENET, "code"),
            Setting("images", "{} for training, {} for the test".format(*FEWER[scale]), "ours"),
            Setting("rounds, images", str(middle), "ours"),
            Setting("epochs", "5", "ours"),
            Setting("batches, lr", "of 25, 0.1", "ours"),
            Setting("lambda, images", "0.4", "code"),
        )
    else:
        own = (
            Setting("model", f"perceptron 196-{HIDDEN}-10, {197 * HIDDEN} + {10 * HIDDEN + 10} numbers", "ours"),
            Setting("images", "{} for training, {} for the test, at 14x14 pixels".format(*FEWER[scale]), "ours"),
            Setting("rounds, images", str(small), "ours"),
            Setting("epochs", "5", "ours"),
            Setting("batches, lr", "of 10, 0.2", "ours"),
            Setting("lambda, images", "0.4", "code"),
        )
    return without((*IMAGES, *own), *but)


def sizes(scale: Size, name: str = "s1") -> Setting:
    """The devices' samples."""
    small = {"s1": 20, "s2": 20, "s3": 16, "s4": 12, "s5": 12}
    if scale != "paper":
        return Setting("devices", f"{small[name]} ({name.upper()}), at most 1500 samples each", "ours")
    full = 50 if name in ("s4", "s5") else 100
    return Setting("devices", f"{full} ({name.upper()}), 250 to about 25 000 samples each", "paper")


def rounds_of(scale: Size, small: int, paper: int) -> Setting:
    """Number of rounds and its source."""
    return Setting("rounds", str(paper), "code") if scale == "paper" else Setting("rounds", str(small), "ours")
