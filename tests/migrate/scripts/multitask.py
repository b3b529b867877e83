"""A shared body with two heads, two losses, and metrics of both tasks."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

device = "cuda" if torch.cuda.is_available() else "cpu"


class TwoTasks(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(64, 6, generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"image": self.x[i], "kind": int(self.x[i, 0] > 0), "age": self.x[i, 1:3].sum()}


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.kind = nn.Linear(16, 2)
        self.age = nn.Linear(16, 1)

    def forward(self, x):
        h = self.body(x)
        return self.kind(h), self.age(h).squeeze(1)


def main(num_epochs=3):
    torch.manual_seed(0)
    dataloader = DataLoader(TwoTasks(), batch_size=8)
    model = MultiTask().to(device)
    kind_loss, age_loss = nn.CrossEntropyLoss(), nn.L1Loss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(num_epochs):
        loop = tqdm(dataloader, desc=f"epoch {epoch}", leave=False)
        correct = 0
        for batch in loop:
            image = batch["image"].to(device)
            kind = batch["kind"].to(device)
            age = batch["age"].float().to(device)
            optimizer.zero_grad()
            kind_logits, age_pred = model(image)
            loss_kind = kind_loss(kind_logits, kind)
            loss_age = age_loss(age_pred, age)
            (loss_kind + 0.5 * loss_age).backward()
            optimizer.step()
            correct += (kind_logits.argmax(1) == kind).sum().item()
            loop.set_postfix(kind=loss_kind.item(), age=loss_age.item())
        print(f"epoch {epoch} kind {loss_kind.item():.5f} age {loss_age.item():.5f}")
    with torch.no_grad():
        weights = sum(p.abs().sum() for p in model.parameters())
    print("final", weights.item())


if __name__ == "__main__":
    main()
