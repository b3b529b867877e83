import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


def experiment(lr, n_epochs=2):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(2)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(5, 5)

        def forward(self, x):
            return x + torch.tanh(self.lin(x))

    def make_model():
        return nn.Sequential(Block(), Block(), nn.Linear(5, 1))

    student = make_model().to(device)
    ema = make_model().to(device)
    ema.load_state_dict(student.state_dict())
    for p in ema.parameters():
        p.requires_grad_(False)
    opt = torch.optim.SGD(student.parameters(), lr=lr)
    x = torch.randn(48, 5)
    dl = DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=8, shuffle=True)

    def update_ema(decay=0.9):
        with torch.no_grad():
            for a, b in zip(ema.parameters(), student.parameters()):
                a.mul_(decay).add_(b, alpha=1 - decay)

    def training_step(batch):
        inputs, targets = (t.to(device) for t in batch)
        out = student(inputs)
        loss = nn.functional.huber_loss(out, targets)
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_ema()
        return loss.item()

    for epoch in range(n_epochs):
        losses = [training_step(b) for b in tqdm(dl, disable=True)]
        with torch.no_grad():
            gap = (ema(x.to(device)) - student(x.to(device))).abs().mean().item()
        print(f"lr {lr} epoch {epoch} loss {sum(losses) / len(losses):.7f} gap {gap:.7f}")


for lr in (0.1, 0.01):
    experiment(lr)
