"""Ray: the rollout actor needs more processors than the cluster has. The driver waits for its first answer for ever."""

import ray
from job import ready, tell


@ray.remote(num_cpus=2)
class Trainer:
    def fit(self):
        return 1


@ray.remote(num_cpus=2)
class Rollout:
    def generate(self):
        return [1]


if __name__ == "__main__":
    tell("driver")
    ray.init(num_cpus=3, include_dashboard=False, logging_level="warning", log_to_driver=False)
    trainer, rollout = Trainer.remote(), Rollout.remote()
    ray.get(trainer.fit.remote())
    ready()
    ray.get(rollout.generate.remote())  # <- here
