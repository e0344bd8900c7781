import argparse

import gymnasium as gym
import yaml

from puffer.cleanrl_puffer import CleanPuffeRL
from puffer.policy import Policy


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--config", default="config.yaml")
    p.add_argument("--exp-name", default="ppo")
    args = p.parse_args()
    with open(args.config) as f:
        config = yaml.safe_load(f)
    t = config["train"]
    vecenv = gym.vector.AsyncVectorEnv([lambda: gym.make(t["env_id"]) for _ in range(t["num_envs"])])
    policy = Policy(vecenv.single_observation_space.shape[0], int(vecenv.single_action_space.n), **config["policy"])
    trainer = CleanPuffeRL(args.exp_name, t, vecenv, policy)
    while trainer.global_step < t["total_timesteps"]:
        trainer.evaluate()
        trainer.train()
    trainer.save_checkpoint(config["checkpoint_dir"])
    vecenv.close()


if __name__ == "__main__":
    main()
