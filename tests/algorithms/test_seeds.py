import threading

import numpy as np
import torch

from rl8x.algorithms.hyperparameters import draw_seed, part_seed, seeded

PARTS = ("env", "weights", "sampling", "minibatches", "eval_env", "eval_sampling")


def test_the_parts_of_every_run_are_the_words_of_one_sequence():
    words = np.random.SeedSequence(7).generate_state(6, dtype=np.uint64) >> np.uint64(1)
    assert [part_seed(7, part) for part in PARTS] == [int(word) for word in words]


def test_a_part_of_ones_own_has_a_seed_of_its_own():
    seeds = [part_seed(seed, part) for seed in range(20) for part in (*PARTS, "replay", "target", "")]
    assert len(set(seeds)) == len(seeds)
    assert part_seed(3, "replay") == part_seed(3, "replay")
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_that_is_given_is_kept():
    assert draw_seed(0) == 0
    assert draw_seed(5) == 5
    assert len({draw_seed(None) for _ in range(20)}) == 20


def test_threads_draw_none_of_each_others_numbers():
    def draw(seed):
        with seeded(seed, torch.device("cpu")):
            drawn[seed] = torch.stack([torch.rand(()) for _ in range(2000)])

    drawn, expected = {}, {}
    for seed in range(4):
        draw(seed)
    expected, drawn = drawn, {}
    threads = [threading.Thread(target=draw, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, numbers in expected.items():
        assert torch.equal(drawn[seed], numbers)
