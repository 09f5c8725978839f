"""The methods by idea: when each idea helps and when not. The pages of methods and "How to choose" are made from this
table, the board's tables and what the code says of itself; tests/docs/test_site.py holds every method to one idea."""

from typing import NamedTuple


class Idea(NamedTuple):
    """A kind of method, in the words of someone who has sites and a question."""

    title: str
    when: str
    not_when: str
    methods: tuple[str, ...]


IDEAS = (
    Idea(
        "Alone",
        "you need to know what federating has to beat, or a site has samples enough",
        "sites are small and alike, so that what others know would help",
        ("local",),
    ),
    Idea(
        "One model, adapted at each site",
        "sites ask the same question in places that differ: other rates of the outcome, other devices. Try this first",
        "a site has too few samples to adapt anything, or its labels mean something else",
        ("fedavg-ft", "recalibrated", "per-fedavg", "knn-per", "fedbn"),
    ),
    Idea(
        "One model for all",
        "sites are alike, or one model has to be approved and shipped",
        "sites differ in what an input means for the outcome: it is then worse than own models",
        ("fedavg", "q-fedavg", "gpgd"),
    ),
    Idea(
        "One model, against drift",
        "one model is wanted, and many local steps a round on unlike sites slow FedAvg down",
        "rounds are cheap, or what sites need are models of their own: the optimum that they reach sooner is still one",
        ("fedprox", "scaffold", "feddyn", "fednova", "fedcet", "fedlin", "fedtrack", "moon", "fedntd", "fedlc"),
    ),
    Idea(
        "One model, at the exact optimum",
        "the loss is strongly convex, batches are full and sites unlike: the optimum in few exchanges of one vector",
        "batches are small, whose noise decides, or the model is a deep network, for which nothing is proven",
        ("scaffnew", "gradskip", "led", "compressedscaffnew", "tamuna", "locodl", "scafflix"),
    ),
    Idea(
        "One model, another step at the server",
        "one model is wanted, and the rounds are few or the gradients of unlike sizes",
        "there is no room to tune one more step size",
        ("fedavgm", "fedadam", "fedadagrad", "fedyogi", "fedexp"),
    ),
    Idea(
        "Sites that answer late",
        "sites are slow or away for days, and nobody can wait for all (asynchronous schedules)",
        "all sites answer within a round",
        ("fedasync", "fedbuff"),
    ),
    Idea(
        "Some layers in common",
        "inputs are alike and labels are spread unlike: a common body, a head for each site",
        "the model is one layer, or inputs differ in kind, which a common body cannot serve",
        ("fedper", "fedrep", "fedbabu", "fedrod", "fedas", "fedpac", "fedgh", "lg-fedavg", "feddbe"),
    ),
    Idea(
        "A model for each site, held to a common one",
        "every site differs a little from all others, without groups",
        "there are groups, which a common centre blurs, or a site may not keep a state between rounds",
        ("ditto", "pfedme", "apfl", "fedala", "fedslr", "lpgd", "fedspa", "pfedhn"),
    ),
    Idea(
        "A model for each site, mixed from others'",
        "some sites are alike, and which ones is not known",
        "the server may see no site's own model, or there are hundreds of sites",
        ("fedacs", "fedamp", "heurfedamp", "fedfomo", "apple", "pfedgraph"),
    ),
    Idea(
        "Groups of sites",
        "sites come in groups, such as devices, regions or codings, and a group has samples enough for its model",
        "sites differ gradually, or groups would be of one",
        ("cfl", "fpfc", "ifca", "hypcluster", "fesem", "flexcfl", "pacfl", "stocfl", "fedsoft", "clove", "sr-fca"),
    ),
    Idea(
        "Mixtures of tasks",
        "every site has samples of several tasks, in shares of its own",
        "sites have one task each: the same gradients are then spread over several models",
        ("fedem", "fedrc"),
    ),
    Idea(
        "Class means in place of models",
        "sites have models of unlike shape, or a model is too large to send",
        "sites have one architecture: what class means carry is less than what a model does",
        ("fedproto", "fedtgp"),
    ),
    Idea(
        "Adapters of large models",
        "a pretrained model is to be fitted by two small factors a layer",
        "the model can be trained whole",
        ("feddpa", "fedex-lora", "fedrpca", "fedsa-lora", "ffa-lora", "flexlora", "flora", "hetlora", "rolora"),
    ),
)
OF = {method: idea for idea in IDEAS for method in idea.methods}
MODELS = {  # methods that need a model of their own
    "fedem": "pf.models.build('mixture', sites.input_shape, 2)",
    "fedrc": "pf.models.build('mixture', sites.input_shape, 2, by_class=True)",
    "knn-per": "pf.models.build('memory', sites.input_shape, 2)",
    "fedbn": "nn.Sequential(nn.Linear(sites.input_shape[0], 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))",
}
NET = "nn.Sequential(nn.Linear(sites.input_shape[0], 8), nn.ReLU(), nn.Linear(8, 2))"
