import pytest

from rl8x.tracking.protocol import StoreDownError, StoreRefusedError
from rl8x.tracking.sender import Attempts, NotNowError


class Calls:
    """A store that does not take some numbers, and what it got."""

    def __init__(self, bad, error):
        self.bad, self.error = bad, error
        self.taken, self.given_up, self.num_calls, self.num_checks = [], [], 0, 0
        self.works = True

    def call(self, some):
        self.num_calls += 1
        if self.bad & set(some) or not self.works:
            raise self.error
        self.taken += some

    def check(self):
        self.num_checks += 1
        if not self.works:
            raise StoreDownError("nobody there")

    def send(self, attempts, items):
        attempts.send(items, self.call, lambda item, error: self.given_up.append((item, str(error))), self.check)


def test_a_refusal_is_found_by_halving_and_tried_three_times():
    store = Calls({3}, StoreRefusedError("bad"))
    store.send(Attempts(), list(range(8)))
    assert sorted(store.taken) == [0, 1, 2, 4, 5, 6, 7]
    assert store.given_up == [(3, "bad")]
    assert store.num_calls == 1 + 2 + 2 + 1 + 3
    assert store.num_checks == 2  # before the first is believed, and before the last is given up


@pytest.mark.parametrize("error", [StoreDownError("413"), ZeroDivisionError("ours")])
def test_a_failure_is_blamed_on_an_item_after_three_times_only(error):
    store, attempts = Calls({3}, error), Attempts()
    for _ in range(2):
        with pytest.raises(NotNowError, match=str(error)) as caught:
            store.send(attempts, list(range(8)))
        assert caught.value.of_entry
        attempts.failures += 1
    store.send(attempts, list(range(8)))
    assert sorted(store.taken) == [0, 1, 2, 4, 5, 6, 7]
    assert [item for item, _ in store.given_up] == [3]


@pytest.mark.parametrize("error", [StoreDownError("413"), StoreRefusedError("the run is deleted")])
def test_a_store_that_does_not_work_is_blamed_for_nothing(error):
    store, attempts = Calls({3}, error), Attempts()
    store.works = False
    attempts.failures = 5
    with pytest.raises(NotNowError, match="nobody there") as caught:
        store.send(attempts, list(range(8)))
    assert not caught.value.of_entry
    assert (store.taken, store.given_up, store.num_calls) == ([], [], 1)


def test_a_store_that_goes_away_among_the_calls_gives_nothing_up():
    store = Calls({3}, StoreRefusedError("bad"))
    answers = iter([None, StoreDownError("gone")])

    def check():
        error = next(answers)
        if error is not None:
            raise error

    with pytest.raises(NotNowError, match="gone"):
        Attempts().send([3, 4], store.call, lambda *_: store.given_up.append(_), check)
    assert store.given_up == []


def test_what_is_malformed_is_not_tried_again():
    store = Calls({3}, KeyError("t"))
    store.send(Attempts(), [3])
    assert (store.num_calls, [item for item, _ in store.given_up]) == (1, [3])
