"""Super resolution in the manner of PyTorch's example: batches by index, PSNR, the whole model in a file."""
import argparse
from math import log10

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

BATCH = 4
parser = argparse.ArgumentParser(description='Super Resolution')
parser.add_argument('--upscale_factor', type=int, default=2)
parser.add_argument('--batchSize', type=int, default=BATCH)
parser.add_argument('--testBatchSize', type=int, default=3)
parser.add_argument('--nEpochs', type=int, default=2)
parser.add_argument('--cuda', action='store_true')
parser.add_argument('--seed', type=int, default=123)
opt = parser.parse_args([])
print(opt)

if opt.cuda and not torch.cuda.is_available():
    raise Exception("No GPU found, please run without --cuda")
torch.manual_seed(opt.seed)
device = torch.device("cuda" if opt.cuda else "cpu")

small = torch.rand(16, 1, 4, 4)
large = small.repeat_interleave(2, 2).repeat_interleave(2, 3)
train_set, test_set = TensorDataset(small, large), TensorDataset(small[:7], large[:7])
training_data_loader = DataLoader(dataset=train_set, num_workers=0, batch_size=opt.batchSize, shuffle=False)
testing_data_loader = DataLoader(dataset=test_set, num_workers=0, batch_size=opt.testBatchSize, shuffle=False)


def Net(upscale_factor):
    return nn.Sequential(
        nn.Conv2d(1, 4, (3, 3), (1, 1), (1, 1)),
        nn.ReLU(),
        nn.Conv2d(4, upscale_factor ** 2, (3, 3), (1, 1), (1, 1)),
        nn.PixelShuffle(upscale_factor),
    )


model = Net(upscale_factor=opt.upscale_factor).to(device)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=0.01)


def train(epoch):
    epoch_loss = 0
    for iteration, batch in enumerate(training_data_loader, 1):
        input, target = batch[0].to(device), batch[1].to(device)
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        print("===> Epoch[{}]({}/{}): Loss: {:.4f}".format(epoch, iteration, len(training_data_loader), loss.item()))
    print("===> Epoch {} Complete: Avg. Loss: {:.4f}".format(epoch, epoch_loss / len(training_data_loader)))


def test():
    avg_psnr = 0
    with torch.no_grad():
        for batch in testing_data_loader:
            input, target = batch[0].to(device), batch[1].to(device)
            prediction = model(input)
            mse = criterion(prediction, target)
            avg_psnr += 10 * log10(1 / mse.item())
    print("final {:.6f} dB".format(avg_psnr / len(testing_data_loader)))


def checkpoint(epoch):
    model_out_path = "model_epoch_{}.pth".format(epoch)
    torch.save(model, model_out_path)
    print("Checkpoint saved")


for epoch in range(1, opt.nEpochs + 1):
    train(epoch)
    test()
    checkpoint(epoch)
