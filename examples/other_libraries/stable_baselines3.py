"""A built-in environment trained by another library: Stable-Baselines3 needs only its own names for the same things."""

from typing import Any

from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv

from rl8x.envs import CartPole, Env, NumpyEnv


class AsVecEnv(VecEnv):
    """Its vector interface; libraries that take Gymnasium's, such as skrl, get `NumpyEnv(env)` as it is."""

    def __init__(self, env: Env) -> None:
        self.env = NumpyEnv(env)
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> Any:
        return self.env.reset(seed=self._seeds[0])[0]

    def step_async(self, actions: Any) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        obs, rewards, terminated, truncated, info = self.env.step(self.actions)
        done, infos = terminated | truncated, [{} for _ in range(self.num_envs)]
        for i in done.nonzero()[0]:
            episode = {key: float(info["final_info"]["episode"][key][i]) for key in ("r", "l")}
            cut = bool(truncated[i] and not terminated[i])
            infos[i] = {"terminal_observation": info["final_obs"][i], "TimeLimit.truncated": cut, "episode": episode}
        return obs, rewards, done, infos

    def close(self) -> None:
        self.env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.env, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self.env, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [getattr(self.env, method_name)(*args, **kwargs)] * self.num_envs

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


def main(timesteps: int = 65_536) -> float:
    model = PPO("MlpPolicy", AsVecEnv(CartPole(16)), n_steps=64, batch_size=256, learning_rate=1e-3, seed=0)
    model.learn(timesteps)
    mean = sum(episode["r"] for episode in model.ep_info_buffer) / len(model.ep_info_buffer)
    print(f"mean return of the last 100 episodes: {mean:.0f}; expected: above 150")
    return mean


if __name__ == "__main__":
    main()
