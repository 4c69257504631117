"""Ray: the driver waits for the trainer actor, which waits for a reward actor that never returns."""

import os
import threading

import ray
from job import ready, tell


@ray.remote(num_cpus=0)
class Reward:
    def pid(self):
        return os.getpid()

    def score(self, step):
        if step == 3:
            threading.Event().wait()  # <- here
        return float(step)


@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self, rewards):
        self.rewards = rewards

    def pid(self):
        return os.getpid()

    def fit(self, step):
        return sum(ray.get([reward.score.remote(step * n) for n, reward in enumerate(self.rewards)]))


if __name__ == "__main__":
    tell("driver")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False)
    rewards = [Reward.remote(), Reward.remote()]
    trainer = Trainer.remote(rewards)
    for number, reward in enumerate(rewards):
        tell(f"reward{number}", ray.get(reward.pid.remote()))
    tell("trainer", ray.get(trainer.pid.remote()))
    for step in range(10):
        if step == 3:
            ready()
        ray.get(trainer.fit.remote(step))
