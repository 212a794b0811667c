import functools
import warnings

import pytest
import torch
from tests.probes import record_once
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from rl8x import keys
from rl8x.algorithms import PPOConfig
from rl8x.envs import CartPole, Pendulum
from rl8x.execution import Execution
from rl8x.execution import execution as module
from rl8x.execution.captured import CapturedProgram
from rl8x.execution.compiled import CompiledProgram
from rl8x.execution.loops import Loop
from rl8x.execution.programs import ProgramError
from rl8x.randomization import Uniform
from rl8x.rollouts.statistics import Stats

CPU = torch.device("cpu")


@pytest.fixture
def captures(monkeypatch):
    """Let the CPU capture."""
    monkeypatch.setattr("rl8x.execution.captured.capture_cuda", record_once)


def build(env=CartPole, *, mode="graph", **options):
    """Build PPO whose execution is set from outside: a CPU refuses the mode 'graph'."""
    defaults = {"num_envs": 8, "horizon": 6, "seed": 2, "device": "cpu", "model_config": {"hidden_sizes": [8]}}
    defaults["execution"] = "eager" if mode == "eager" else "compile"
    algorithm = PPOConfig.rl8(**{**defaults, "sgd_minibatch_size": 16, "num_sgd_iters": 2, **options}).build(env)
    algorithm.execution.mode = algorithm.execution.target = mode
    algorithm.execution.host_looks = mode == "eager"
    if mode == "graph":
        stepper = algorithm.collector.stepper
        stepper.compiles_env, stepper.captures_env = False, algorithm.env.capturable
    return algorithm


def weights(algorithm):
    return torch.cat([weight.detach().flatten() for weight in algorithm.policy.parameters()])


def test_graph_needs_cuda():
    with pytest.raises(ValueError, match="execution='graph' needs a CUDA device; got cpu"):
        Execution("graph", "fp32", CPU)


@pytest.mark.parametrize(("has", "precision"), [(False, "bf16"), (False, "fp32"), (True, "bf16")])
def test_emulated_bfloat16_is_announced(has, precision, monkeypatch, recwarn):
    monkeypatch.setattr(module, "has_bfloat16", lambda: has)
    Execution("eager", precision, CPU)
    expected = (
        "precision='bf16' is emulated, since this processor has no bfloat16 instructions: iterations take about four "
        "times as long as with 'fp32'. Use precision='fp32'."
    )
    assert [str(each.message) for each in recwarn] == ([expected] if not has and precision == "bf16" else [])


# -- captured programs


def test_a_captured_program_reads_its_arguments_anew_and_writes_to_fixed_ones_only():
    total = torch.zeros(3)

    def add(total, values):
        total.add_(values)
        return [total * 2]

    program = CapturedProgram(add, 1, record_once)
    first = program(total, torch.tensor([1.0, 2.0, 3.0]))
    values = torch.ones(3)
    second = program(total, values)
    assert total.tolist() == [2.0, 3.0, 4.0]  # neither the runs before the capture nor the capture counted
    assert first[0].tolist() == [2.0, 4.0, 6.0]  # the second replay did not overwrite the first's result
    assert second[0].tolist() == [4.0, 6.0, 8.0]
    assert values.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda function: CapturedProgram(function, 0, record_once),
        lambda function: CompiledProgram(function, compiles=False),
    ],
    ids=["captured", "compiled"],
)
def test_a_program_is_made_again_for_other_shapes_and_types(make):
    program = make(lambda values: [values + 1])
    for values in (torch.zeros(2), torch.zeros(3), torch.tensor([2**53 + 1, 0]), torch.zeros(2), torch.zeros(3)):
        assert torch.equal(program(values)[0], values + 1)


CASES = {
    "normalised, cut": (functools.partial(Pendulum, time_limit=4), {"normalize_observations": True}),
    "lstm": (CartPole, {"model": "lstm", "model_config": {"hidden_size": 8}, "seq_len": 3, "sgd_minibatch_size": 24}),
    "kl limit": (CartPole, {"target_kl_div": 0.01}),
}


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("case", CASES)
def test_captured_horizons_and_updates_equal_eager_ones(case):
    """All algorithms are captured in `simulated_cuda`."""
    env, options = CASES[case]
    eager, captured = build(env, mode="eager", **options), build(env, **options)
    for _ in range(3):
        rows = []
        for algorithm in (eager, captured):
            algorithm.collect()
            rows.append(dict(algorithm.step()))
        for name, value in eager.rollout.tensors.items():
            torch.testing.assert_close(captured.rollout[name], value, atol=1e-5, rtol=1e-4, msg=name)
        torch.testing.assert_close(weights(captured), weights(eager), atol=1e-5, rtol=1e-5)
        # An accelerator goes through all updates and does not apply those after the limit; it does not stop early.
        shared = [name for name in rows[0] if "kl" not in case]
        assert [rows[1][name] for name in shared] == pytest.approx([rows[0][name] for name in shared], abs=1e-4)
    assert captured.counters == eager.counters
    assert (eager.tags["rl8x.execution"], captured.tags["rl8x.execution"]) == ("eager", "graph")


class CountsSteps(CartPole):
    """Not pure: it pays by what it counted in Python."""

    count = 0

    def advance(self, carry, actions, noise):
        self.count += 1
        carry, step = super().advance(carry, actions, noise)
        return carry, step._replace(rewards=step.rewards * self.count)


@pytest.mark.usefixtures("captures")
def test_an_impure_environment_is_caught_by_a_trial_horizon():
    algorithm = build(CountsSteps)
    with pytest.warns(RuntimeWarning, match="CountsSteps runs eagerly around a captured policy: horizons on the same"):
        algorithm.collect()
    assert algorithm.rollout[keys.REWARDS][:6, 0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]  # the eager trial's
    assert algorithm.tags["rl8x.execution"] == "graph, environment eager"
    algorithm.step()
    before = algorithm.rollout[keys.REWARDS][5, 0].item()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        algorithm.collect()
    rewards = algorithm.rollout[keys.REWARDS][:6, 0]
    assert rewards[0] > before
    assert rewards.diff().tolist() == [1.0] * 5


# -- falling back


def refuse(*_):
    raise OSError("no compiler found\nmore lines")


def test_what_cannot_be_recorded_is_told_in_one_line_too():
    program = Execution("compile", "fp32", CPU).program(lambda values: [values if values.sum() > 0 else -values])
    with pytest.raises(ProgramError, match=r"^execution='compile' is not possible here: .+\. execution='eager' always"):
        program(torch.ones(2))


def test_a_failed_capture_leaves_no_trace():
    total = torch.zeros(2)

    def capture(function):
        function()
        raise RuntimeError("operation not permitted when stream is capturing")

    program = CapturedProgram(lambda total: [total.add_(1)], 1, capture)
    with pytest.raises(ProgramError, match="not permitted"):
        program(total)
    assert total.tolist() == [0.0, 0.0]


# -- loops


def until_negative(total, step, unused, item):
    total.add_(item.sum() * step)
    return [total + 0.0, item * OFFSET, (total >= 0).squeeze(0)]


OFFSET = torch.tensor([10.0])


LOOPS = {
    "eager": lambda loop: loop,
    "recorded": lambda loop: CompiledProgram(loop, compiles=False),
    "compiled": CompiledProgram,
    "captured": lambda loop: CapturedProgram(loop, 0, record_once),
}


@pytest.mark.parametrize("make", LOOPS)
def test_a_loop_calls_its_function_for_each_item_until_it_says_no(make):
    program = LOOPS[make](Loop(until_negative, 1, ends=True, host_looks=make != "captured"))
    total, items = torch.tensor([1.0]), torch.tensor([[1.0, 2.0], [3.0, -2.0], [-9.0, 0.0], [5.0, 5.0]])
    place = total.data_ptr()
    totals, scaled, flags = program(total, torch.tensor(1.0), torch.zeros(3), items)
    assert totals.tolist() == [[4.0], [5.0], [-4.0], [0.0]]
    assert scaled.tolist() == [[10.0, 20.0], [30.0, -20.0], [-90.0, 0.0], [0.0, 0.0]]
    assert flags.tolist() == [True, True, False, False]
    assert total.tolist() == [-4.0]
    assert total.data_ptr() == place
    # Arguments and what is read beside them count with their present values.
    OFFSET.fill_(100.0)
    try:
        totals, scaled, flags = program(total.fill_(0.0), torch.tensor(2.0), torch.zeros(3), items)
    finally:
        OFFSET.fill_(10.0)
    assert totals.tolist() == [[6.0], [8.0], [-10.0], [0.0]]
    assert scaled[0].tolist() == [100.0, 200.0]


def twins(first, second, scale, step, flag):
    """Two tensors of the state that are always equal, as an observation that is the physics."""
    moved = torch.where(flag, first + step * scale, second)
    before = second.clone()
    first.copy_(moved)
    second.copy_(moved)
    return [before, moved > 2.0]


@pytest.mark.parametrize("make", LOOPS)
def test_a_loop_over_several_items_that_never_ends_early(make):
    program = LOOPS[make](Loop(twins, 2, num_items=2))
    first, second = torch.zeros(2), torch.zeros(2)
    steps, flags = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([True, False, True])
    before, above = program(first, second, torch.tensor(2.0), steps, flags)
    assert before.tolist() == [[0.0, 0.0], [2.0, 4.0], [2.0, 4.0]]
    assert above.tolist() == [[False, True], [False, True], [True, True]]
    assert first.tolist() == second.tolist() == [12.0, 16.0]


def running(total, item, slot):
    before = total.clone()
    total.add_(item)
    slot.copy_(before)
    return []


@pytest.mark.parametrize("make", ["eager", "recorded", "compiled"])
def test_a_loop_may_give_nothing_but_what_it_writes_into_its_items(make):
    total, slots = torch.tensor([1.0, 2.0]), torch.zeros(4, 2)
    program = LOOPS[make](Loop(running, 1, num_items=2))
    assert len(program(total, torch.tensor([[1.0, 1.0], [2.0, 4.0], [8.0, 8.0]]), slots[:3])) == 0
    assert slots.tolist() == [[1.0, 2.0], [2.0, 3.0], [4.0, 7.0], [0.0, 0.0]]
    assert total.tolist() == [12.0, 15.0]


def test_a_captured_loop_takes_a_state_from_anywhere():
    def add(total, item):
        total.add_(item)
        return [total * 10.0]

    captured = []
    program = CapturedProgram(Loop(add, 1), 0, lambda function: captured.append(1) or record_once(function))
    first, second = torch.zeros(1), torch.full((1,), 5.0)
    results = [program(total, torch.tensor([1.0, 2.0]))[0].tolist() for total in (first, second, first)]
    assert results == [[[10.0], [30.0]], [[60.0], [80.0]], [[40.0], [60.0]]]
    assert (first.item(), second.item(), captured) == (6.0, 8.0, [1])


class Accelerator(Execution):
    """Runs on the CPU what is meant for CUDA."""

    def __init__(self, mode):
        super().__init__("eager", "fp32", CPU)
        self.mode = self.target = mode
        self.device, self.host_looks = torch.device("cuda"), False


@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
@pytest.mark.parametrize("fails", [True, False])
def test_loops_of_an_accelerator_are_made_in_their_mode_and_look_at_no_value(mode, fails, monkeypatch):
    made = []

    def count(function, *rest):
        made.append(mode)
        make = {"compile": CompiledProgram._interpret, "graph": record_once}[mode]
        return refuse() if fails else make(function, *rest)

    monkeypatch.setattr("rl8x.execution.captured.capture_cuda", count)
    monkeypatch.setattr(CompiledProgram, "_compile", count)
    program = Accelerator(mode).loop(until_negative, 1, ends=True)
    arguments = torch.tensor([1.0]), torch.tensor(1.0), torch.zeros(3), torch.tensor([[-1.0], [-2.0], [9.0], [-9.0]])
    if fails and mode != "eager":
        with pytest.raises(ProgramError, match=f"execution='{mode}' is not possible here: no compiler found"):
            program(*arguments)
        return
    for _ in range(2):
        totals, scaled, flags = program(arguments[0].fill_(1.0), *arguments[1:])
        assert totals.tolist() == [[0.0], [-2.0], [0.0], [0.0]]
        assert scaled.tolist() == [[-10.0], [-20.0], [0.0], [0.0]]
        assert flags.tolist() == [True, False, False, False]
        assert arguments[0].tolist() == [-2.0]
    assert made == ([] if mode == "eager" else [mode])
    if mode == "eager":
        with FakeTensorMode(allow_non_fake_inputs=True):
            program(*arguments)


@pytest.mark.parametrize("ends", [True, False])
def test_a_loop_takes_a_state_of_any_strides(ends):
    def add(total, sums, step):
        total.add_(step)
        sums.add_(total.sum())
        return [total * 1.0, sums.unsqueeze(0), sums.sum() < 100.0]

    # One number out of a row of two, as a copy's noise is, and a transposed matrix.
    total, sums = torch.zeros(1, 2)[:, 0], torch.zeros(3, 2).t()
    assert (total.stride(), sums.stride()) == ((2,), (1, 2))
    totals, each, _ = CompiledProgram(Loop(add, 2, ends=ends), compiles=False)(total, sums, torch.tensor([1.0, 2.0]))
    assert totals.tolist() == [[1.0], [3.0]]
    assert each[:, 0, 1, 2].tolist() == [1.0, 4.0]
    assert (total.tolist(), sums[1].tolist()) == ([3.0], [4.0, 4.0, 4.0])


# -- copies to the host


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("case", [name for name in CASES if name != "kl limit"])
def test_an_iteration_looks_at_no_value_but_in_its_one_copy_of_statistics(case, monkeypatch):
    """Fake tensors have no values: whatever looks at one on the host raises."""
    env, options = CASES[case]
    env = getattr(env, "func", env)  # without a time limit
    fetched = []
    reported = property(lambda stats: fetched.append(stats) or dict.fromkeys(stats._values, 0.0))
    monkeypatch.setattr(Stats, "_reported", reported)
    algorithm = build(env, **options, mode="eager")
    algorithm.execution.host_looks = False
    config = {next(iter(env.parameters)): Uniform(0.5, 1.0), list(env.parameters)[1]: 1.0}
    algorithm.collect(env_config=config)
    algorithm.step()
    # Nor does it make tensors of the host's numbers, which would be copies the other way.
    monkeypatch.setattr(torch, "tensor", None)
    monkeypatch.setattr(torch, "as_tensor", None)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for _ in range(2):
            row = Stats.merge(algorithm.collect(env_config=config), algorithm.step())
            assert not fetched
            assert "losses/total" in row
            assert len(fetched) == 1
            fetched.clear()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_look_at_a_value_would_be_noticed():
    algorithm = build(Pendulum, mode="eager")  # which may look at whether episodes were cut
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(DataDependentOutputException):
        algorithm.collect()
