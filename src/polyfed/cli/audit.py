"""polyfed audit: does a private run keep its promise against rows that were made to break it?"""

from polyfed.base.errors import ConfigError
from polyfed.cli.commands import Audit
from polyfed.cli.screen import stdout
from polyfed.runs.config import resolve
from polyfed.runs.ownership import config_of
from polyfed.studies.audit import audit as audited


def audit(o: Audit) -> int:
    """Print the bound beside the claim; exit status 1 where the claim is broken."""
    settings = resolve(config_of(o.run)).settings
    if settings.privacy is None:
        raise ConfigError(f"{o.run}: has no table [privacy], and nothing to audit")
    found = audited(settings.privacy, settings.rounds)
    stdout.print(
        f"{found.right} of the {found.guesses} canaries that were guessed with most certainty were guessed rightly\n"
        f"epsilon is at least {found.bound:.2f} (95 % confidence), its settings claim {found.claim:.2f}: "
        + ("the claim is wrong" if found.bound > found.claim else "nothing speaks against the claim")
        + f"\nall canaries are told from absent ones with an AUC of {found.auc:.3f}; the claim's noise allows about "
        f"{found.best:.3f}\n"
        f"the noise has {found.second:.3f} times the variance that the claim needs, and a fourth moment of "
        f"{found.fourth:.2f} (Gaussian: 3), over {found.moves:,} numbers: "
        + ("the noise is wrong" if found.short else "as claimed"),
        markup=False,
        highlight=False,
    )
    return 1 if found.broken else 0
