"""The audit between sites, each threshold from both sides, on columns whose quantiles are planted."""

import numpy as np
import pandas as pd
import pytest
from test_site_audit import flagged

from polyfed.base.part import Part
from polyfed_audit.parts import withheld


def column(middle, spread=1.2, n=400):
    """Numbers with this median whose logarithms are even, `spread` times as wide between the quartiles as up."""
    return np.round(middle * spread ** np.linspace(-1, 1, n), 6)


def of(sites, name="dose", **columns):
    """The flags of one column, beside an outcome that says nothing."""
    return flagged({s: pd.DataFrame({name: v, "ill": np.arange(len(v)) % 2}) for s, v in sites.items()}, **columns)


def test_a_unit_is_seen_from_1_8_times_on_where_columns_are_narrow_and_rows_are_many():
    for factor, seen in ((1.72, False), (1.79, False), (1.81, True), (2.5, True), (1 / 1.79, False), (1 / 1.81, True)):
        found = of({"a": column(5), "b": column(5.0), "c": column(5 * factor)})
        assert bool(found) == seen, (factor, found)
        assert any(line.startswith("c: the median of dose is") for line in found) == seen


def test_a_unit_is_seen_from_two_widths_of_a_column_on():
    """Quartiles at plus and minus a half of log spread: a width is log(spread) / 1.349."""
    for spread in (3.0, 6.0):
        width = np.log(spread) / 1.349
        for widths, seen in ((1.5, False), (1.95, False), (2.05, True), (2.5, True), (-1.95, False), (-2.05, True)):
            sites = {"a": 50, "b": 50, "c": 50 * np.exp(widths * width)}
            found = of({s: column(middle, spread, 2001) for s, middle in sites.items()})
            assert bool(found) == seen, (spread, widths)


def test_a_unit_is_seen_from_five_standard_errors_on():
    """Of a median of n logarithms, 1.2533 width / sqrt(n) at each of two sites: few rows alone decide here."""
    for n in (9, 13):
        width = np.log(3.0) / 1.349
        error = 2**0.5 * 1.2533 * width / n**0.5
        assert 5 * error > 2 * width
        for errors, seen in ((4.0, False), (4.8, False), (5.4, True), (-4.8, False)):
            sites = {"a": column(50, 3.0, n), "b": column(50 * np.exp(errors * error), 3.0, n)}
            assert bool(of(sites)) == seen, (n, errors)


def test_from_eight_rows_and_three_values_on_something_is_said_of_a_unit():
    for n, seen in ((7, False), (8, True)):
        found = of({"a": column(5, 1.05, 100), "b": column(5, 1.05), "c": column(500, 1.05, n)})
        assert any("median" in line for line in found) == seen, n
    for values, seen in ((2, False), (3, True)):
        few = np.resize(column(500, 1.05, values), 40)
        found = of({"a": column(5, 1.05), "b": column(5, 1.05), "c": few})
        assert any("the median" in f for f in found) == seen, values


def test_a_unit_is_named_where_its_factor_fits():
    for factor, named in ((18.02, True), (18.02 * 1.3, True), (18.02 * 1.6, False)):
        (found,) = of({"a": column(5), "b": column(5), "c": column(5 * factor)}, "glucose")
        assert ('glucose = "mg/dl -> mmol/l"' in found) == named, factor
    for factor, named in ((1000 * 1.2, True), (1000 * 3, False)):  # by the factor alone, in a column of any name
        (found,) = of({"a": column(5), "b": column(5), "c": column(5 * factor)})
        assert ('dose = "x / 1000"' in found) == named, factor


def codes(own, shared, lack, n=300):
    """Rows of codes at the last of three sites: `own` of them no other writes, and it lacks one."""
    rows = {"a": ["x"] * (n - lack) + ["y"] * lack, "b": ["x"] * (n - lack) + ["y"] * lack}
    return rows | {"c": ["x"] * shared + ["q"] * own}


@pytest.mark.parametrize(("share", "seen"), [(0.1, False), (0.19, False), (0.21, True), (0.3, True), (0.5, True)])
def test_a_code_in_a_fifth_of_the_rows_that_no_other_site_writes_is_flagged(share, seen):
    assert bool(of(codes(round(300 * share), round(300 * (1 - share)), 150), "ward")) == seen
    assert bool(of(codes(150, 150, round(300 * share)), "ward")) == seen


def test_a_code_that_few_rows_have_by_chance_is_left_alone_below_one_in_ten_thousand():
    """Of like sites all rows of a value lie at one, of a third of all rows, by chance: (1/3) to the number of them."""
    for n, seen in ((8, False), (9, True), (12, True)):
        assert ((1 / 3) ** n < 1e-4) == seen
        sites = {"a": ["x"] * n + ["y"] * n, "b": ["x"] * n + ["y"] * n, "c": ["x"] * n + ["q"] * n}
        assert bool(of(sites, "ward")) == seen, n


def test_up_to_eight_numbers_are_codes_and_more_are_numbers():
    for many, seen in ((6, True), (7, False)):  # and two that one side alone writes
        shared = [str(k) for k in range(10, 10 + many)]
        sites = {s: shared * 20 + ["1"] * 20 * many for s in "ab"} | {"c": shared * 20 + ["2"] * 20 * many}
        found = [f for f in of(sites, "ward") if "which no other site writes" in f]
        assert bool(found) == seen, many


def test_a_limit_of_detection_is_flagged_from_a_twentieth_of_the_rows_on():
    """And where other sites have a twentieth of theirs beyond it, half as many as are piled up there."""
    wide = column(10, 8.0, 1000)
    for piled, seen in ((0.03, False), (0.06, True), (0.3, True)):
        for low in (True, False):
            q = np.quantile(wide, piled if low else 1 - piled)
            here = np.maximum(wide, q) if low else np.minimum(wide, q)
            found = [f for f in of({"a": wide, "b": wide * 1.01, "c": here}) if "a limit of detection" in f]
            assert bool(found) == seen, (piled, low)
    for beyond, seen in ((0.1, False), (0.18, True)):  # of the others', where 0.3 of the rows here are piled up
        q = np.quantile(wide, beyond)
        here = np.concatenate([np.full(300, q), wide[wide > q][:: len(wide[wide > q]) // 700 or 1][:700]])
        assert any("a limit" in f for f in of({"a": wide, "b": wide * 1.0001, "c": here})) == seen, beyond


@pytest.mark.parametrize("rate", [0.5, 0.2])
def test_a_rate_of_the_outcome_is_flagged_from_odds_of_twenty_on(rate):
    """Of thousands of rows, so that the deviations are none; and of few from five deviations on."""
    odds = rate / (1 - rate)
    for times, seen in ((15, False), (19.5, False), (20.5, True), (40, True), (1 / 18.5, False), (1 / 22, True)):
        p = odds * times / (1 + odds * times)
        ill = {s: np.arange(4000) < 4000 * rate for s in "ab"} | {"c": np.arange(4000) < 4000 * p}
        frames = {s: pd.DataFrame({"age": column(50, 1.2, 4000), "ill": v.astype(int)}) for s, v in ill.items()}
        assert bool(flagged(frames)) == seen, times
    for n, seen in ((40, False), (400, True)):  # odds of 39 to 1 against 1 to 1
        ill = {s: np.arange(2000) % 2 for s in "ab"} | {"c": np.arange(n) >= n / 40}
        frames = {s: pd.DataFrame({"age": column(50, 1.2, len(v)), "ill": v.astype(int)}) for s, v in ill.items()}
        assert bool([f for f in flagged(frames) if "ill is" in f]) == seen, n


def test_rows_that_repeat_are_flagged_from_a_fiftieth_on_and_from_three():
    rng = np.random.default_rng(0)

    def said(n, repeats):
        frame = pd.DataFrame(rng.normal(size=(n, 2)).round(6), columns=["age", "bmi"]).assign(ill=np.arange(n) % 2)
        return any("repeat another row" in f for f in flagged({"a": pd.concat([frame, frame.head(repeats)])}))

    assert [said(1000, k) for k in (10, 20, 21, 40)] == [False, False, True, True]
    assert [said(40, k) for k in (1, 2, 3)] == [False, False, True]


def test_identifiers_that_repeat_are_flagged_from_a_fiftieth_on_and_from_two():
    def said(n, repeats, name="patient"):
        ids = np.concatenate([np.arange(n - repeats), np.arange(repeats)])
        return any("rows repeat patients" in f for f in of({"a": ids, "b": np.arange(n)}, name))

    assert [said(1000, k) for k in (10, 19, 20, 40)] == [False, False, True, True]
    assert [said(40, k) for k in (1, 2, 5)] == [False, True, True]
    assert not said(1000, 40, "dose"), "of a column that names nobody"


def test_a_code_of_a_gap_is_one_far_from_all_others():
    """Each border of _sentinels, by what an analyst would say of it."""
    ages = np.arange(20, 80)
    for codes_of, others, seen in (
        (["-9"] * 3, ages, True),
        (["-9"], ages, False),  # once may be a slip
        (["-9"], np.repeat(ages, 2), False),
        (["-9"] * 3, np.setdiff1d(np.arange(-30, 30), [-9, -8, -7, -1]), False),  # among other negative ones
        (["-1"] * 3, ages, True),
        (["-1"] * 3, np.arange(0, 60), False),  # next to 0
        (["999"] * 3, ages, True),
        (["99"] * 3, ages, False),  # an age
        (["0"] * 9, np.arange(100, 160), True),
        (["0"] * 3, np.arange(100, 160), False),  # of fewer than a twentieth of the rows
        (["0"] * 9, np.arange(10, 160, 2), False),  # not far from the others
        (["0"] * 9, np.r_[20, np.repeat(np.arange(95, 106), 9)], False),  # nor from the least of them
        (["0"] * 9, np.r_[40, np.repeat(np.arange(95, 106), 9)], True),
        (["9"] * 4, np.resize([1, 2, 3, 4], 60), True),  # of codes: twice as large and more than 2 beyond
        (["9"] * 4, np.resize([1, 2, 3, 4, 5], 60), False),
        (["999"] * 3, np.arange(15), False),  # too few to say what is far
    ):
        sites = {"a": [*codes_of, *others.astype(str)], "b": others.astype(str)}
        for some in (sites, {"a": sites["a"]}):
            found = [f for f in of(some) if f"dose is {codes_of[0]} in {len(codes_of)} of" in f]
            assert bool(found) == seen, (codes_of, others[:3], found)


def test_what_leaves_a_site_of_a_column_is_of_as_many_rows_as_its_policy_asks_for():
    """Values, codes, ends, repeats and tails, each from both sides; a rest of too few hides the values too."""
    part = Part(
        rows=120, gaps=20, distinct=9, quantiles=[1.234, 2.345, 3.456, 4.567, 5.678], values={"a": 60, "b": 40},
        odd={"-9": 7}, low=[0.5, 9.0], high=[8.5, 11.0], repeats=12,
    )  # fmt: skip
    for least, odd, low, high, repeats in (
        (7, {"-9": 7}, True, True, 12), (8, None, True, True, 12), (9, None, True, True, 12),
        (10, None, False, True, 12), (11, None, False, True, 12), (12, None, False, False, 12),
        (13, None, False, False, 0),
    ):  # fmt: skip
        left = withheld(part, least, True)
        assert (left.odd, left.low is not None, left.high is not None, left.repeats) == (odd, low, high, repeats), least
        closed = withheld(part, least, False)
        assert (closed.quantiles, closed.low, closed.high, closed.odd) == (None, None, None, odd)
    assert withheld(part, 5, True).quantiles == [1.2, 2.3, 3.5, 4.6, 5.7]
    assert withheld(part, 6, True).quantiles == [2.3, 2.3, 3.5, 4.6, 4.6], "5 rows lie beyond 5 %"
    assert withheld(part, 25, True).quantiles is not None
    assert withheld(part, 26, True).quantiles is None, "25 rows lie beyond a quartile"
    few = part.model_copy(update={"values": {"a": 60, "b": 36, "c": 4}})
    assert withheld(few, 4, True).values == {"a": 60, "b": 36, "c": 4}
    assert withheld(few, 5, True).values is None, "the rest would say that 4 rows have another"
    more = part.model_copy(update={"values": {"a": 60, "b": 34, "c": 3, "d": 3}})
    assert withheld(more, 6, True).values == {"a": 60, "b": 34}
    assert withheld(more, 7, True).values is None
