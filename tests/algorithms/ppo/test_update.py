import copy

import pytest
import torch
from tests.probes import traced_only

from rl8x.algorithms import PPOConfig
from rl8x.envs import CartPole, Pendulum


@pytest.fixture
def _traced_only(monkeypatch):
    """Run the trace itself: what a compiled program computes, without the half minute that compiling takes."""
    traced_only(monkeypatch)


def build(env=CartPole, **options):
    defaults = {"num_envs": 8, "horizon": 8, "seed": 2, "device": "cpu", "model_config": {"hidden_sizes": [16]}}
    return PPOConfig.rl8(**{**defaults, "sgd_minibatch_size": 32, "num_sgd_iters": 2, **options}).build(env)


def weights(algorithm):
    return torch.cat([weight.detach().flatten() for weight in algorithm.policy.parameters()])


CASES = {
    "discrete": (CartPole, {}),
    "continuous": (Pendulum, {"normalize_observations": True}),
    "entropy and dual clip": (CartPole, {"entropy_coeff": 0.01, "dual_clip_param": 2.0, "max_grad_norm": 0.1}),
    "one batch": (CartPole, {"sgd_minibatch_size": None}),
    "accumulated": (CartPole, {"accumulate_grads": True}),
    "kl limit": (CartPole, {"target_kl_div": 0.5}),
    "adamw": (CartPole, {"optimizer": "adamw"}),
    "lstm": (CartPole, {"model": "lstm", "model_config": {"hidden_size": 8}, "seq_len": 4}),
    "gru": (Pendulum, {"model": "gru", "model_config": {"hidden_size": 8}, "seq_len": 2}),
}

# Too small for two chunks


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize(("limit", "calls"), [(None, [6]), (1e9, [2, 2, 2]), (1e-9, [2])])
def test_the_updates_of_a_step_are_one_program_unless_a_limit_may_end_them_after_an_epoch(limit, calls):
    """Three epochs of two minibatches; the orders of those that are not begun are not drawn."""
    options = {"num_sgd_iters": 3, "target_kl_div": limit, "lr": 0.05}
    eager, traced = build(**options, execution="eager"), build(**options, execution="compile")
    program, made = traced.updater._updates, []

    def counted(*tensors):
        made.append(len(tensors[-1]))
        return program(*tensors)

    traced.updater._updates = counted
    for algorithm in (eager, traced):
        algorithm.collect()
        algorithm.step()
    assert made == calls
    assert torch.equal(traced.updater.generator.get_state(), eager.updater.generator.get_state())
    assert traced.counters == eager.counters
    torch.testing.assert_close(weights(traced), weights(eager), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_traced_only")
def test_a_schedule_reaches_a_traced_update():
    schedule = {"kind": "interp", "points": [[0, 1e-2], [256, 0.0]]}
    algorithm = build(execution="compile", lr_schedule=schedule)
    for _ in range(4):
        algorithm.collect()
        algorithm.step()
    before = weights(algorithm)
    algorithm.collect()
    algorithm.step()
    assert torch.equal(weights(algorithm), before)


def test_tf32_needs_cuda():
    with pytest.raises(ValueError, match="tf32"):
        build(precision="tf32")


@pytest.fixture
def small_chunks(monkeypatch):
    """Cut small minibatches into chunks for two workers, as large ones are."""
    monkeypatch.setattr("rl8x.execution.threads._SHARED_WORK", 0)
    monkeypatch.setattr("rl8x.execution.threads._SHARED_WORK_EAGER", 0)
    monkeypatch.setattr("rl8x.algorithms.on_policy.update._CHUNK_STEPS", 5)
    monkeypatch.setattr("rl8x.algorithms.on_policy.update._CHUNK_ACTIVATIONS", 64)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_of_chunks_by_two_workers_add_up_to_the_whole_ones(case, mode, request):
    env, options = CASES[case]
    whole = build(env, **options)
    whole.collect()
    whole.step()
    request.getfixturevalue("small_chunks")
    chunked = build(env, **options, execution=mode)
    chunked.collect()
    chunked.step()
    assert len(chunked.updater._gradients) == 2
    torch.testing.assert_close(weights(chunked), weights(whole), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("small_chunks")
def test_two_workers_give_the_same_bits_every_time():
    results = []
    for _ in range(3):
        algorithm = build()
        for _ in range(2):
            algorithm.collect()
            algorithm.step()
        results.append(weights(algorithm))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.usefixtures("_traced_only")
def test_chunks_of_wide_observations_are_smaller():
    algorithm = build(execution="compile")
    algorithm.collect()
    algorithm.step()
    narrow = algorithm.updater._chunk_steps
    assert algorithm.pack.width == algorithm.pack.sources[0].shape[-1]
    algorithm.pack.width += 4 * 84 * 84
    assert algorithm.updater._chunk_steps == 2**24 // algorithm.pack.width < narrow


@pytest.mark.usefixtures("_traced_only", "small_chunks")
@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_a_resumed_process_adds_gradients_in_the_same_order(mode):
    # What compiles is the first update of a process, also of one that resumes.
    straight, resumed = build(execution=mode), build(execution=mode)
    straight.collect()
    straight.step()
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    for algorithm in (straight, resumed):
        algorithm.collect()
        algorithm.step()
    assert torch.equal(weights(resumed), weights(straight))
