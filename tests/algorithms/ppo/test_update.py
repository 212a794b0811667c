import pytest
import torch
from tests.algorithms.test_conformance import build, train, weights
from tests.probes import traced_only


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch):
    """Run the trace itself: what a compiled program computes, without the half minute that compiling takes."""
    traced_only(monkeypatch)


CHUNKED = ["ppo, continuous", "ppo, entropy and dual clip", "ppo, one batch", "ppo, accumulated", "ppo, kl limit"]
CHUNKED += ["ppo, adamw", "ppo, lstm", "ppo, gru", "ppo, advantages again, gru"]


@pytest.mark.parametrize(("limit", "calls"), [(None, [6]), (1e9, [2, 2, 2]), (1e-9, [2])])
def test_the_updates_of_a_step_are_one_program_unless_a_limit_may_end_them_after_an_epoch(limit, calls):
    """Three epochs of two minibatches; the orders of those that are not begun are not drawn."""
    options = {"num_sgd_iters": 3, "target_kl_div": limit, "lr": 0.05}
    eager, traced = build("ppo", **options), build("ppo", **options, execution="compile")
    program, made = traced.updater._updates, []

    def counted(*tensors):
        made.append(len(tensors[-1]))
        return program(*tensors)

    counted.prepare = program.prepare
    traced.updater._updates = counted
    for algorithm in (eager, traced):
        algorithm.collect()
        algorithm.step()
    assert made == calls
    assert torch.equal(traced.updater.generator.get_state(), eager.updater.generator.get_state())
    assert traced.counters == eager.counters
    torch.testing.assert_close(weights(traced), weights(eager), atol=1e-4, rtol=1e-4)


@pytest.fixture
def small_chunks(monkeypatch):
    """Cut small minibatches into chunks for two workers, as large ones are."""
    monkeypatch.setattr("rl8x.execution.execution._SHARED_WORK", 0)
    monkeypatch.setattr("rl8x.execution.execution._SHARED_WORK_EAGER", 0)
    monkeypatch.setattr("rl8x.algorithms.on_policy.update._CHUNK_STEPS", 5)
    monkeypatch.setattr("rl8x.algorithms.on_policy.update._CHUNK_ACTIVATIONS", 64)
    torch.set_num_threads(2)  # `apart` in tests/conftest.py sets it back


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("case", CHUNKED)
def test_gradients_of_chunks_by_two_workers_add_up_to_the_whole_ones(case, mode, request):
    whole = build(case)
    train(whole, 1)
    request.getfixturevalue("small_chunks")
    chunked = build(case, execution=mode)
    train(chunked, 1)
    assert len(chunked.updater._gradients) == 2
    torch.testing.assert_close(weights(chunked), weights(whole), atol=1e-5, rtol=1e-5)


def test_chunks_of_wide_observations_are_smaller():
    algorithm = build("ppo", execution="compile")
    algorithm.collect()
    algorithm.step()
    narrow = algorithm.updater._chunk_steps
    assert algorithm.pack.width == algorithm.pack.sources[0].shape[-1]
    algorithm.pack.width += 4 * 84 * 84
    assert algorithm.updater._chunk_steps == 2**24 // algorithm.pack.width < narrow
