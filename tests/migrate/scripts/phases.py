import argparse
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.fc1 = nn.Linear(8, hidden)
        self.drop = nn.Dropout(0.0)
        self.fc2 = nn.Linear(hidden, 4)

    def forward(self, x, labels=None):
        logits = self.fc2(self.drop(torch.relu(self.fc1(x))))
        if labels is not None:
            return nn.functional.cross_entropy(logits, labels), logits
        return logits


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--multi-gpu", action="store_true")
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--resume", default="")
    args = parser.parse_args([])
    if torch.cuda.is_available():
        torch.cuda.set_device(args.gpu)
        device = torch.device("cuda", args.gpu)
    else:
        device = torch.device("cpu")
    torch.manual_seed(11)
    x, y = torch.randn(96, 8), torch.randint(0, 4, (96,))
    loaders = {
        "train": DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16, shuffle=True),
        "val": DataLoader(TensorDataset(x[64:], y[64:]), batch_size=16),
    }
    model = Net(args.hidden)
    if args.multi_gpu and torch.cuda.device_count() > 1:
        model = nn.DataParallel(model)
    model = model.to(device)
    optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
    if args.resume:
        model.load_state_dict(torch.load(args.resume, map_location=device))
    for epoch in range(3):
        for phase in ["train", "val"]:
            if phase == "train":
                model.train()
            else:
                model.eval()
            total = 0.0
            for inputs, labels in loaders[phase]:
                inputs = inputs.to(device)
                labels = labels.to(device)
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    loss, _ = model(inputs, labels)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                total += loss.item() * inputs.size(0)
            print(f"{phase} {epoch} {total / len(loaders[phase].dataset):.6f}")
    return model


if __name__ == "__main__":
    main()
