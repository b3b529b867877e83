"""PPO in the manner of CleanRL: one file, minibatches by index, and forward() for all of it (cured)."""
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical


def layer_init(layer, std=np.sqrt(2), bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(layer_init(nn.Linear(3, 8)), nn.Tanh(), layer_init(nn.Linear(8, 1), std=1.0))
        self.actor = nn.Sequential(layer_init(nn.Linear(3, 8)), nn.Tanh(), layer_init(nn.Linear(8, 2), std=0.01))

    def get_value(self, x):
        return self.critic(x)

    def forward(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


if __name__ == "__main__":
    torch.manual_seed(1)
    np.random.seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    agent = Agent().to(device)
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    for iteration in range(2):
        obs = torch.randn(16, 3).to(device)
        with torch.no_grad():
            actions, logprobs, _, values = agent(obs)
            returns = obs.sum(1) + 0.9 * agent.get_value(obs).view(-1)
        b_inds = np.arange(16)
        for epoch in range(2):
            np.random.shuffle(b_inds)
            for start in range(0, 16, 8):
                mb_inds = b_inds[start:start + 8]
                _, newlogprob, entropy, newvalue = agent(obs[mb_inds], actions[mb_inds])
                ratio = (newlogprob - logprobs[mb_inds]).exp()
                advantages = returns[mb_inds] - values[mb_inds].view(-1)
                pg_loss = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
                loss = pg_loss - 0.01 * entropy.mean() + ((newvalue.view(-1) - returns[mb_inds]) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    print("final", sum(p.sum().item() for p in agent.parameters()))
