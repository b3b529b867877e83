"""A class in the manner of Lightning, and a small trainer that calls its hooks."""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

BATCH = 8


class LitClassifier(nn.Module):
    def __init__(self, hidden=16, lr=0.05):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(6, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"val_loss": F.cross_entropy(self(x), y), "acc": (self(x).argmax(1) == y).float().mean()}

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return optimizer, scheduler


class Trainer:
    def __init__(self, max_epochs, device):
        self.max_epochs = max_epochs
        self.device = device

    def fit(self, model, train_loader, val_loader):
        model = model.to(self.device)
        optimizer, scheduler = model.configure_optimizers()
        for epoch in range(self.max_epochs):
            model.train()
            for batch_idx, batch in enumerate(train_loader):
                batch = [each.to(self.device) for each in batch]
                loss = model.training_step(batch, batch_idx)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            scheduler.step()
            self.validate(model, val_loader)

    def validate(self, model, loader):
        model.eval()
        with torch.no_grad():
            outputs = []
            for i, batch in enumerate(loader):
                batch = [each.to(self.device) for each in batch]
                outputs.append(model.validation_step(batch, i))
        mean = torch.stack([each["val_loss"] for each in outputs]).mean()
        print(f"final {mean.item():.6f}")


torch.manual_seed(0)
x = torch.randn(80, 6)
y = x[:, :3].argmax(1)
model = LitClassifier()
trainer = Trainer(2, "cuda" if torch.cuda.is_available() else "cpu")
trainer.fit(model, DataLoader(TensorDataset(x[:64], y[:64]), batch_size=BATCH), DataLoader(TensorDataset(x[64:], y[64:]), 8))
