import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

batch_size = 8
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(9)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, point):
        return self.main(point)


real_data = torch.randn(32, 2) * 0.3 + 1
dataloader = DataLoader(TensorDataset(real_data), batch_size=batch_size)
netG = Generator().to(device)
netD = Discriminator().to(device)
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(16, 4, device=device)
optimizerD = optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))

for epoch in range(2):
    for i, data in enumerate(dataloader, 0):
        # (1) the discriminator
        netD.zero_grad()
        real = data[0].to(device)
        label = torch.ones(real.size(0), 1, device=device)
        errD_real = criterion(netD(real), label)
        errD_real.backward()
        noise = torch.randn(real.size(0), 4, device=device)
        fake = netG(noise)
        errD_fake = criterion(netD(fake.detach()), torch.zeros_like(label))
        errD_fake.backward()
        optimizerD.step()

        # (2) the generator
        netG.zero_grad()
        errG = criterion(netD(fake), label)
        errG.backward()
        optimizerG.step()
        print('[%d][%d] D %.6f G %.6f' % (epoch, i, (errD_real + errD_fake).item(), errG.item()))

with torch.no_grad():
    print("sampled", netG(fixed_noise).sum().item())
