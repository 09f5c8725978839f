"""The verdicts of a study: each is worked out once, however many tables and figures ask, and goes with the study."""

import gc
import weakref

from report_folders import noisy, write_comparison

from polyfed import report
from polyfed.report import verdicts
from polyfed.runs.numbers import Numbers

METHODS = {
    "local": noisy([0.7, 0.8, 0.6], 3, 0.01, 0),
    "fedavg": noisy([0.75, 0.8, 0.65], 3, 0.01, 1),
    "ditto": noisy([0.78, 0.82, 0.7], 3, 0.01, 2),
}


def test_every_run_is_read_once_whichever_study_is_asked(tmp_path, monkeypatch):
    """Tables of several data sets go from one study to the other and back; three pairs of methods, three clients."""
    read, judged, values, evidence = [], [], Numbers.values, verdicts.evidence
    monkeypatch.setattr(Numbers, "values", lambda run, *given: read.append(run.folder) or values(run, *given))
    monkeypatch.setattr(verdicts, "evidence", lambda *given: judged.append(given) or evidence(*given))
    studies = [report.read(write_comparison(tmp_path / name, METHODS)) for name in "ab"]
    for _ in range(3):
        for study in studies:
            report.gain_table(study)
    assert sorted(read) == sorted(r.folder for study in studies for r in study.runs)
    assert len(judged) == 2 * 3 * 3


def test_what_was_worked_out_is_freed_with_the_study(tmp_path):
    study = report.read(write_comparison(tmp_path, METHODS))
    report.answer(study)
    gone = weakref.ref(study)
    del study
    gc.collect()
    assert gone() is None
