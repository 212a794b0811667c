"""AlgoTrading: buy and sell one asset whose price follows a trend and a cycle that each episode draws anew."""

from __future__ import annotations

import math

import gymnasium.spaces as spaces
import numpy as np
import torch
from torch import Tensor

from rl8x.envs.base import Env, Observation, Outcome, Parameter, Parameters, State
from rl8x.envs.canvas import BLUE, FAINT, GREEN, GREY, Canvas, CopyParameters, CopyState, Past

HOLD, BUY, SELL = 0, 1, 2
PERCENT = 100.0
_SHOWN_STEPS = 80


class AlgoTrading(Env):
    """Hold the asset while the price rises and not while it falls; episodes never end.

        y' = y (1 + km) (1 + kc sin(f t))
        km in +-max_trend, kc in [0, max_cycle], 2 pi / f in [min_period, max_period]

    Actions, `[num_envs]` int64: 0 holds, 1 buys, 2 sells. Observations: `change` `[num_envs, 1]`, the latest change of
    the price's logarithm in percent; `invested` `[num_envs]`, whether the asset is held; and `action_mask`
    `[num_envs, 3]`, which allows buying while nothing is held, else selling. Trend, size and period of
    the cycle are not shown: a policy has to remember changes to infer them. The reward is the change of the portfolio's
    logarithm in percent.

    Source: the example of rl8 1.0; the ranges are our own.
    """

    single_observation_space = spaces.Dict(
        {
            "action_mask": spaces.MultiBinary(3),
            "change": spaces.Box(-np.inf, np.inf, (1,), np.float32),
            "invested": spaces.Discrete(2),
        }
    )
    single_action_space = spaces.Discrete(3)
    parameters = {  # noqa: RUF012 - a class variable by the base class
        "max_trend": Parameter(default=0.002, low=0.0, high=0.1, unit="1/step", description="largest steady growth"),
        "max_cycle": Parameter(default=0.05, low=0.0, high=0.5, unit="1/step", description="largest cyclic growth"),
        "min_period": Parameter(default=3.0, low=2.0, high=100.0, unit="steps", description="shortest cycle"),
        "max_period": Parameter(default=12.0, low=2.0, high=100.0, unit="steps", description="longest cycle"),
        "fee": Parameter(default=0.0, low=0.0, high=0.1, unit="1", description="share of the portfolio paid a trade"),
    }
    reset_noise = 3

    def initial_state(self, parameters: Parameters, noise: Tensor) -> State:
        """Draw the trend, and the size and period of the cycle, `[num_envs]` each."""
        low, high = parameters["min_period"], parameters["max_period"]
        zeros = torch.zeros_like(noise[:, 0])
        return {
            "trend": (noise[:, 0] * 2.0 - 1.0) * parameters["max_trend"],
            "cycle": noise[:, 1] * parameters["max_cycle"],
            "frequency": 2.0 * math.pi / (low + noise[:, 2] * (high - low)),
            "phase": zeros,
            "change": zeros,
            "invested": torch.zeros_like(zeros, dtype=torch.int64),
        }

    def transition(self, state: State, actions: Tensor, parameters: Parameters, noise: Tensor) -> Outcome:
        """Trade by actions `[num_envs]`, then change the price; buying a held asset or selling none does nothing."""
        before = state["invested"]
        invested = torch.where(actions == BUY, 1, torch.where(actions == SELL, 0, before))
        growth = torch.log1p(state["cycle"] * torch.sin(state["phase"]))
        change = torch.log1p(state["trend"]) + growth
        paid = (invested != before) * torch.log1p(-parameters["fee"])
        rewards = PERCENT * (invested * change + paid)
        # Keep the phase in [0, 2 pi): float32 would lose digits of f t, which grows without end.
        phase = state["phase"] + state["frequency"]
        phase = phase - torch.floor(phase * (0.5 / math.pi)) * (2.0 * math.pi)
        state = state | {"phase": phase, "change": change, "invested": invested}
        return state, rewards, torch.zeros_like(rewards, dtype=torch.bool)

    def observe(self, state: State, parameters: Parameters) -> Observation:
        """Return the latest change `[num_envs, 1]`, whether the asset is held `[num_envs]`, a mask `[num_envs, 3]`."""
        held = state["invested"].to(torch.int8)
        return {
            "action_mask": torch.stack((torch.ones_like(held), 1 - held, held), -1),
            "change": PERCENT * state["change"].unsqueeze(-1),
            "invested": state["invested"],
        }

    def draw(self, canvas: Canvas, state: CopyState, parameters: CopyParameters, past: Past) -> None:
        """Plot the price, green while the asset was held, and the portfolio's value."""
        states = [*past, state][-_SHOWN_STEPS:]
        held = np.array([int(each["invested"]) for each in states])
        changes = np.array([float(each["change"]) for each in states])
        fees = np.abs(np.diff(held, prepend=held[0])) * math.log1p(-parameters["fee"])
        changes[0] = fees[0] = 0.0  # both courses begin where the window does
        price, portfolio = np.cumsum(changes), np.cumsum(held * changes + fees)
        low, high = min(price.min(), portfolio.min(), -0.05), max(price.max(), portfolio.max(), 0.05)
        unit = high - low
        canvas.view((-2.0, _SHOWN_STEPS + 10.0), (low - 0.1 * unit, high + 0.2 * unit), stretch=True)
        canvas.line([(-2.0, 0.0), (_SHOWN_STEPS + 10.0, 0.0)], 0.006 * unit, FAINT)
        canvas.line(list(enumerate(portfolio.tolist())), 0.014 * unit, BLUE)
        for i in range(1, len(states)):
            canvas.line([(i - 1, price[i - 1]), (i, price[i])], 0.018 * unit, GREEN if held[i] else GREY)
        now = len(states) - 1
        canvas.circle((now, float(portfolio[-1])), 0.02 * unit, BLUE)
        canvas.circle((now, float(price[-1])), 0.027 * unit, GREEN if held[-1] else GREY)
        top = high + 0.1 * unit
        canvas.text((0.0, top), "price, held", 0.06 * unit, GREEN, anchor="lm")
        canvas.text((22.0, top), "not held", 0.06 * unit, GREY, anchor="lm")
        gain = f"portfolio {PERCENT * math.expm1(portfolio[-1]):+.1f}%"
        canvas.text((40.0, top), gain, 0.06 * unit, BLUE, anchor="lm")
