"""Rare classes drawn more often by a WeightedRandomSampler; a report of the classes at the end."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_weights(labels):
    counts = np.bincount(labels)
    return torch.as_tensor(1.0 / counts[labels], dtype=torch.double)


def main():
    torch.manual_seed(4)
    x = torch.randn(80, 4)
    y = (x[:, 0] > 1).long()
    dataset = TensorDataset(x, y)
    sampler = WeightedRandomSampler(make_weights(y.numpy()), num_samples=len(dataset), replacement=True)
    train_loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    test_loader = DataLoader(dataset, batch_size=40, shuffle=False)

    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    net.to(DEVICE)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.5]).to(DEVICE))
    opt = torch.optim.Adam(net.parameters(), lr=0.02)

    for epoch in range(4):
        net.train()
        running = 0.0
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(DEVICE), labels.to(DEVICE)
            opt.zero_grad()
            loss = criterion(net(inputs), labels)
            loss.backward()
            opt.step()
            running += loss.item() * inputs.size(0)
        print(f"[{epoch + 1}] loss {running / len(dataset):.4f}")

    net.eval()
    hits, seen = [0, 0], [0, 0]
    with torch.no_grad():
        for inputs, labels in test_loader:
            predicted = net(inputs.to(DEVICE)).argmax(1).cpu()
            for label, guess in zip(labels, predicted):
                hits[label] += int(label == guess)
                seen[label] += 1
    print("final", [round(h / s, 4) for h, s in zip(hits, seen)])


if __name__ == "__main__":
    main()
