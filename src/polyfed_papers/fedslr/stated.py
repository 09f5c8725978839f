"""What the pages of FedSLR's experiments say of data, models and work, and whose it is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyfed_papers.recipes.recipe import Size
from polyfed_papers.recipes.said import Setting, without

DATA = {"CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "Tiny ImageNet": "tiny-imagenet"}
SMALL = "Fashion-MNIST"
CLIENTS, SAMPLES = 20, {"small": 150, "middle": 500}  # at small and middle size
GKR, MIXED = "FedSLR, GKR", "FedSLR, mixed"  # two rows of one run
LABELS = {GKR: "FedSLR", MIXED: "FedSLR", "FedRep, released": "FedPer"}  # the runs that the rows are from
# One run: 1000 rounds x 10 clients x 75 steps of 20 images. ResNet-18 takes 0.56e9 multiply-adds forward per image of
# 32 x 32, three times that with the backward pass: 2 x 3 x 0.56e9 x 20 x 750 000 = 5.0e16 operations, 1.4 hours at
# 1e13 a second, which small batches reach on a large GPU; about as much again for the decompositions, 21 layers a
# round, and the tests.
PAPER_MINUTES = 170  # of one run of FedSLR, estimated
RUNS: dict[str, Any] = {  # of a recipe; seed 0 was looked at when the ranges of lambda, mu and eta_g were chosen
    "machine": "one large GPU", "data": ("fashion_mnist",), "seeds": (1, 2, 3, 4, 5)
}  # fmt: skip
NOTES = (
    "the paper gives no seeds and no deviations over them, and does not say which round it reports; here it is the "
    "last",
    "Paper scale reads the complete CIFAR-10 and CIFAR-100 (`polyfed data fetch`) and, for Table 1, the folder "
    "tiny-imagenet-200; subsets are refused. One run is 750 000 SGD steps of batch 20 on ResNet-18, 5e16 operations",
)
OTHER_DATA = "the paper's figures are of ResNet-18 on CIFAR: at small size only the order can be compared"


def several(count: float) -> float:
    """Minutes of so many runs under each seed at paper scale."""
    return 5.0 * count * PAPER_MINUTES


def of_size(scale: Size) -> tuple[Setting, ...]:
    """Data, clients, model and rounds of a size."""
    if scale == "small":
        return (
            Setting("data", f"Fashion-MNIST, {CLIENTS * SAMPLES['small']} images drawn by the seed", "ours"),
            Setting("clients", f"{CLIENTS} with {SAMPLES['small']} images, 5 a round, drawn without replacement",
                    "ours"),
            Setting("model", "mlp 784-100-50-10, 84 060 numbers", "ours"),
            Setting("rounds", "40", "ours"),
            Setting("lambda", "2e-3, 20 times the paper's, so that ranks fall in so few rounds", "ours"),
        )  # fmt: skip
    if scale == "middle":
        return (
            Setting("data", f"CIFAR-100, {CLIENTS * SAMPLES['middle']} images drawn by the seed", "ours"),
            Setting("clients", f"{CLIENTS} with {SAMPLES['middle']} images, 5 a round, drawn without replacement",
                    "ours"),
            Setting("model", "cnn of McMahan et al., 5 x 5 convolutions of 32 and 64 channels and 512 units", "ours"),
            Setting("augmentation", "mirror, and crop (pad 4), each with probability 1/2", "code"),
            Setting("rounds", "400", "ours"),
            Setting("lambda", "2.5e-4, as much more than the paper's as there are fewer rounds", "ours"),
        )  # fmt: skip
    if scale == "heads":
        return (
            Setting("data", "CIFAR-100 (the subset of 10,000) as a frozen EfficientNet-Lite0 sees it at 64 x 64, 1280 "
                    "features, standardised over all training images", "ours"),
            Setting("clients", "100 with 100 images, 10 a round", "ours"),
            Setting("model", "one linear layer, 128 100 numbers", "ours"),
            Setting("rounds", "200", "ours"),
            Setting("lambda", "1e-2, in the middle of Table 3's", "ours"),
        )  # fmt: skip
    return (
        Setting("clients", "100 with 500 images (Tiny ImageNet: 1000), 10 a round", "paper"),
        Setting("participants", "10 exactly; the released code draws every client with probability 0.1", "paper"),
        Setting("model", "ResNet-18, GroupNorm with 2 groups", "code"),
        Setting("augmentation", "mirror, and crop (pad 4; Tiny 8), each with probability 1/2", "code"),
        Setting("rounds", "1000", "paper"),
        Setting("lambda", "1e-4", "paper"),
    )


def common_settings(scale: Size) -> tuple[Setting, ...]:
    """Settings of all experiments."""
    return (
        *of_size(scale),
        Setting("non-IID", "every client its own class prior from Dirichlet(0.1)", "paper"),
        Setting("a class that is used up", "is redrawn, so that no image is in two clients (released: starts again)",
                "ours"),
        Setting("test", "100 test images per client in its class ratio; mean over all clients", "paper"),
        Setting("test, rounding", "largest remainder, exactly 100 (released: rounded down, 59 to 98)", "ours"),
        Setting("local work", "2 epochs of batches of 20, lr 0.1 x 0.998^t, weight decay 1e-3", "paper"),
        Setting("mu, eta_g, personal epochs", "1e-3, 10, 1", "paper"),
        Setting("personal part, start", "zero; the paper does not say (released: the initial weights)", "ours"),
        Setting("personal part, weight decay", "none (released: 1e-3)", "paper"),
    )  # fmt: skip


def settings(*own: Setting | Mapping[Size, Setting], but: Sequence[str] = ()) -> Callable[[Size], Sequence[Setting]]:
    """Settings of a recipe: its own first, one for all sizes or one of each; those in `but` vary."""

    def of(scale: Size) -> Sequence[Setting]:
        mine = (s if isinstance(s, Setting) else s[scale] for s in own)
        return (*mine, *without(common_settings(scale), *but))

    return of
