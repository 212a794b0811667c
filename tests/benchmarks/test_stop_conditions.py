"""The table of docs/conditions.md is what the script makes, and says what the page says of it."""

import pytest
from benchmarks.stop_conditions import CURVES, PAGE, SECTION, row, table
from tests.pages import ROOT


def test_the_page_has_the_table_that_the_script_makes():
    (section,) = SECTION.finditer(PAGE.read_text())
    assert section[0].removeprefix(section[1]).removesuffix(section[2]) == table()
    assert ROOT / "docs" / "conditions.md" == PAGE


@pytest.mark.parametrize("curve", CURVES, ids=lambda curve: curve.title)
def test_what_fits_a_curve_stops_it_near_its_end_and_the_others_do_not(curve):
    for kind, options, why in curve.conditions:
        _, after, way = row(curve, kind, options)
        fits = "never" not in after and (way == "flat" or float(way.rstrip("%")) >= 85)
        assert fits == (why == "")


def test_the_page_is_found_by_what_others_call_it():
    text = PAGE.read_text().lower()
    for words in ("early stopping", "patience", "min_delta", "no improvement"):
        assert words in text
