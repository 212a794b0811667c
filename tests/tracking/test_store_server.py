import io
import math
import os
import sys
from dataclasses import astuple

from rl8x.tracking.location import Location
from rl8x.tracking.store import Point
from rl8x.tracking.store_server import encode, serve


class Fake:
    def __init__(self, location, request_timeout_s):
        new = os.environ.get("RL8X_TEST") if location.uri == "v" else None
        self.opened = f"{location.uri}, {request_timeout_s}, {new}"
        self.points = []

    def log_points(self, run_id, points):
        self.points += points
        if len(self.points) > 2:
            raise ZeroDivisionError("three")

    def params(self, run_id):
        return {"opened": self.opened}


def test_the_other_end_answers_in_order_and_survives_any_error():
    import mlflow.entities  # noqa: F401 - a channel imports it, for which the end of the requests does not wait

    point = Point("a", math.nan, 1, 2)
    requests = [
        (5, 0, "open", (astuple(Location("u")), 3, sys.argv, dict(os.environ))),
        (5, 1, "log_points", ("r", [point])),
        (5, 2, "log_points", ("r", [point, point])),
        (5, 3, "params", ("r",)),
        (5, 4, "nothing", ()),
        (6, 0, "open", (astuple(Location("v")), 4, sys.argv, {**os.environ, "RL8X_TEST": "new"})),
        (6, 5, "params", ("r",)),
        (5, 6, "close", ()),
    ]
    answers = []
    lines = b"".join(map(encode, requests))
    serve(io.BytesIO(lines + encode((5, 7, "params", ("r",)))[:-5]), lambda *answer: answers.append(answer), Fake)
    first = [(number, str(value)) for number, value in answers if number in (1, 2, 3, 4, 6)]
    assert first == [
        (1, "None"),
        (2, "ZeroDivisionError: three"),
        (3, str({"opened": "u, 3, None"})),
        (4, "AttributeError: 'Fake' object has no attribute 'nothing'"),
        (6, "None"),
    ]
    assert dict(answers)[5] == {"opened": "v, 4, new"}
    assert os.environ.pop("RL8X_TEST") == "new"
