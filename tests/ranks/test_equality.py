"""Two ranks do what one process does with twice the copies, or with whole batches, on the same noise."""

import pytest
from tests.ranks import problems, scenarios
from tests.ranks.launch import launch

from rl8x import keys
from rl8x.execution import execution

pytestmark = pytest.mark.long
# Times and memory are rank 0's own.
OWN = ("profiling/", "memory/")


@pytest.fixture(autouse=True)
def compiles_again(monkeypatch):
    """Undo `problems.run_traced`, which scenarios call in this process too."""
    monkeypatch.setattr(execution, "CompiledProgram", execution.CompiledProgram)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    # First what is compiled for real: `problems.run_traced` leaves the compiler out from then on.
    names = ["hundred_updates", "moving", "distilled", "ppo", "ppo_compiled", "offline", "online", "evaluations"]
    return launch(tmp_path_factory.mktemp("ranks"), "scenarios", names)


@pytest.mark.parametrize("name", problems.PPO)
def test_ppo_equals_one_process(found, name):
    alone, (first, second) = scenarios.ppo(names=[name])[name], (each[name] for each in found["ppo"])
    rates = {row["coefficients/lr"] for row in first["rows"]}
    assert (len(rates) > 1) == (name == "adapts")
    assert first["weights"] == second["weights"]
    assert problems.furthest(first["weights"], alone["weights"]) < 1e-6
    assert first["state"] == second["state"] == alone["state"]
    for one, two, single in zip(first["rows"], second["rows"], alone["rows"], strict=True):
        assert one == two
        names = {name for name in single if not name.startswith(OWN)}
        assert names == {name for name in one if not name.startswith(OWN)}
        for name in names:
            assert one[name] == pytest.approx(single[name], rel=1e-4, abs=1e-5), name


def test_programs_before_and_after_a_sum_have_the_bits_of_the_eager_update(found):
    first, second = found["ppo_compiled"]
    assert first == second
    assert first["compile"] == first["eager"]
    assert min(first["eager"]["monitors/kl_div"]) > 0
    assert len(set(first["eager"]["coefficients/lr"])) > 1


@pytest.mark.parametrize("mode", ["eager", "auto", "compile"])
def test_ranks_are_equal_to_the_bit_after_100_updates(found, mode):
    first, second = (each[mode] for each in found["hundred_updates"])
    assert first == second
    ran, starts_at, updates = first["ran"]
    assert updates == 104
    assert ran == ("eager" if mode == "eager" else "compile")
    assert 0 < starts_at < 13 if mode == "auto" else starts_at == 0
    eager = found["hundred_updates"][0]["eager"]
    assert problems.furthest(first["weights"], eager["weights"]) < 1e-5


def test_ranges_move_by_the_episodes_of_all_ranks(found):
    alone, (first, second) = scenarios.moving(), found["moving"]
    assert first == second
    adaptive = first["adaptive"]["state"]
    assert adaptive == alone["adaptive"]["state"]
    assert (adaptive["low"], adaptive["high"]) != ([0.4], [0.6])
    assert problems.furthest(first["adaptive"]["weights"], alone["adaptive"]["weights"]) < 1e-6
    learnable = first["learnable"]["state"]
    assert sum(learnable["count"]) > 0
    assert max(learnable["scores"]) > 0


def test_distillation_equals_one_process(found):
    alone, (first, second) = scenarios.distilled(), found["distilled"]
    assert first == second
    assert problems.furthest(first["weights"], alone["weights"]) < 1e-6
    assert first["losses"]["losses/distillation"] > 1e-3
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-4)


@pytest.mark.parametrize("name", problems.OFFLINE)
def test_halves_of_a_batch_equal_the_whole(found, name):
    alone = scenarios.offline(names=[name])[f"{name} eager"]
    first, second = found["offline"]
    assert first == second
    for mode in ("eager", "compile") if name in problems.TRACED else ("eager",):
        one = first[f"{name} {mode}"]
        assert problems.furthest(one["weights"], alone["weights"]) < 1e-6, mode
        assert one["row"] == pytest.approx(alone["row"], rel=1e-4, abs=1e-5), mode


@pytest.mark.parametrize("name", problems.ONLINE)
def test_ranks_with_environments_of_their_own_have_the_same_weights(found, name):
    first, second = (each[name] for each in found["online"])
    assert first["digest"] == second["digest"]
    assert first["row"] == second["row"]
    assert first["own"] != second["own"]  # other random numbers
    assert first["state"] == second["state"]
    assert first["state"][keys.ENV_STEPS] == 2 * 4 * 8 * problems.COPIES
    assert first["state"][keys.UPDATES] > 0
    if "replay/size" in first["row"]:
        assert 1.5 * first["state"][keys.ENV_STEPS] / 2 < first["row"]["replay/size"] <= first["state"][keys.ENV_STEPS]


@pytest.mark.parametrize(("name", "agents"), [("alone", 1), ("team", 3)])
def test_evaluations_are_shared_out_and_count_every_episode_once(found, name, agents):
    first, second = (each[name] for each in found["evaluations"])
    assert (first["copies"], second["copies"]) == ([3 * agents, 5], [2 * agents, 5])
    one, two, row = first["own"], second["own"], first["row"]
    assert {name: row[name] for name in row if not name.startswith(OWN)} == {
        name: value for name, value in second["row"].items() if not name.startswith(OWN)
    }
    assert row["eval/episodes/ended"] == 5
    assert row["eval/returns/mean"] == pytest.approx((3 * one["returns/mean"] + 2 * two["returns/mean"]) / 5)
    assert row["eval/returns/min"] == min(one["returns/min"], two["returns/min"])
    steps = [each["_count/rewards"] for each in (one, two)]
    assert row["eval/episodes/lengths/mean"] == pytest.approx(sum(steps) / 5 / agents)
    if agents > 1:
        each = [f"episodes/agents/agent_{i}/returns/mean" for i in range(agents)]
        own = [row[f"eval/{name}"] for name in each]
        assert own == pytest.approx([(3 * one[name] + 2 * two[name]) / 5 for name in each])
        assert sum(own) == pytest.approx(row["eval/returns/mean"])
