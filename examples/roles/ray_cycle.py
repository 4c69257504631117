"""Ray: the trainer asks the rollout for samples inside fit(), and the rollout asks the trainer for weights inside generate().
An actor runs one method at a time."""

import os

import ray
from job import ready, tell


@ray.remote(num_cpus=0)
class Trainer:
    def start(self, rollout):
        self.rollout = rollout
        return os.getpid()

    def weights(self):
        return [1.0]

    def fit(self):
        return ray.get(self.rollout.generate.remote())  # <- here


@ray.remote(num_cpus=0)
class Rollout:
    def start(self, trainer):
        self.trainer = trainer
        return os.getpid()

    def generate(self):
        return ray.get(self.trainer.weights.remote())  # <- here


if __name__ == "__main__":
    tell("driver")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False)
    trainer, rollout = Trainer.remote(), Rollout.remote()
    tell("trainer", ray.get(trainer.start.remote(rollout)))
    tell("rollout", ray.get(rollout.start.remote(trainer)))
    ready()
    ray.get(trainer.fit.remote())
